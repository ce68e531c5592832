"""When a content of the settings file counts; what then happens is in tests/integration."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from app.admission.keys import Keys, hash_key
from app.config import load
from app.control import reload
from app.control.reload import Reload


class Ended(Exception):  # noqa: N818 - how a story closes
    """The story of the file has been told."""


class Story:
    """A file that holds something else at every look; None is a moment without a file."""

    def __init__(self, *contents: str | None) -> None:
        self._contents = list(contents)

    def read_bytes(self) -> bytes:
        """What it holds now."""
        if not self._contents:
            raise Ended
        content = self._contents.pop(0)
        if content is None:
            raise FileNotFoundError
        return content.encode()

    def __str__(self) -> str:
        return "story.yaml"


def key(name: str) -> str:
    """A settings file with this key."""
    return f"keys: [{{name: {name}, hash: '{hash_key(name)}'}}]"


A, B, C, BAD = key("a"), key("b"), key("c"), "keys: 5"


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        ([A, A, A], []),
        ([A, A, B, B, B], ["keys: added b; removed a"]),
        ([A, B, C, A, B, C], []),  # no two looks found the same
        ([A, "", B, B], ["keys: added b; removed a"]),  # truncated, then written
        ([A, None, B, B], ["keys: added b; removed a"]),  # removed, then made anew
        ([A, B, A, A], []),
        ([B, B, A, A], ["keys: added b; removed a", "keys: added a; removed b"]),
        ([BAD] * 4, ["settings refused"]),
        ([BAD, BAD, A, A, BAD, BAD], ["settings refused", "settings refused"]),
        ([A, A, "", ""], ["settings refused"]),
        ([None, None, None], ["settings refused"]),
    ],
)
async def test_a_content_counts_once_when_two_looks_in_a_row_have_found_it(
    contents: list[str | None], said: list[str], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(reload, "_LOOK_S", 0)
    story = cast("Any", Story(*contents))
    settings = load(story, content=A.encode())
    watched = Reload(
        story, settings, port=None, keys=Keys(settings.keys), replica=cast("Any", SimpleNamespace())
    )
    with caplog.at_level(logging.INFO, "leaseway.reload"), pytest.raises(Ended):
        await watched.watch()
    assert [r.getMessage().split(",")[0] for r in caplog.records] == said
