"""Names of Redis keys, exactly as documented; API keys and what a caller is told."""

from __future__ import annotations

import hashlib
import inspect as source_of
import json
from datetime import UTC, datetime, timedelta

import pytest

from app.admission import keys as admission
from app.admission.keys import Keys, hash_key
from app.cluster.engines import without_key
from app.config import KeySettings
from app.errors import ApiError
from app.gateway.shape import error_body
from app.keys import pool_keys
from app.model import Node

# Redis keys


def test_redis_keys_are_the_documented_ones() -> None:
    keys = pool_keys("lw", "default")
    assert keys.nodes == "lw:{default}:nodes"
    assert keys.node("gpu-1") == "lw:{default}:node:gpu-1"
    assert keys.active("gpu-1") == "lw:{default}:active:gpu-1"
    assert keys.ttft("gpu-1") == "lw:{default}:ttft:gpu-1"
    assert keys.score("llama3") == "lw:{default}:score:llama3"
    assert keys.due("llama3") == "lw:{default}:due:llama3"
    assert keys.leases("replica-1") == "lw:{default}:leases:replica-1"
    assert keys.limit("team-a") == "lw:{default}:limit:team-a"
    assert keys.replicas == "lw:{default}:replicas"
    assert keys.turn == "lw:{default}:turn"


def test_scripts_build_the_same_names_from_the_prefix() -> None:
    keys = pool_keys("lw", "default")
    assert keys.prefix == "lw:{default}:"
    assert keys.prefix + "node:gpu-1" == keys.node("gpu-1")
    assert keys.prefix + "leases:" + "r" == keys.leases("r")


def test_a_pool_is_a_hash_tag_and_the_namespace_a_prefix() -> None:
    keys = pool_keys("staging", "east")
    names = [keys.nodes, keys.node("a"), keys.active("a"), keys.ttft("a"), keys.score("a{b}")]
    names += [keys.due("m"), keys.leases("r"), keys.replicas, keys.turn, keys.limit("k")]
    for name in names:
        assert name.startswith("staging:{east}:")
        assert name[name.index("{") + 1 : name.index("}")] == "east"  # what a cluster hashes
    assert len(set(names)) == len(names)


# API keys

ALICE = KeySettings(name="alice", hash=hash_key("sk-alice"), models=["llama3"])
ROOT = KeySettings(name="root", hash=hash_key("sk-root"), admin=True)
UMLAUT = KeySettings(name="umlaut", hash=[hash_key("schlüssel-密钥"), hash_key("sk-umlaut")])
KEYS = Keys([ALICE, ROOT, UMLAUT])


def told(error: ApiError) -> dict[str, str | None]:
    """What the client gets to see."""
    shape = json.loads(error_body(error))["error"]
    assert set(shape) == {"message", "type", "param", "code"}
    return dict(shape)


def bearer(key: str) -> dict[bytes, bytes]:
    return {b"authorization": b"Bearer " + key.encode()}


def test_a_hash_is_sha256_of_the_keys_bytes_in_hex() -> None:
    assert hash_key("sk-alice") == "sha256:" + hashlib.sha256(b"sk-alice").hexdigest()
    assert hash_key("") == (
        "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    )
    assert hash_key("schlüssel") == "sha256:" + hashlib.sha256("schlüssel".encode()).hexdigest()
    assert KeySettings(name="a", hash=hash_key("x")).hash == hash_key("x")  # the settings take it


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        (bearer("sk-alice"), "alice"),
        ({b"authorization": b"bearer  sk-alice "}, "alice"),
        ({b"authorization": b"BEARER sk-root"}, "root"),
        ({b"x-api-key": b"sk-root"}, "root"),
        ({b"x-api-key": b" sk-root "}, "root"),
        ({b"authorization": b"Basic eDp5", b"x-api-key": b"sk-alice"}, "alice"),
        ({b"authorization": b"Bearer ", b"x-api-key": b"sk-alice"}, "alice"),
        (bearer("schlüssel-密钥"), "umlaut"),
        (bearer("sk-umlaut"), "umlaut"),  # while a key is rotated both are good
    ],
)
def test_a_known_key_is_found(headers: dict[bytes, bytes], name: str) -> None:
    found = KEYS.identify(headers)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({}, "No API key provided."),
        ({b"authorization": b""}, "No API key provided."),
        ({b"authorization": b"Bearer"}, "No API key provided."),
        ({b"authorization": b"Basic c2stYWxpY2U6"}, "No API key provided."),
        (bearer("sk-alicE"), "Incorrect API key provided."),
        (bearer("sk-alice sk-root"), "Incorrect API key provided."),
        (bearer(ALICE.hashes[0]), "Incorrect API key provided."),
        ({b"x-api-key": b"\xff\xfe"}, "Incorrect API key provided."),
    ],
)
def test_an_unknown_key_is_a_401_that_does_not_repeat_it(
    headers: dict[bytes, bytes], message: str
) -> None:
    with pytest.raises(ApiError) as caught:
        KEYS.identify(headers)
    assert caught.value.status == 401
    assert told(caught.value) == {
        "message": message,
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_api_key",
    }


