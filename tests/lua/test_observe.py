"""What probes and replicas see of a node, and what becomes of it (CASES F1, F2, F3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.lua.oracle import Tuning
from tests.lua.pool import T0, Pool

if TYPE_CHECKING:
    from collections.abc import Callable

    import redis

    from app.config import Policy

CIRCUIT = ("circuit", "cause", "trial", "streak", "bad", "seen", "opens", "tripped_at_ms")


@pytest.fixture
def pool(valkey: redis.Redis) -> Pool:
    """Node a; three misses take it out."""
    pool = Pool(valkey)
    pool.register("a")
    return pool


def see(pool: Pool, *verdicts: str, node: str = "a") -> str:
    """One verdict after another, 5 s apart: the health after the last."""
    health = ""
    for verdict in verdicts:
        pool.later(5000)
        _, health = pool.observe(node, verdict)
    return health


def sampled(pool: Pool, *samples_us: int, node: str = "a") -> None:
    """Requests one after another that leave these samples on a node."""
    others = pool.client.smembers(pool.keys.nodes) - {node}
    for sample_us in samples_us:
        assert pool.acquired("sample", tried=others) == node
        pool.first_token("sample", sample_us)
        pool.release("sample")


def circuit(pool: Pool, node: str = "a") -> tuple[dict[str, str], float | None]:
    """All of a circuit, and when it is due."""
    record = pool.record(node)
    return {name: record.get(name, "") for name in CIRCUIT}, pool.due(node)


# Misses


@pytest.mark.parametrize("misses", [1, 2, 3, 5])
def test_so_many_misses_in_a_row_take_a_node_out_and_not_one_less(
    valkey: redis.Redis, misses: int
) -> None:
    pool = Pool(valkey, Tuning(unhealthy_after=misses))
    pool.register("a")
    for i in range(1, misses):
        assert tuple(pool.observe("a", "miss")) == ("ok", "ok")
        assert (pool.score("a"), pool.record("a")["misses"]) == (0.5, str(i))
    assert tuple(pool.observe("a", "miss")) == ("ok", "down")
    assert pool.score("a") == 0
    assert tuple(pool.observe("a", "miss")) == ("down", "down")


@pytest.mark.parametrize("between", ["ready", "alive", "loading"])
def test_whatever_shows_life_starts_the_count_of_misses_anew(pool: Pool, between: str) -> None:
    see(pool, "miss", "miss", between)
    assert int(pool.record("a")["misses"]) <= 0
    see(pool, "ready", "miss", "miss")
    assert (pool.record("a")["health"], pool.score("a")) == ("ok", 0.5)
    assert see(pool, "miss") == "down"


def test_a_wait_is_no_sign_of_life(pool: Pool) -> None:
    see(pool, "miss", "miss")
    pool.observe("a", "waiting", waiting_ms=3000, valid_ms=3000)
    assert see(pool, "miss") == "down"


@pytest.mark.parametrize("seen", [["miss", "alive"], ["miss", "ready"], ["miss", "miss", "alive"]])
def test_a_busy_node_whose_probes_are_late_never_changes_its_state(
    pool: Pool, seen: list[str]
) -> None:
    for _ in range(30):
        assert see(pool, *seen) == "ok"
        assert pool.score("a") == 0.5


def test_where_one_miss_takes_a_node_out_bytes_since_the_last_probe_excuse_it(
    valkey: redis.Redis,
) -> None:
    pool = Pool(valkey, Tuning(unhealthy_after=1))
    pool.register("a")
    for _ in range(10):
        assert see(pool, "alive", "miss") == "ok"
        assert see(pool, "alive", "alive", "ready", "alive", "miss") == "ok"
    assert see(pool, "miss") == "down"
    see(pool, "ready", "alive")
    assert see(pool, "ready", "miss") == "down"  # bytes from before a good probe are past


def test_bytes_do_not_bring_a_node_back_that_is_down_and_one_good_probe_does(pool: Pool) -> None:
    assert see(pool, "miss", "miss", "miss", "alive", "alive") == "down"
    assert pool.score("a") == 0
    pool.later(1000)
    assert tuple(pool.observe("a", "ready")) == ("down", "ok")
    assert pool.score("a") == 0.5
    assert pool.record("a")["since_ms"] == str(pool.now)
    assert pool.acquired("x") == "a"
    came = pool.record("a")["since_ms"]
    see(pool, "ready")
    assert pool.record("a")["since_ms"] == came  # it was back already


def test_a_verdict_keeps_what_runs_and_what_was_learned(pool: Pool) -> None:
    sampled(pool, 40_000)
    pool.acquired("x")
    see(pool, "miss", "miss", "miss", "ready")
    assert pool.active("a") == 1
    assert pool.record("a")["samples"] == "1"
    pool.now = T0 + 1
    pool.observe("a", "ready")
    assert pool.score("a") == pytest.approx(50 / 40 / 2)


# New and loading nodes


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        ([], ["new", "20"]),  # its first probe is on its way: the answer is worth a wait
        (["alive"] * 3, ["new", "20"]),
        (["miss"] * 9, ["down", "1000"]),
        (["loading"], ["down", "1000"]),
        (["miss", "loading"], ["down", "1000"]),
    ],
)
def test_a_new_node_gets_nothing_before_its_first_good_probe(
    valkey: redis.Redis, seen: list[str], said: list[str]
) -> None:
    pool = Pool(valkey)
    pool.register("a", health="new")
    see(pool, *seen)
    assert pool.score("a") == 0
    assert pool.acquire("x") == said
    assert see(pool, "ready") == "ok"
    assert pool.acquired("x") == "a"


@pytest.mark.parametrize(
    ("field", "value"), [("capacity", "0"), ("state", "draining"), ("cooling_until_ms", "9e15")]
)
def test_no_one_waits_for_the_first_probe_of_a_node_that_could_not_be_used_then(
    valkey: redis.Redis, field: str, value: str
) -> None:
    pool = Pool(valkey)
    pool.register("a", health="new")
    valkey.hset(pool.keys.node("a"), field, value)
    assert pool.acquire("x")[0] == "down"


def test_a_new_node_is_waited_for_before_a_request_is_told_that_all_others_are_full(
    pool: Pool,
) -> None:
    pool.register("a", capacity="1")
    pool.acquired("x")
    pool.register("b", health="new")
    assert pool.acquire("y")[0] == "new"


def test_a_replica_that_starts_does_not_make_a_known_node_new_again(pool: Pool) -> None:
    assert pool.register("a", health="new")[0] == "same"
    assert pool.score("a") == 0.5
    see(pool, "miss", "miss", "miss")
    assert pool.register("a", health="ok")[0] == "same"
    assert pool.record("a")["health"] == "down"


def test_a_node_added_anew_after_its_removal_is_as_healthy_as_the_call_says(pool: Pool) -> None:
    see(pool, "miss", "miss", "miss")
    pool.acquired("x")
    pool.unregister("a")
    pool.register("a", health="new")
    assert (pool.record("a")["health"], pool.record("a").get("misses", "0")) == ("new", "0")
    assert pool.active("a") == 1  # of its former life, until it ends


def test_a_loading_node_gets_no_request_and_its_closed_circuit_learns_nothing(pool: Pool) -> None:
    before = circuit(pool)
    assert see(pool, *["loading"] * 20) == "loading"
    assert circuit(pool) == before
    assert pool.score("a") == 0
    assert pool.acquire("x") == ["down", "1000"]
    assert see(pool, "ready") == "ok"
    assert pool.acquired("x") == "a"


def opened(pool: Pool) -> None:
    """Open the circuit of the only node, for 2 s."""
    for _ in range(3):
        pool.acquired("x")
        pool.release("x", "failed")
    assert pool.record("a")["circuit"] == "open"


@pytest.mark.parametrize("verdict", ["loading", "miss", "alive", "ready", "waiting"])
def test_no_verdict_opens_closes_or_lengthens_a_circuit(pool: Pool, verdict: str) -> None:
    closed = circuit(pool)
    for _ in range(10):
        pool.observe("a", verdict, waiting_ms=9000, valid_ms=1)
    assert circuit(pool) == closed
    pool.observe("a", "ready")
    opened(pool)
    is_open = circuit(pool)
    for _ in range(10):
        pool.later(150)
        pool.observe("a", verdict, waiting_ms=9000, valid_ms=1)
    assert circuit(pool) == is_open
    pool.observe("a", "ready")
    pool.later(500)
    assert pool.acquire("trial")[3] == "1"


def test_a_trial_waits_for_a_node_that_loads_but_its_back_off_does_not_grow(pool: Pool) -> None:
    opened(pool)
    for _ in range(20):
        pool.later(1000)
        pool.observe("a", "loading")
        assert pool.acquire("x")[0] == "down"
    before = circuit(pool)[0]
    assert before["opens"] == "1"
    pool.observe("a", "ready")
    pool.later(2000)  # the open time at most, whatever it has missed
    assert pool.acquire("trial")[3] == "1"
    pool.release("trial", "ok")
    assert pool.record("a")["circuit"] == "closed"


def test_a_trial_that_was_put_off_while_the_node_loaded_is_due_at_once_when_it_is_ready(
    pool: Pool,
) -> None:
    opened(pool)
    pool.observe("a", "loading")
    pool.later(2000)
    assert pool.acquire("x")[0] == "down"
    assert isinstance(pool.now, int)
    assert pool.due("a") == pool.now + 2000
    pool.later(1)
    pool.observe("a", "ready")
    assert pool.acquire("trial")[3] == "1"


def test_a_node_that_is_ready_again_before_its_open_time_is_over_waits_for_its_end(
    pool: Pool,
) -> None:
    opened(pool)
    pool.observe("a", "loading")
    pool.later(1999)
    pool.observe("a", "ready")
    assert pool.acquire("x") == ["down", "1"]
    pool.later(1)
    assert pool.acquire("trial")[3] == "1"
    pool.release("trial", "failed")  # now for 4 s
    pool.observe("a", "loading")
    pool.later(3999)
    pool.observe("a", "ready")
    assert pool.acquire("x") == ["down", "1"]


# Epochs


@pytest.mark.parametrize("verdict", ["ready", "loading", "miss", "alive", "waiting"])
def test_what_was_seen_of_an_earlier_life_says_nothing(pool: Pool, verdict: str) -> None:
    former = pool.record("a")["epoch"]
    pool.unregister("a")
    pool.later(7)
    pool.register("a", health="new")
    state = pool.state()
    for _ in range(5):
        seen = pool.observe("a", verdict, epoch=former, waiting_ms=9, valid_ms=9)
        assert tuple(seen) == ("", "")
    assert pool.state() == state


def test_a_node_that_is_gone_is_not_brought_back(pool: Pool) -> None:
    epoch = pool.record("a")["epoch"]
    pool.acquired("x")
    pool.unregister("a")
    state = pool.state()
    assert tuple(pool.observe("a", "ready", epoch=epoch)) == ("", "")
    assert pool.state() == state
    pool.release("x")
    assert tuple(pool.observe("a", "ready", epoch=epoch)) == ("", "")
    assert tuple(pool.observe("never", "miss", epoch=epoch)) == ("", "")
    assert not [name for name in pool.state() if name.endswith((":a", ":never"))]


# Waits


def test_a_wait_counts_as_ttft_until_it_is_over(pool: Pool) -> None:
    sampled(pool, 40_000)
    pool.acquired("hung")
    assert pool.score("a") == pytest.approx(50 / 40 / 2)
    pool.observe("a", "waiting", waiting_ms=4000, valid_ms=3000)
    assert pool.score("a") == pytest.approx(50 / 4000 / 2)
    assert pool.record("a")["health"] == "ok"
    pool.later(2999)
    pool.sweep(interval_ms=1)
    assert pool.score("a") == pytest.approx(50 / 4000 / 2)
    pool.later(1)
    pool.sweep(interval_ms=1)
    assert pool.score("a") == pytest.approx(50 / 40 / 2)


def test_a_wait_shorter_than_the_mean_does_not_flatter(pool: Pool) -> None:
    sampled(pool, 4_000_000)
    pool.observe("a", "waiting", waiting_ms=2000, valid_ms=3000)
    assert pool.score("a") == pytest.approx(50 / 4000)


def test_a_wait_of_a_node_without_samples_goes_over_the_prior(pool: Pool) -> None:
    pool.observe("a", "waiting", waiting_ms=1500, valid_ms=3000)
    assert pool.score("a") == pytest.approx(50 / 1500)


def test_a_first_token_ends_the_wait_at_once(pool: Pool) -> None:
    for lease in ("hung", "other"):
        pool.acquired(lease)
    pool.observe("a", "waiting", waiting_ms=60_000, valid_ms=3000)
    pool.first_token("other", 50_000)
    assert pool.score("a") == pytest.approx(1 / 3)


def test_a_hung_node_whose_page_is_fine_gets_nothing_more_while_another_answers(
    valkey: redis.Redis,
) -> None:
    pool = Pool(valkey)
    for node in ("hung", "fine"):
        pool.register(node)
    sampled(pool, 20_000, node="hung")
    sampled(pool, 200_000, node="fine")
    assert pool.acquired("lost") == "hung"
    for age_ms in range(2000, 60_000, 2000):
        pool.later(2000)
        pool.observe("hung", "ready")
        pool.observe("hung", "waiting", waiting_ms=age_ms, valid_ms=3000)
        assert pool.acquired(f"x{age_ms}") == "fine"
        pool.first_token(f"x{age_ms}", 200_000)
        pool.release(f"x{age_ms}")


# The last resort


def down(pool: Pool, *nodes: str) -> None:
    """Probes say no."""
    for node in nodes:
        for _ in range(pool.tuning.unhealthy_after):
            pool.observe(node, "miss")
        assert pool.record(node)["health"] == "down"


@pytest.mark.parametrize("policy", ["ttft", "round_robin", "random", "p2c", "peak_ewma"])
def test_where_only_probes_speak_against_a_node_it_is_leased_all_the_same(
    valkey: redis.Redis, policy: Policy
) -> None:
    pool = Pool(valkey, Tuning(policy=policy))
    pool.register("a")
    down(pool, "a")
    assert pool.acquire("x") == ["leased", f"a {T0} {T0} 10", "0", "0"]
    assert pool.acquire("x") == ["leased", f"a {T0} {T0} 10", "0", "0"]
    assert (pool.active("a"), pool.score("a")) == (1, 0)
    assert pool.move("y", "x", outcome="saturated")[0] == "leased"
    assert pool.first_token("y", 30_000) == 1
    assert pool.release("y") == 1
    assert (pool.active("a"), pool.score("a"), pool.record("a")["health"]) == (0, 0, "down")


def test_no_node_that_is_down_is_leased_while_another_has_room(valkey: redis.Redis) -> None:
    pool = Pool(valkey)
    for node in ("a", "b", "z"):
        pool.register(node, capacity=3)
    down(pool, "a", "z")
    assert {pool.acquired(f"x{i}", chance=i / 3) for i in range(3)} == {"b"}
    assert pool.acquired("x3") in {"a", "z"}  # b is full


def test_a_move_takes_the_last_resort_too_and_never_twice_the_same(valkey: redis.Redis) -> None:
    pool = Pool(valkey)
    for node in "ab":
        pool.register(node)
    down(pool, "a", "b")
    first = pool.acquired("x")
    second = pool.move("y", "x", tried=[first])[1].split(" ")[0]
    assert {first, second} == {"a", "b"}
    assert pool.move("z", "y", tried=["a", "b"]) == ["spent", "0"]


def test_the_last_resort_keeps_to_the_capacity(valkey: redis.Redis) -> None:
    pool = Pool(valkey)
    for node in "ab":
        pool.register(node, capacity=2)
    down(pool, "a", "b")
    replies = [pool.acquire(f"x{i}")[0] for i in range(6)]
    assert replies == ["leased"] * 4 + ["down"] * 2
    assert (pool.active("a"), pool.active("b")) == (2, 2)


def _loading(pool: Pool) -> None:
    pool.observe("a", "loading")


def _draining(pool: Pool) -> None:
    down(pool, "a")
    pool.register("a", state="draining")


def _open(pool: Pool) -> None:
    opened(pool)
    down(pool, "a")


def _half_open(pool: Pool) -> None:
    opened(pool)
    pool.later(2000)
    assert pool.acquire("trial")[3] == "1"
    down(pool, "a")


def _cooling(pool: Pool) -> None:
    pool.acquired("x")
    pool.release("x", "saturated", cool_ms=7000)
    down(pool, "a")


def _removed(pool: Pool) -> None:
    pool.acquired("x")
    down(pool, "a")
    pool.unregister("a")


def _never_ready(pool: Pool) -> None:
    pool.unregister("a")
    pool.register("a", health="new")
    see(pool, *["miss"] * 5)


@pytest.mark.parametrize(
    "state", [_loading, _draining, _open, _half_open, _cooling, _removed, _never_ready]
)
def test_what_more_than_a_probe_speaks_against_is_no_last_resort(
    pool: Pool, state: Callable[[Pool], None]
) -> None:
    state(pool)
    assert pool.acquire("more")[0] in {"down", "unknown"}


def test_an_open_node_that_is_down_gets_no_trial_before_a_good_probe(pool: Pool) -> None:
    _open(pool)
    pool.later(600_000)
    assert pool.acquire("x")[0] == "down"
    pool.observe("a", "ready")
    pool.later(2000)
    assert pool.acquire("x")[3] == "1"


def test_failures_of_the_last_resort_open_the_circuit(pool: Pool) -> None:
    down(pool, "a")
    opened(pool)
    assert pool.acquire("x") == ["down", "2000"]


def test_a_thousand_nodes_that_are_down_cost_one_request_no_more_than_sixteen(
    valkey: redis.Redis,
) -> None:
    costs: list[dict[str, Any]] = []
    client: Any = valkey
    for nodes in (20, 400):
        client.flushall()
        pool = Pool(valkey, Tuning(unhealthy_after=1))
        for i in range(nodes):
            pool.register(f"n{i:03}", capacity=1)
            pool.observe(f"n{i:03}", "miss")
        for i in range(15):
            pool.acquired(f"x{i}")
        client.config_resetstat()
        pool.acquired("last")
        stats = client.info("commandstats")
        costs.append({name: of["calls"] for name, of in stats.items() if "config" not in name})
    assert costs[0] == costs[1]
