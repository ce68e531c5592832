"""L2: multipart uploads reach the node unchanged, and answers that are no JSON pass."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.support import state
from tests.support.rawnode import raw_answer, sized
from tests.support.servers import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    import redis

    from tests.cases.conftest import StartGateway, StartNode

MIB = 1024 * 1024
SUBTITLES = "1\n00:00:00,000 --> 00:00:01,000\nhé 日\n".encode()
ROUTES = ["/v1/audio/transcriptions", "/v1/audio/translations"]

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")


def curl(url: str, *fields: str) -> subprocess.CompletedProcess[bytes]:
    """``curl -F`` as a user types it; headers of the answer on stderr."""
    command = ["curl", "-sS", "--max-time", "20", "-D", "/dev/stderr", url]
    for field in fields:
        command += ["-F", field]
    return subprocess.run(command, capture_output=True, check=True)


@pytest.mark.parametrize("kind", ["text/plain; charset=utf-8", "application/x-subrip", "text/vtt"])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("model_first", [True, False], ids=["model first", "file first"])
def test_an_upload_of_curl_is_routed_by_its_model_and_arrives_byte_for_byte(
    valkey: redis.Redis,
    gateway: StartGateway,
    raw_node: StartNode,
    tmp_path: Path,
    route: str,
    kind: str,
    model_first: bool,
) -> None:
    audio = os.urandom(2 * MIB)
    (tmp_path / "x.wav").write_bytes(audio)
    answer = raw_answer(sized(200, SUBTITLES, [(b"content-type", kind.encode())]), keep_alive=True)
    right, other = raw_node(answer), raw_node(answer)
    other.models = ("another",)
    gw = gateway([right, other], aliases={"whisper-1": "m"})
    fields = ["model=m", "response_format=srt", f"file=@{tmp_path}/x.wav;type=audio/wav"]
    done = curl(gw.url + route, *(fields if model_first else fields[::-1]))

    assert done.stdout == SUBTITLES
    assert b"HTTP/1.1 200" in done.stderr
    assert f"content-type: {kind}".encode() in done.stderr.lower()
    assert other.requests == []
    (seen,) = right.requests
    assert seen.target == route
    content_type = seen.header(b"content-type") or b""
    boundary = content_type.partition(b"boundary=")[2]
    assert content_type.startswith(b"multipart/form-data")
    # What curl wrote: each part between the boundaries that its own header names.
    parts = seen.body.split(b"--" + boundary)
    assert (parts[0], parts[-1]) == (b"", b"--\r\n")
    assert any(part.endswith(b"\r\n\r\n" + audio + b"\r\n") for part in parts)
    assert len(parts) == 5
    assert len(seen.body) == int(seen.header(b"content-length") or 0)
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")


@pytest.mark.parametrize("route", ROUTES)
def test_an_alias_changes_the_field_and_not_one_byte_more(
    valkey: redis.Redis,
    gateway: StartGateway,
    raw_node: StartNode,
    tmp_path: Path,
    route: str,
) -> None:
    audio = b"whisper-1" + os.urandom(MIB)
    (tmp_path / "x.wav").write_bytes(audio)
    node = raw_node()
    gw = gateway([node], aliases={"whisper-1": "m"})
    file = f"file=@{tmp_path}/x.wav"
    curl(gw.url + route, file, "prompt=whisper-1", "model=whisper-1")
    curl(gw.url + route, file, "prompt=whisper-1", "model=m")
    aliased, plain = node.requests
    boundaries = [
        (r.header(b"content-type") or b"").partition(b"boundary=")[2] for r in (aliased, plain)
    ]
    assert aliased.body.replace(boundaries[0], boundaries[1]) == plain.body
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")


def test_a_form_without_a_model_is_told_so_and_reaches_no_node(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    node = raw_node()
    gw = gateway([node])
    done = curl(gw.url + ROUTES[0], "file=abc", "response_format=srt")
    assert b"HTTP/1.1 400" in done.stderr
    assert b'"param":"model"' in done.stdout
    assert node.requests == []
    assert state.unloaded(valkey)
