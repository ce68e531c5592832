"""``leaseway bench redis`` runs and says what it is asked for; how fast is not judged here."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "app.cli", "bench", "redis", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_every_policy_and_size_has_a_row_of_plausible_figures() -> None:
    done = bench("--policy", "work", "--policy", "ttft", "--nodes", "3", "--nodes", "40",
                 "--rounds", "2", "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    rows = {(row["policy"], row["nodes"]): row for row in report["rows"]}
    assert rows.keys() == {(p, n) for p in ("work", "ttft") for n in (3, 40)}
    for row in rows.values():
        assert 0 < row["no_op_us"] < row["acquire_us"] + row["release_us"]
        assert row["first_token_us"] > 0
        assert 10 < row["lease_bytes"] < 1000
        assert 100 < row["node_bytes"] < 200_000
    assert 20 < report["prefix_entry_bytes"] < 1000


def test_the_table_names_its_columns() -> None:
    done = bench("--policy", "work", "--nodes", "3", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    for word in ("no-op", "acquire", "release", "per lease", "prefix index"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [("--policy", "nope", "nope"), ("--nodes", "0", "--nodes"), ("--rounds", "0", "--rounds")],
)
def test_bad_arguments_are_refused_by_name(option: str, value: str, said: str) -> None:
    done = bench(option, value)
    assert done.returncode != 0
    assert said in done.stdout + done.stderr
