"""Fixtures that every suite shares: a real Valkey server, emptied before each test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import redis

from tests.support.servers import ValkeyServer

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[ValkeyServer]:
    """One server for the session."""
    with ValkeyServer() as server:
        yield server


@pytest.fixture
def valkey(valkey_server: ValkeyServer) -> Iterator[redis.Redis]:
    """A client of the session's server, which is empty when the test begins."""
    with redis.Redis(port=valkey_server.port, decode_responses=True) as client:
        client.flushall()
        client.script_flush()
        yield client
