"""Real clients through real replicas: each gets what it would get from the node itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.clients.conformance import read_page, rows
from tests.clients.run import CLIENTS, Client, Report, cluster, compare
from tests.support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.fleet import Fleet, Nodes


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[Fleet, Nodes]]:
    """One cluster for all clients, which must be idle once they are done."""
    with cluster() as (fleet, nodes):
        yield fleet, nodes
        fleet.wait_settled()
        wait_until(lambda: not any(nodes.open().values()), what="no node works for nobody")


@pytest.fixture(scope="module", params=CLIENTS, ids=lambda client: client.name)
def client(request: pytest.FixtureRequest) -> Client:
    """A client that can run here."""
    chosen: Client = request.param
    if chosen.missing:
        pytest.skip(chosen.missing)
    return chosen


@pytest.fixture(scope="module")
def reports(client: Client, running: tuple[Fleet, Nodes]) -> tuple[Report, Report]:
    """What the client saw through the gateway, and directly."""
    return compare(client, *running)


def test_every_call_has_through_the_gateway_the_result_it_has_directly(
    reports: tuple[Report, Report],
) -> None:
    through, direct = reports
    assert [line.call for line in through.lines] == [line.call for line in direct.lines]
    failed = [line for line in direct.lines if line.result != "ok"]
    assert not failed, "without the gateway: " + "\n".join(map(str, failed))
    pairs = zip(through.lines, direct.lines, strict=True)
    wrong = [f"{seen}\n  is not {meant}" for seen, meant in pairs if seen != meant]
    assert not wrong, "\n".join(wrong)


def test_the_conformance_page_says_what_the_client_does_now(
    client: Client, reports: tuple[Report, Report]
) -> None:
    through, direct = reports
    version, table = read_page()[through.client]
    assert table == rows(through, direct), "make conformance"
    if client.pinned:
        assert version.split(",")[0] == through.version.split(",")[0], "make conformance"


def test_the_conformance_page_has_no_clients_but_these() -> None:
    assert len(read_page()) == len(CLIENTS)
