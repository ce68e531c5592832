"""What is left of an edit where a settings file says something, and what is wanted of a node."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from app.cluster.edits import FIELDS, Edit, Wanted, fields_of, overlay, with_fields
from app.config import NodeChange, NodeSettings
from app.model import Node

FILE = Node(
    "a", "http://a", weight=2.5, capacity=7, models=("m {x}", "n"), engine="vllm",
    api_key_env="A_KEY", slots=16, kv_tokens=5000,
)  # fmt: skip
OTHER = Node("a", "http://b", weight=1e-6, capacity=1, models=(), engine="tgi")
SAID = fields_of(FILE)


def test_what_may_be_set_is_the_same_in_files_records_and_the_admin_api() -> None:
    assert set(FIELDS) == NodeSettings.model_fields.keys() - {"id", "pool"}
    assert set(FIELDS) == NodeChange.model_fields.keys() == SAID.keys()
    assert set(FIELDS) <= {field.name for field in fields(Node)}


@pytest.mark.parametrize("node", [FILE, OTHER])
def test_a_node_and_its_fields_say_the_same(node: Node) -> None:
    assert with_fields(replace(FILE, id=node.id), fields_of(node)) == node
    assert with_fields(node, {}) == node


@pytest.mark.parametrize(
    "edit",
    [
        Edit(3, "added", SAID),
        Edit(3, "set", {"weight": "2.0", "state": "draining"}, {"weight": "1.0"}),
        Edit(3, "removed", {}, SAID),
        Edit(3, "removed"),
    ],
)
def test_an_edit_is_read_as_it_was_written(edit: Edit) -> None:
    assert Edit.parse(f"3 {edit.text}") == edit


def test_no_edit_and_one_of_nothing_are_the_same() -> None:
    assert Edit().text == Edit(kind="removed").text == "-"
    assert Edit.parse(None) == Edit(kind="removed")


HEAVY = Edit(1, "set", {"weight": "9.0", "capacity": "8", "state": "draining"}, SAID)


def wanted(file: Node | None, edit: Edit) -> Wanted | None:
    found = overlay("default", {"a": file} if file else {}, {"a": edit})
    return found.get("a")


def test_an_edit_lies_over_the_file_and_a_removed_node_is_away() -> None:
    assert wanted(FILE, Edit()) == (FILE, "config", None)
    assert wanted(FILE, HEAVY) == (replace(FILE, weight=9.0, capacity=8), "config", "draining")
    assert wanted(FILE, Edit(1, "removed", {}, SAID)) is None
    assert wanted(None, Edit(1, "added", fields_of(OTHER))) == (OTHER, "admin", None)
    assert wanted(None, HEAVY) is None
    assert wanted(None, Edit(1, "removed")) is None


@pytest.mark.parametrize("name", FIELDS)
def test_the_file_overrules_the_one_field_that_it_changes(name: str) -> None:
    changed = with_fields(FILE, {name: fields_of(OTHER)[name]})
    edit = Edit(1, "set", {**fields_of(OTHER), "state": "disabled"}, SAID)
    left = edit.against(changed)
    assert left.fields.keys() == edit.fields.keys() - {name}
    assert left.over.keys() == left.fields.keys() - {"state"}
    assert left.against(changed) == left
    removed = Edit(1, "removed", {}, SAID)
    assert removed.against(FILE) == removed
    assert removed.against(changed).text == "-"
    assert wanted(changed, removed) == (changed, "config", None)


def test_an_edit_of_an_earlier_release_knows_nothing_of_later_fields() -> None:
    before = {name: value for name, value in SAID.items() if name != "slots"}
    removed = Edit(1, "removed", {}, before)
    assert removed.against(FILE) == removed
    assert wanted(FILE, removed) is None
    assert with_fields(FILE, {"weight": "3.0"}).slots == FILE.slots


def test_a_node_that_leaves_the_file_takes_its_edits_along_and_an_added_one_stays() -> None:
    assert HEAVY.against(None).text == Edit(1, "removed", {}, SAID).against(None).text == "-"
    added = Edit(1, "added", SAID)
    assert added.against(None) == added


def test_a_node_that_was_added_and_comes_into_the_file_is_the_files() -> None:
    added = Edit(1, "added", {**fields_of(OTHER), "state": "draining"})
    assert added.against(FILE) == Edit(1, "set", {"state": "draining"})
    assert wanted(FILE, added) == (FILE, "config", "draining")
