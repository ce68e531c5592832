"""The dashboard in a real browser, while load runs, a node dies and another one drains."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from app.admission.keys import hash_key
from tests.browser.nodes import NodeProcess
from tests.support import state
from tests.support.fleet import MODEL, Fleet
from tests.support.rawclient import RawClient, chat
from tests.support.rawnode import RawNode
from tests.support.redis_ha import load
from tests.support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Page

    from tests.browser.conftest import Open, Seen

LONG = 5_000  # tokens: over a minute on the fastest node, and three fit any KV cache
NONE = "\N{EN DASH}"  # what the page writes where there is no number
NAMES = ("a100", "rtx4090", "xeon")
PHONE = {
    "viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True,
    "color_scheme": "dark",
}  # fmt: skip
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>\"'&amp; " + "long" * 30
_CARD = """card => {
  const text = name => card.querySelector(`[data-field="${name}"]`).textContent;
  return Object.fromEntries(
    ["health", "circuit", "state", "score", "load", "p50", "p99", "share"].map(n => [n, text(n)]));
}"""


@pytest.fixture
def nodes() -> Iterator[dict[str, NodeProcess]]:
    """Three unequal nodes."""
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(NodeProcess(name, name)) for name in NAMES}


@pytest.fixture
def fleet(nodes: dict[str, NodeProcess]) -> Iterator[Fleet]:
    """Three replicas; a small window, so that shares follow fast."""
    weights = {"a100": 10, "rtx4090": 12, "xeon": 45}  # about equal scores
    listed = [node.settings(weight=weights[name]) for name, node in nodes.items()]
    with Fleet(listed, scoring={"policy": "ttft", "window": 20}) as started:
        yield started


def card(page: Page, node: str) -> dict[str, str]:
    """What the page says of a node."""
    said: dict[str, str] = page.locator(f'li[data-node="{node}"]').evaluate(_CARD)
    return said


def look(page: Page, node: str) -> str | None:
    """The colour of its card."""
    return page.locator(f'li[data-node="{node}"]').get_attribute("data-look")


def share(page: Page, node: str) -> int:
    """Percent of the traffic, of late."""
    return int(card(page, node)["share"].removesuffix(" %").replace(NONE, "0"))


def brief(value: float | None) -> str:
    """As the page writes numbers: three digits."""
    if value is None:
        return NONE
    return str(int(value + 0.5)) if value >= 100 else f"{float(f'{value:.3g}'):g}"


def told(fleet: Fleet, node: str) -> dict[str, str]:
    """What Redis says of a node, read without the project's own readers."""
    record = state.record(fleet.redis, node)
    samples = fleet.redis.lrange(state.KEYS.ttft(node), 0, -1)
    ttft_ms = sorted(int(str(sample).split(":")[0]) / 1000 for sample in samples)

    def rank(part: float) -> str:
        at = min(len(ttft_ms) - 1, int(part * len(ttft_ms)))
        return f"{brief(ttft_ms[at])} ms" if ttft_ms else NONE

    return {
        "health": record["health"],
        "circuit": record["circuit"],
        "state": record["state"],
        "score": brief(state.scores(fleet.redis, MODEL)[node]),
        "load": f"{state.load(fleet.redis, node)} / {record['capacity']}",
        "p50": rank(0.50),
        "p99": rank(0.99),
    }


def agree(page: Page, fleet: Fleet) -> Any:
    """Whether every number of every card is that of Redis now."""
    shown = {name: card(page, name) for name in NAMES}
    return all(told(fleet, name).items() <= shown[name].items() for name in NAMES)


def wait_agree(page: Page, fleet: Fleet) -> None:
    """Wait until a picture of the steady state has come."""
    wait_until(lambda: agree(page, fleet), within_s=20, what="page and Redis agree")


def assert_at_home(seen: Seen, url: str) -> None:
    """It asked nobody but its replica, and the browser had nothing to complain about."""
    assert seen.asked
    assert all(asked.startswith(f"{url}/") for asked in seen.asked), seen.asked
    assert not seen.complaints


