"""What the README promises is shown by tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
README = (TOP / "README.md").read_text()
TABLE = README.partition("## What happens when things fail")[2].partition("\n## ")[0]
ROWS = [line for line in TABLE.splitlines() if line.startswith("|")][2:]
LINK = re.compile(r"\]\(([^)#:]+)\)")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip()[:40])
def test_each_row_of_the_failure_table_names_tests_that_exist(row: str) -> None:
    shown_by = LINK.findall(row.rstrip("| ").rpartition("|")[2])
    assert shown_by, "a promise without a test"
    for path in shown_by:
        assert "def test_" in (TOP / path).read_text(), path


def test_every_link_of_the_readme_leads_to_a_file() -> None:
    assert [path for path in LINK.findall(README) if not (TOP / path).exists()] == []