def test_a_key_expires_at_its_instant_and_the_401_says_so() -> None:
    ends = datetime(2027, 12, 31, 18, tzinfo=UTC)
    now = ends - timedelta(microseconds=1)
    key = KeySettings(name="guest", hash=hash_key("sk-guest"), expires=ends)
    keys = Keys([key, ALICE], now=lambda: now)
    assert keys.identify(bearer("sk-guest")) is key
    now = ends
    with pytest.raises(ApiError) as caught:
        keys.identify(bearer("sk-guest"))
    assert caught.value.status == 401
    assert told(caught.value) == {
        "message": "This API key has expired.",
        "type": "invalid_request_error",
        "param": None,
        "code": "api_key_expired",
    }
    assert keys.identify(bearer("sk-alice")) is ALICE
    with pytest.raises(ApiError, match="Incorrect"):
        keys.identify(bearer("sk-guess"))


def test_replaced_keys_count_from_the_next_request() -> None:
    keys = Keys([ALICE])
    keys.replace([ROOT])
    assert keys.identify(bearer("sk-root")) is ROOT
    with pytest.raises(ApiError, match="Incorrect"):
        keys.identify(bearer("sk-alice"))
    keys.replace([])
    assert keys.open


def test_without_keys_everyone_is_let_in() -> None:
    nobody = Keys([])
    assert nobody.open
    assert not KEYS.open
    assert nobody.identify({}) is None
    nobody.require_admin({})
    nobody.require_model(None, "anything")


def test_a_key_may_use_its_models_only() -> None:
    Keys.require_model(ALICE, "llama3")
    Keys.require_model(ROOT, "anything")
    with pytest.raises(ApiError) as caught:
        Keys.require_model(ALICE, "gpt")
    assert caught.value.status == 403
    assert told(caught.value) == {
        "message": "This key may not use the model 'gpt'.",
        "type": "permission_error",
        "param": "model",
        "code": "model_not_allowed",
    }


def test_a_key_with_an_empty_list_of_models_may_use_none() -> None:
    nothing = KeySettings(name="nothing", hash=hash_key("x"), models=[])
    with pytest.raises(ApiError):
        Keys.require_model(nothing, "llama3")


def test_only_an_admin_key_administers() -> None:
    KEYS.require_admin(bearer("sk-root"))
    with pytest.raises(ApiError) as caught:
        KEYS.require_admin(bearer("sk-alice"))
    assert caught.value.status == 403
    assert told(caught.value) == {
        "message": "This key may not administer.",
        "type": "permission_error",
        "param": None,
        "code": "not_admin",
    }
    with pytest.raises(ApiError) as caught:
        KEYS.require_admin({})
    assert caught.value.status == 401


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def spy(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr(admission, "compare_digest", spy)
    for key in ("sk-alice", "sk-root", "sk-nobody"):
        compared.clear()
        try:
            KEYS.identify(bearer(key))
        except ApiError:
            assert key == "sk-nobody"
        # All keys, whichever matches, and hashes only: the length of a key shows nothing.
        hashes = [one.encode() for key in (ALICE, ROOT, UMLAUT) for one in key.hashes]
        assert [one for one, _ in compared] == hashes
        assert {len(other) for _, other in compared} == {71}
    assert "hash ==" not in source_of.getsource(admission)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("bad key nk-0123456789 given", "bad key (hidden) given"),
        ("nk-0123456789, nk-0123456789", "(hidden), (hidden)"),
        ("cut off in nk-012345", "cut off in (hidden)"),
        ("cut off in nk-", "cut off in nk-"),
        ("nothing", "nothing"),
        ("", ""),
    ],
)
def test_a_nodes_key_is_hidden_in_what_the_node_says(
    monkeypatch: pytest.MonkeyPatch, text: str, shown: str
) -> None:
    monkeypatch.setenv("TEST_NODE_KEY", "nk-0123456789")
    assert without_key(Node("a", "http://a", api_key_env="TEST_NODE_KEY"), text) == shown
    assert without_key(Node("a", "http://a", api_key_env="TEST_NO_SUCH"), text) == text
    assert without_key(Node("a", "http://a"), text) == text