def test_the_page_shows_a_node_die_under_load_and_another_drain(
    nodes: dict[str, NodeProcess], fleet: Fleet, open_page: Open
) -> None:
    url = fleet.urls[0]
    seen = open_page(f"{url}/dashboard")
    page = seen.page
    page.locator('li[data-node="xeon"]').wait_for()
    assert {name: look(page, name) for name in NAMES} == dict.fromkeys(NAMES, "ok")

    ports = [replica.port for replica in fleet.replicas]
    with load(ports, chat(model=MODEL, max_tokens=8), hands=6):
        wait_until(lambda: all(share(page, n) > 0 for n in NAMES), within_s=60, what="all work")
        seen.shot("load")
        before, had = share(page, "a100"), {name: nodes[name].started() for name in NAMES[1:]}
        nodes["a100"].kill()
        wait_until(lambda: look(page, "a100") == "bad", within_s=30, what="the card turns")
        wait_until(lambda: share(page, "a100") <= before / 2, within_s=60, what="traffic moves")
        dead = card(page, "a100")
        record = state.record(fleet.redis, "a100")
        assert (dead["health"], dead["score"]) == (record["health"], "0")
        assert "ok" not in dead["health"] or dead["circuit"] == "open"
        assert sum(share(page, name) for name in NAMES[1:]) >= 100 - before / 2 - 2
        assert all(nodes[name].started() > count for name, count in had.items())
        assert "a100" in page.locator("#changes li").first.inner_text()
        seen.shot("killed")
        page.emulate_media(color_scheme="dark")
        seen.shot("killed-dark")

    with contextlib.ExitStack() as held:
        for port in ports:
            client = held.enter_context(RawClient(port))
            client.send(chat(model=MODEL, max_tokens=LONG)).read_events(2)
        wait_until(lambda: len(state.leases(fleet.redis)) == 3, what="three streams run")
        wait_agree(page, fleet)
        running = state.load(fleet.redis, "rtx4090")
        assert running > 0
        drain(page, "rtx4090")
        wait_until(
            lambda: card(page, "rtx4090")["state"] == "draining", within_s=20, what="it drains"
        )
        assert state.record(fleet.redis, "rtx4090")["state"] == "draining"
        assert page.locator('li[data-node="rtx4090"] .mark').inner_text() == "draining"
        assert state.load(fleet.redis, "rtx4090") == running
        wait_agree(page, fleet)
        seen.shot("draining")
    fleet.wait_settled()
    wait_agree(page, fleet)
    assert page.locator('li[data-node="rtx4090"] .mark').inner_text() == "drained"
    page.get_by_role("button", name="Enable rtx4090").press("Enter")
    wait_until(lambda: look(page, "rtx4090") == "ok", within_s=20, what="it is back")
    assert state.record(fleet.redis, "rtx4090")["state"] == "active"
    wait_agree(page, fleet)
    assert_at_home(seen, url)


def drain(page: Page, node: str) -> None:
    """By the keyboard alone: the first answer of the question is no."""
    button = page.get_by_role("button", name=f"Drain {node}")
    button.focus()
    page.keyboard.press("Enter")
    page.get_by_role("dialog").wait_for()
    page.keyboard.press("Enter")
    page.get_by_role("dialog").wait_for(state="hidden")
    assert card(page, node)["state"] == "active"
    button.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")


@pytest.fixture
def locked() -> Iterator[Fleet]:
    """One replica that asks for keys, over three nodes that are never asked."""
    keys = [
        {"name": "ops", "hash": hash_key("sk-ops"), "admin": True},
        {"name": "app", "hash": hash_key("sk-app")},
    ]
    with RawNode() as node:
        listed = [{"id": f"b{i}", "url": node.url, "models": ["m"]} for i in range(3)]
        with Fleet(listed, replicas=1, keys=keys) as started:
            yield started


def test_on_a_phone_in_the_dark_with_a_key_and_hostile_names(
    locked: Fleet, open_page: Open
) -> None:
    url = locked.urls[0]
    record: Any = state.record(locked.redis, "b0")
    locked.redis.hset(state.KEYS.node(HOSTILE), mapping=record | {"models": f"m\n{HOSTILE}"})
    locked.redis.sadd(state.KEYS.nodes, HOSTILE)
    seen = open_page(f"{url}/dashboard", **PHONE)
    page = seen.page
    for key, said in (("sk-wrong", "Incorrect API key"), ("sk-app", "may not administer")):
        page.get_by_label("Key", exact=True).fill(key)
        page.keyboard.press("Enter")
        page.get_by_text(said).wait_for()
    seen.shot("key")
    page.get_by_label("Key", exact=True).fill("sk-ops")
    page.keyboard.press("Enter")
    page.locator("li.node").nth(3).wait_for()
    names = page.locator("#nodes h3").all_inner_texts()
    assert sorted(names) == sorted([HOSTILE, "b0", "b1", "b2"])
    wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert wide <= 0, "it scrolls sideways"
    page.get_by_role("button", name="Drain b1").click()
    page.get_by_role("dialog").get_by_role("button", name="Drain").click()
    wait_until(lambda: state.record(locked.redis, "b1")["state"] == "draining", what="it drains")
    page.locator('li[data-node="b1"][data-look="warn"]').wait_for()
    seen.shot("phone")
    kept = page.evaluate("[Object.values(sessionStorage), {...localStorage}, document.cookie]")
    assert kept == [["sk-ops"], {}, ""]
    assert all(asked.startswith(f"{url}/") and "sk-" not in asked for asked in seen.asked)
    refused = [said for said in seen.complaints if "401" in said or "403" in said]
    assert len(refused) == 3  # no key, a wrong one, one that may not
    assert seen.complaints == refused
    page.get_by_role("button", name="Forget key").click()
    page.get_by_label("Key", exact=True).wait_for()
    assert page.evaluate("sessionStorage.length") == 0


def test_the_page_says_that_redis_is_away_and_comes_back_with_it(
    locked: Fleet, open_page: Open
) -> None:
    seen = open_page(f"{locked.urls[0]}/dashboard")
    page = seen.page
    page.get_by_label("Key", exact=True).fill("sk-ops")
    page.keyboard.press("Enter")
    page.get_by_text("live, by r0").wait_for()
    locked.valkey.kill()
    page.get_by_role("alert").get_by_text("Redis is away").wait_for()
    assert page.locator("li.node").count() == 3  # the last picture stays
    page.get_by_role("button", name="Drain b1").click()
    page.get_by_role("dialog").get_by_role("button", name="Drain").click()
    page.get_by_text("b1 is not drained: Redis is away").wait_for()
    seen.shot("away")
    locked.valkey.start()
    page.get_by_text("live, by r0").wait_for()
    page.locator('li.node[data-look="ok"]').nth(2).wait_for()
    assert page.locator("#trouble").is_hidden()
