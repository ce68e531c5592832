"""The documents say what is there: links lead somewhere, generated pages are fresh, keys are all.

What their code blocks do is in tests/integration/test_snippets.py.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from app.config import Settings
from app.keys import PoolKeys
from app.lab import settings_page
from tests.support.snippets import DOCUMENTS, TOP, documented_keys, snippets

if TYPE_CHECKING:
    from pathlib import Path

LANGUAGES = {"sh", "python", "yaml", "json", ""}
PROSE = [*DOCUMENTS, TOP / "README.zh-CN.md", TOP / "CHANGELOG.md"]
SETTINGS = (TOP / "config/leaseway.yaml").read_text()


def anchors(document: Path) -> set[str]:
    """The anchors of its headings, as GitHub makes them."""
    text = re.sub(r"(?ms)^```.*?^```$", "", document.read_text())
    titles = re.findall(r"(?m)^#+ (.*)$", text)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", [d for d in PROSE if d.exists()], ids=lambda d: d.name)
def test_every_link_leads_to_a_file_and_a_heading(document: Path) -> None:
    text = re.sub(r"(?ms)^```.*?^```$", "", document.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (document.parent / path).resolve() if path else document
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


def test_every_alert_leads_to_a_runbook() -> None:
    rules = (TOP / "deploy/prometheus/alerts.yaml").read_text()
    links = re.findall(r"runbook: (\S+)#(\S+)", rules)
    assert links
    assert [(p, a) for p, a in links if a not in anchors(TOP / p)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(TOP)))
def test_every_code_block_is_run_or_says_why_not(document: Path) -> None:
    fences = re.findall(r"(?m)^```", document.read_text())
    found = snippets(document)
    assert len(found) * 2 == len(fences), "a block that is not found"
    for block in found:
        assert block.language in LANGUAGES, f"{block.where}: {block.language}"
        assert not block.unrun or len(block.unrun.split()) >= 4, f"{block.where}: why?"


def test_the_configuration_reference_is_fresh() -> None:
    stale = "run `python -m app.lab.settings_page`"
    assert settings_page.PAGE.read_text() == settings_page.page(SETTINGS), stale


def test_the_configuration_reference_needs_words_for_every_setting() -> None:
    silent = re.sub(r"(?m)^  ttl_s: .*\n", "", SETTINGS)
    assert silent != SETTINGS
    with pytest.raises(KeyError, match=r"leases\.ttl_s"):
        settings_page.page(silent)


def keys_in_code() -> dict[str, str]:
    """The same from app/keys.py, with the type that its comments tell ("" where they do not)."""
    source = (TOP / "app/keys.py").read_text()
    keys, found = PoolKeys("lw", "pool"), {}
    for name in dir(PoolKeys):
        if name.startswith("_") or name in {"prefix", "leases_prefix"}:
            continue
        member = getattr(keys, name)
        key = member("<>") if callable(member) else member
        said = re.search(rf'(?:self\.{name} = .*# |def {name}\(.*\n\s+""")([A-Z]+):', source)
        found[key.removeprefix("lw:{pool}:")] = said[1].lower() if said else ""
    return found


def test_the_key_reference_has_every_key_and_no_other() -> None:
    page = {re.sub(r"<\w+>", "<>", key): kind for key, kind in documented_keys().items()}
    code = keys_in_code()
    assert set(page) == set(code)
    assert {key: page[key] for key, kind in code.items() if kind not in {"", page[key]}} == {}
    assert sum(kind != "" for kind in code.values()) > 10  # the comments were found


def shape(text: str) -> list[dict[str, object]]:
    """What two languages have in common, section by section: everything but the words."""
    found: list[dict[str, object]] = []
    for block in snippets(TOP / "README.md", text):
        text = text.replace(f"```{block.language}\n{block.text}```", f"BLOCK {block.text!r}")
    for part in re.split(r"(?m)^(?=#)", text):
        prose = re.sub(r"(?m)^BLOCK .*$", "", part)
        found.append(
            {
                "level": len(part) - len(part.lstrip("#")),
                "blocks": re.findall(r"(?m)^BLOCK .*$", part),
                "links": sorted(re.findall(r"\]\(([^)\s]+)\)", prose)),
                "rows": len(re.findall(r"(?m)^\|", prose)),
                "code": set(re.findall(r"`([^`]+)`", prose.replace("\n", " "))),
            }
        )
    return found


def in_step(english: str, chinese: str) -> list[dict[str, object]]:
    """What the Chinese page has otherwise than the English one."""
    chinese = chinese.replace("](README.md)", "](README.zh-CN.md)", 1)
    ours, theirs = shape(english), shape(chinese)
    assert len(ours) == len(theirs), "one has a section that the other has not"
    return [
        {name: (one[name], other[name]) for name in one if one[name] != other[name]}
        for one, other in zip(ours, theirs, strict=True)
        if one != other
    ]


def test_the_chinese_readme_is_in_step() -> None:
    english = (TOP / "README.md").read_text()
    chinese = (TOP / "README.zh-CN.md").read_text()
    assert in_step(english, chinese) == []
    assert len(re.findall(r"[\u4e00-\u9fff]", chinese)) > 2000
    for ours, changed in (
        ("| `retries.max_attempts` | 3 |", "| `retries.max_tries` | 3 |"),
        ("(docs/security.md)", "(docs/redis-keys.md)"),
        ("make run\n", "make up\n"),
        ("| **lease** |", "| **more** | |\n| **lease** |"),
    ):
        assert ours in english
        assert in_step(english.replace(ours, changed), chinese), ours


def test_the_settings_of_the_readme_have_the_defaults_of_the_model() -> None:
    table = (TOP / "README.md").read_text().partition("\n## Settings\n")[2].partition("\n## ")[0]
    rows = re.findall(r"(?m)^\| (`\w+\.\w+`(?:, `\w+\.\w+`)*) \| (.*?) \|", table)
    told = {
        name: said.strip("`")
        for names, cell in rows
        for name, said in zip(re.findall(r"`([\w.]+)`", names), cell.split(", "), strict=True)
    }
    assert len(told) > 30
    model = Settings().model_dump()
    for name, said in told.items():
        section, _, field = name.partition(".")
        default = model[section][field]
        as_told = "none" if default in (None, []) else default
        assert str(as_told).lower().removesuffix(".0") == said.removesuffix(".0"), name
