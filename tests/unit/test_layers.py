"""The shape of the code: imports go downward, Redis has one door, key names have one address."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from app.keys import PoolKeys

ROOT = Path(__file__).parents[2]
APP = ROOT / "app"
SOURCES = sorted(APP.rglob("*.py"))

# From the top down (DESIGN, section 10). Members of one row do not import each other, save what
# SIDEWAYS allows; a unit may always import itself.
ROWS = (
    ("cli",),
    ("main",),
    ("control", "console", "lab"),
    ("gateway",),
    ("admission",),
    ("cluster",),
    ("telemetry",),
    ("keys", "config"),
    ("model", "errors"),
)
SIDEWAYS = {("errors", "model")}
RANK = {unit: row for row, units in enumerate(ROWS) for unit in units}
REDIS_MODULES = {"redis", "hiredis", "valkey"}
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "manager", "common", "misc"}


def unit_of(path: Path) -> str:
    """The unit of a source file: the first name below ``app``."""
    first = path.relative_to(APP).parts[0]
    return first.removesuffix(".py")


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported(tree: ast.Module, path: Path) -> set[str]:
    """Every module that is imported anywhere in a file, dotted; TYPE_CHECKING included."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            # `from app import main` names its units after the `import`.
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def app_units(modules: set[str]) -> set[str]:
    return {name.split(".")[1] for name in modules if name.startswith("app.")}


def upward(unit: str, modules: set[str]) -> set[str]:
    """Units that ``unit`` must not import, of those it does."""
    return {
        other
        for other in app_units(modules)
        if other != unit and RANK[other] <= RANK[unit] and (unit, other) not in SIDEWAYS
    }


def texts(tree: ast.Module) -> list[tuple[int, str]]:
    """All string literals but docstrings; an f-string is one text with ``{}`` for its values."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
        and isinstance(node.body[0].value, ast.Constant)
    }
    inside = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in ast.walk(node)
        if part is not node
    }
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if id(node) in docstrings | inside:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = (p.value if isinstance(p, ast.Constant) else "{}" for p in node.values)
            found.append((node.lineno, "".join(map(str, parts))))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
            value = node.value
            text = value if isinstance(value, str) else value.decode("latin-1")
            found.append((node.lineno, text))
    return found


def kinds() -> dict[str, str]:
    """What ``app/keys.py`` calls the keys of a pool: kind → "key" or "prefix"."""
    keys = PoolKeys("lw", "p")
    found: dict[str, str] = {}
    for name in dir(PoolKeys):
        if name.startswith("_") or name == "prefix":
            continue
        member = getattr(keys, name)
        key = member("X") if callable(member) else member
        assert key.startswith("lw:{p}:"), name
        kind, colon, _ = key.removeprefix("lw:{p}:").partition(":")
        found[kind] = "prefix" if colon else "key"
    return found


# A text that could be (part of) a key built by hand. ``nodes: …`` alone is prose of messages.
HAND_MADE = re.compile(
    r"\blw:|\{(?:\{\}|default)\}:|:(?:node|active|ttft|score|due|leases|queue|prefix):"
    r"|^(?:node|active|ttft|score|due|leases|queue|prefix):(?:$|\S)"
)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_downward_only(path: Path) -> None:
    if path == APP / "__init__.py":
        assert path.read_text(encoding="utf-8").strip() == ""
        return
    assert not upward(unit_of(path), imported(tree_of(path), path))


def test_every_unit_has_a_row() -> None:
    units = {unit_of(path) for path in SOURCES} - {"__init__"}
    assert units <= RANK.keys(), f"place in the layers: {units - RANK.keys()}"


def test_only_cluster_talks_to_redis() -> None:
    talkers = {
        unit_of(path)
        for path in SOURCES
        if {name.split(".")[0] for name in imported(tree_of(path), path)} & REDIS_MODULES
    }
    assert talkers == {"cluster"}


def test_no_module_has_a_vague_name() -> None:
    names = {path.stem for path in SOURCES} | {path.parent.name for path in SOURCES}
    assert not names & VAGUE_NAMES


def test_key_names_are_built_in_one_file_only() -> None:
    by_hand = [
        f"{path.relative_to(ROOT)}:{line}: {text!r}"
        for path in SOURCES
        if path != APP / "keys.py"
        for line, text in texts(tree_of(path))
        if HAND_MADE.search(text) and "redis-cli" not in text  # what a help text tells to try
    ]
    assert not by_hand


@pytest.mark.parametrize("path", sorted((ROOT / "lua").glob("*.lua")), ids=lambda path: path.name)
def test_scripts_use_the_key_names_of_keys_py_only(path: Path) -> None:
    source = re.sub(r"--[^\n]*", "", path.read_text(encoding="utf-8"))
    built = re.findall(r"prefix \.\. (\S+)", source)
    for literal in built:
        found = re.match(r"'([a-z]+)(:?)'", literal)
        assert found, f"prefix .. {literal}: name the key in the same expression"
        kind = "prefix" if found[2] else "key"
        assert kinds().get(found[1]) == kind, f"{literal} is not in app/keys.py"
    assert "lw:" not in source


def test_this_file_would_notice() -> None:
    """The checks above bite: each is shown what it must refuse."""
    tree = ast.parse(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from app.gateway.path import DataPlane\n"
        "def f():\n    import app.cli\n    from app import errors\n"
    )
    assert upward("cluster", imported(tree, APP)) == {"gateway", "cli"}
    assert upward("model", {"app.errors.X"}) == {"errors"}
    assert upward("errors", {"app.model.Outcome"}) == set()
    assert upward("lab", {"app.control.plane", "app.cluster.link"}) == {"control"}
    assert upward("config", {"app.keys.pool_keys"}) == {"keys"}
    for source in ("f'{ns}:{{{pool}}}:nodes'", "'lw:x'", "prefix + 'score:'", "b'active:%s'"):
        assert any(HAND_MADE.search(text) for _, text in texts(ast.parse(f"x = {source}"))), source
    assert not HAND_MADE.search("nodes: id 'a' is given twice; each needs its own")
