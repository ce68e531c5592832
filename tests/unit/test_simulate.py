"""The simulator: exact where theory is, the same for the same seed, and in the known order."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, cast

import pytest

from app import cli
from app.cluster.score import Constants
from app.lab.engine import Engine as StepEngine
from app.lab.engine import Sequence
from app.lab.profiles import A100, RTX4090, XEON, Profile
from app.lab.simulate import plot
from app.lab.simulate.engine import Engine, Job
from app.lab.simulate.experiment import rows_of
from app.lab.simulate.fleet import TRIO, Fleet, Spec, several
from app.lab.simulate.policies import ALL, routers, usual
from app.lab.simulate.prefix import Prefixes
from app.lab.simulate.report import row_of
from app.lab.simulate.router import Shipped
from app.lab.simulate.run import ATTEMPTS, REDIS_MS, Run
from app.lab.simulate.scenarios import SCENARIOS, Fault, Scenario
from app.lab.simulate.workload import Call, bimodal, saturated_per_s
from tests.support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from app.lab.simulate.report import Row

    Trace = list[tuple[float, int, int]]  # ms, prompt, answer


# The engine


def trace_of(seed: int, per_ms: float, requests: int = 150) -> Trace:
    chance, at_ms, trace = Random(seed), 0.0, []
    for _ in range(requests):
        at_ms += chance.expovariate(per_ms)
        answer = chance.choice([1, 2, chance.randint(1, 300)])
        trace.append((at_ms, chance.randint(1, 5000), answer))
    return trace


def stepped(profile: Profile, trace: Trace) -> list[tuple[float, float]]:
    """First token and end of each request, by the engine that does every step."""
    engine, now, come, sequences = StepEngine(profile, Random(0)), 0.0, 0, list[Sequence]()
    while True:
        plan = engine.begin_step()
        if plan is None and come == len(trace):
            return [(s.first_token_ms or 0.0, s.ended_ms or 0.0) for s in sequences]
        end = trace[come][0] if plan is None else now + plan.duration_ms
        while come < len(trace) and trace[come][0] <= end:
            at_ms, prompt, answer = trace[come]
            sequences.append(engine.submit(prompt, answer, at_ms))
            come += 1
        if plan is not None:
            engine.finish_step(end)
        now = end


def leapt(profile: Profile, trace: Trace) -> list[tuple[float, float]]:
    """The same by leaps."""
    engine, times = Engine(profile), [[0.0, 0.0] for _ in trace]
    calls = [Call(i, *request) for i, request in enumerate(trace)]
    for call in calls:
        while engine.until < call.at_ms:
            noted(engine, times)
        engine.submit(Job(call), call.at_ms)
    while engine.until < math.inf:
        noted(engine, times)
    return [(first, end) for first, end in times]


def noted(engine: Engine, times: list[list[float]]) -> None:
    now = engine.until
    for place, jobs in enumerate(engine.advance()):
        for job in jobs:
            times[job.call.number][place] = now


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    ("profile", "per_ms"), [(A100, 0.01), (A100, 0.03), (RTX4090, 0.003), (XEON, 0.0004)]
)
def test_leaps_end_in_the_same_moments_as_all_the_single_steps(
    profile: Profile, per_ms: float, seed: int
) -> None:
    trace = trace_of(seed, per_ms)
    for one, other in zip(stepped(profile, trace), leapt(profile, trace), strict=True):
        assert one == pytest.approx(other, rel=1e-9)


@pytest.mark.parametrize("profile", [A100, RTX4090, XEON], ids=lambda profile: profile.name)
def test_the_engine_foresees_the_exact_first_token_of_one_after_whom_nobody_comes(
    profile: Profile,
) -> None:
    for seed in range(20):
        engine, trace = Engine(profile), trace_of(seed, 0.02, requests=40)
        for number, (at_ms, prompt, answer) in enumerate(trace):
            while engine.until < at_ms:
                engine.advance()
            engine.submit(Job(Call(number, at_ms, prompt, answer)), at_ms)
        probe, now = Call(99, at_ms + 1, 700, 30), at_ms + 1
        while engine.until < now:
            engine.advance()
        foreseen = engine.ttft_ms(probe, 0, now, math.inf)
        assert engine.ttft_ms(probe, 0, now, foreseen * 0.99) == math.inf  # gives up in time
        engine.submit(Job(probe), now)
        while True:
            end = engine.until
            if probe in [job.call for job in engine.advance()[0]]:
                break
        assert end - now == pytest.approx(foreseen)


def test_a_pause_stretches_the_step_under_way_and_a_slow_node_takes_so_many_times_as_long() -> None:
    def ends(disturb: Callable[[Engine], None]) -> list[float]:
        engine = Engine(A100)
        engine.submit(Job(Call(0, 0.0, 512, 100)), 0.0)
        engine.advance()
        disturb(engine)
        times = []
        while engine.until < math.inf:
            times.append(engine.until)
            engine.advance()
        return times

    [plain] = ends(lambda _: None)
    assert ends(lambda engine: engine.pause(200.0, 1200.0))[-1] == pytest.approx(plain + 1000)
    slowed = ends(lambda engine: engine.slow(200.0, 5.0))
    assert slowed[-1] - slowed[0] == pytest.approx(5 * (plain - slowed[0]))


@pytest.mark.parametrize(("profile", "per_s"), [(A100, 12.5), (RTX4090, 3.94), (XEON, 0.354)])
def test_saturated_throughput_is_the_stated_one(profile: Profile, per_s: float) -> None:
    assert saturated_per_s(profile) == pytest.approx(per_s, rel=0.08)


# Against theory


def exponential(chance: Random) -> tuple[int, int, float]:
    """Prompts of 10,000 tokens on average and no answer to speak of."""
    return max(1, round(chance.expovariate(1 / 10_000))), 1, 1.0


SERVER = Profile(  # serves one at a time, for 100 ms on average
    name="server",
    prefill_tokens_per_s=100_000,
    slots=1,
    kv_tokens=10**9,
    step_base_ms=0.0,
    decode_ms_per_seq=0.0,
    chunk_tokens=10**9,
)


def loaded(rho: float) -> float:
    """Load at which requests come `rho` times as fast as one server serves them."""
    return rho * 10 / saturated_per_s(SERVER, exponential)


@pytest.mark.parametrize("rho", [0.5, 0.8])
def test_one_server_waits_as_long_as_the_textbook_says(rho: float) -> None:
    """M/M/1: mean time in the system is 1 / (mu - lambda)."""
    scenario = Scenario(
        name="mm1", about="", specs=(Spec("server", SERVER, 1.0),), mix=exponential,
        load=loaded(rho), requests=20_000, sharing="local", replicas=1,
    )  # fmt: skip
    [row] = rows_of(scenario, ["least_conn"], [1])
    assert row.mean_ttft_ms == pytest.approx(100 / (1 - rho), rel=0.1)
    assert row.p99_ttft_ms == pytest.approx(100 / (1 - rho) * math.log(100), rel=0.2)


def test_two_servers_and_one_who_knows_the_work_are_a_common_line() -> None:
    """M/M/2: the earliest first token is where a common line would have put the request."""
    rho = 0.7
    scenario = Scenario(
        name="mm2", about="", specs=several((SERVER, 2)), mix=exponential,
        load=loaded(rho), requests=20_000, replicas=1,
    )  # fmt: skip
    [row] = rows_of(scenario, ["clairvoyant"], [1])
    a = 2 * rho
    waits = (a**2 / 2 / (1 - rho)) / (1 + a + a**2 / 2 / (1 - rho))  # Erlang C
    expected = 100 + waits * 100 / (2 * (1 - rho))
    assert row.mean_ttft_ms == pytest.approx(expected + REDIS_MS, rel=0.05)


# Runs

SHORT = {name: replace(scenario, requests=400) for name, scenario in SCENARIOS.items()}
EARLY = {  # what goes wrong does so within the shorter run
    name: replace(
        scenario, faults=tuple(replace(fault, at_ms=fault.at_ms / 20) for fault in scenario.faults)
    )
    for name, scenario in SHORT.items()
}


def times(calls: list[Call]) -> list[Any]:
    return [(c.at_ms, c.node, c.first_ms, c.end_ms, c.cached, c.failed) for c in calls]


@pytest.mark.parametrize("policy", ALL)
def test_the_same_seed_gives_the_same_run_and_another_one_does_not(policy: str) -> None:
    scenario = SHORT["trio"]
    once = times(Run(scenario, policy, 7).run())
    assert once == times(Run(scenario, policy, 7).run())
    assert once != times(Run(scenario, policy, 8).run())


@pytest.mark.parametrize("sharing", ["global", "200"])
@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_every_request_ends_once_and_nothing_is_left_behind(name: str, sharing: str) -> None:
    scenario = replace(EARLY[name], sharing=sharing)
    for policy in ("work", "ttft"):
        run = Run(scenario, policy, 1)
        calls = run.run()
        assert sorted(call.number for call in calls) == list(range(len(calls)))
        assert len(calls) == pytest.approx(scenario.requests, rel=0.3 if scenario.sessions else 0)
        assert run.fleet.inflight == [0] * len(scenario.specs)
        assert all(engine.until == math.inf and not engine.running for engine in run.fleet.engines)
        for call in calls:
            assert call.end_ms is not None
            assert call.failed == (len(call.tried) >= min(ATTEMPTS, len(scenario.specs)))
            if not call.failed:
                assert call.first_ms is not None
                assert call.at_ms <= call.leased_ms < call.first_ms <= call.end_ms


def test_all_policies_see_the_same_requests() -> None:
    def seen(policy: str) -> list[Any]:
        calls = Run(SHORT["fleet"], policy, 3).run()
        return [(c.at_ms, c.prompt, c.output, c.told_prompt, c.told_output) for c in calls]

    assert seen("work") == seen("round_robin") == seen("clairvoyant")


def test_a_node_takes_no_more_than_its_capacity() -> None:
    specs = tuple(replace(spec, capacity=3) for spec in TRIO)
    scenario = replace(SHORT["trio"], specs=specs, load=2.0)
    run = Run(scenario, "least_conn", 1)
    calls, moments = run.run(), []
    for call in calls:
        moments += [(call.leased_ms, 1, call.node), (call.end_ms or 0.0, -1, call.node)]
    now, most = [0, 0, 0], [0, 0, 0]
    for _, step, node in sorted(moments):
        now[node] += step
        most[node] = max(most[node], now[node])
    assert most == [3, 3, 3]


# The known order


@pytest.fixture(scope="module")
def trio() -> dict[str, Row]:
    """All policies on the trio at 80 %, a short run."""
    scenario = replace(SCENARIOS["trio"], requests=3000)
    return {row.policy: row for row in rows_of(scenario, usual(sessions=False), [1])}


def test_the_policies_come_in_the_known_order(trio: dict[str, Row]) -> None:
    order = ["round_robin", "least_conn", "ttft", "work", "clairvoyant"]
    for worse, better in pairwise(order):
        assert trio[worse].mean_ttft_ms > trio[better].mean_ttft_ms, f"{worse}, {better}"
        assert trio[worse].p99_ttft_ms > trio[better].p99_ttft_ms, f"{worse}, {better}"
    assert trio["work_blind"].mean_ttft_ms > trio["work"].mean_ttft_ms


def test_work_is_near_perfect_knowledge_and_ahead_of_every_peer(trio: dict[str, Row]) -> None:
    work = trio["work"]
    assert work.mean_ttft_ms < 1.05 * trio["clairvoyant"].mean_ttft_ms
    for name in trio.keys() - {policy for policy in trio if policy.startswith("work")}:
        if name == "clairvoyant":
            continue
        assert work.mean_ttft_ms < 0.9 * trio[name].mean_ttft_ms, name
        assert work.p99_ttft_ms < 0.9 * trio[name].p99_ttft_ms, name


def test_the_trio_is_calibrated(trio: dict[str, Row]) -> None:
    """The reference figures of the model that the policy was found with, within 12 %."""
    for name, mean_ms in {
        "weighted_least_conn": 104, "ttft": 96, "ttft_half": 96, "work": 74, "clairvoyant": 72,
    }.items():  # fmt: skip
        assert trio[name].mean_ttft_ms == pytest.approx(mean_ms, rel=0.12), name


def test_shares_add_up_and_tokens_are_the_load(trio: dict[str, Row]) -> None:
    for row in trio.values():
        assert sum(row.share.values()) == pytest.approx(1)
    assert trio["work"].tokens_per_s == pytest.approx(trio["ttft"].tokens_per_s, rel=0.02)
    assert trio["work"].share["a100"] > 0.65


def row(name: str, policy: str, **changes: Any) -> Row:
    scenario = replace(SCENARIOS[name], **changes)
    return row_of(policy, scenario, Run(scenario, policy, 1).run())


def test_replicas_that_share_state_do_better_than_those_that_do_not() -> None:
    atomic = row("fleet", "work", requests=3000)
    alone = row("fleet", "work", requests=3000, sharing="local")
    stale = row("fleet", "work", requests=3000, sharing="1000")
    assert atomic.mean_ttft_ms < 0.85 * alone.mean_ttft_ms
    assert atomic.mean_ttft_ms < 0.9 * stale.mean_ttft_ms


def test_a_node_that_fails_at_once_looks_fast_to_nobody() -> None:
    changes = {"requests": 2500}
    flaky, other = row("flaky", "work", **changes), row("flaky", "least_conn", **changes)
    assert flaky.share["a100-1"] < 0.03
    assert other.share["a100-1"] > 2 * flaky.share["a100-1"]
    assert flaky.failed < 0.002


def test_a_node_that_joins_cold_is_used_once_it_is_warm() -> None:
    assert row("join", "work", requests=4000).share["a100-1"] > 0.06
    assert row("join", "ttft", requests=4000).share["a100-1"] < 0.03


def test_a_hanging_node_is_left_alone() -> None:
    """The policy that waits for samples goes on sending; the one that sees silence does not."""
    work = row("hang", "work", requests=4000)
    assert work.p99_ttft_ms < 0.6 * row("hang", "ttft", requests=4000).p99_ttft_ms


def test_weights_four_times_wrong_cost_work_nothing() -> None:
    wrong, right = (row(name, "work", load=0.5, requests=2500) for name in ("wrong_k", "trio"))
    assert wrong.mean_ttft_ms == pytest.approx(right.mean_ttft_ms, rel=0.03)


def test_a_failed_trial_opens_the_circuit_again() -> None:
    """A node that always fails gets three requests and then one in five seconds."""
    scenario = replace(
        SHORT["trio"], requests=600, faults=(Fault("fail", 1, 1e12, 1.0, at_ms=0.0),)
    )
    calls = Run(scenario, "round_robin", 1).run()
    tries = sum(1 in call.tried for call in calls)
    seconds = calls[-1].at_ms / 1000
    assert 3 <= tries <= 6 + seconds / 5


def test_a_node_that_joins_begins_with_the_prior_of_that_moment() -> None:
    [router] = routers_of("work", "global")
    profile = router.profiles[0]
    profile.leased(0.0, 512)
    router.joined(60_000.0, 0)
    assert router.profiles[0] is not profile
    assert router.profiles[0].since_ms == 60_000
    assert router.scores[0] == router.profiles[0].score(60_000.0)


def test_replicas_that_share_nothing_keep_their_samples_for_longer() -> None:
    alone = routers_of("work", "local")
    assert len(alone) == 16
    assert {router.constants.memory_ms for router in alone} == {16 * 5000}
    assert [router.constants.memory_ms for router in routers_of("work", "global")] == [5000]


def routers_of(policy: str, sharing: str) -> list[Shipped]:
    made = routers(policy, Fleet(TRIO), sharing=sharing, replicas=16, seed=1, constants=Constants())
    assert all(isinstance(router, Shipped) for router in made)
    return cast("list[Shipped]", made)


# Prefixes


def test_a_cache_forgets_what_was_used_longest_ago() -> None:
    cache, calls = Prefixes(100), [Call(i, 0.0, 400, 10) for i in range(3)]
    for i, call in enumerate(calls):
        call.client = i
    for call in calls:
        assert cache.hit(call) == (0 if call.client == 0 else 100)  # the system prompt is shared
        cache.add(call, 400, room=750)
    assert [cache.hit(call) for call in calls] == [100, 399, 399]  # one token is always computed
    cache.add(calls[1], 500, room=750)
    assert [cache.hit(call) for call in calls] == [100, 399, 100]
    cache.add(calls[1], 500, room=0)
    assert [cache.hit(call) for call in calls] == [0, 0, 0]


def test_uncached_tokens_bring_turns_back_to_the_node_that_holds_them() -> None:
    blind, seeing = (row("prefix", p, requests=2500) for p in ("work_no_prefix", "work"))
    assert seeing.cached > 1.5 * blind.cached
    assert seeing.mean_ttft_ms < 0.9 * blind.mean_ttft_ms


# The command


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """``command(*args)``: what ``leaseway simulate`` says, as (exit code, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "250")

    def go(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["leaseway", "simulate", *args])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capsys.readouterr()

    return go


# One seed, and few jobs: such runs stay in this process.
FEW = ("--requests", "200", "--policy", "work", "--policy", "ttft")


def test_json_has_a_row_for_each_policy_and_one_for_the_reference(
    command: Callable[..., tuple[int, str, str]],
) -> None:
    code, out, err = command("--scenario", "trio", "--load", "0.8", "--json", *FEW)
    assert (code, err) == (0, "")
    printed = json.loads(out)
    assert printed.keys() == {"rows"}
    assert [row["policy"] for row in printed["rows"]] == ["work", "ttft", "clairvoyant"]
    for row in printed["rows"]:
        assert row.keys() == {
            "policy", "mean_ttft_ms", "p99_ttft_ms", "e2e_ms", "tokens_per_s", "share",
        }  # fmt: skip
        assert row["share"].keys() == {"a100", "rtx4090", "xeon"}
        assert 0 < row["mean_ttft_ms"] <= row["p99_ttft_ms"] <= row["e2e_ms"] * 10
    again = command("--scenario", "trio", "--load", "0.8", "--json", *FEW)
    assert again[1] == out


def test_without_a_policy_all_run_and_tables_show_the_best_first(
    command: Callable[..., tuple[int, str, str]],
) -> None:
    code, out, _ = command("--requests", "100", "--markdown")
    assert code == 0
    rows = [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("| ")][2:]
    assert set(rows) == set(ALL) - {"sglang", "vllm_load_aware", "work_no_prefix"}
    assert "simulated, not measured" in out
    code, out, _ = command(*FEW)
    assert code == 0
    assert out.index("clairvoyant") < out.index("ttft ")


def test_a_fleet_file_describes_nodes_by_what_a_benchmark_says_of_them(
    command: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(
        "nodes:\n"
        "- {name: h100, count: 2, prefill_tokens_per_s: 40000, decode_tokens_per_s: 150,\n"
        "   decode_tokens_per_s_full: 4000, slots: 64, kv_tokens: 300000, weight: 20}\n"
        "- {name: old, profile: rtx4090, weight: 4, capacity: 8}\n"
    )
    code, out, err = command("--fleet", str(file), "--json", *FEW)
    assert (code, err) == (0, "")
    assert json.loads(out)["rows"][0]["share"].keys() == {"h100-1", "h100-2", "old"}
    profile = SCENARIOS["trio"].specs[0].profile
    assert profile.name == "a100"  # a file changes no other scenario


def test_two_speeds_of_decoding_give_the_cost_of_a_step(tmp_path: Path) -> None:
    from app.lab.simulate.fleet import read

    file = tmp_path / "fleet.yaml"
    file.write_text(
        "nodes: [{name: n, prefill_tokens_per_s: 10000, decode_tokens_per_s: 50,"
        " decode_tokens_per_s_full: 400, slots: 16, kv_tokens: 50000}]"
    )
    [spec] = read(file)
    assert spec.profile.step_ms(0, 1, 0) == pytest.approx(1000 / 50)
    assert spec.profile.step_ms(0, 16, 0) == pytest.approx(16 * 1000 / 400)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("nodes: []", "nodes: "),
        ("nodes: [{name: a}]", "give a profile, or also prefill_tokens_per_s"),
        ("nodes: [{name: a, profile: h200}]", "profile 'h200' is none of a100"),
        ("nodes: [{name: a, profile: a100, wieght: 2}]", "wieght"),
        ("nodes: [{name: a, profile: a100}, {name: a, profile: xeon}]", "given twice"),
        ("nodes: [{name: a, profile: a100, slots: 4, decode_tokens_per_s: 10,"
         " decode_tokens_per_s_full: 50}]", "between 10 and 40"),
        ("nodes: [", "not valid YAML"),
    ],
)  # fmt: skip
def test_a_bad_fleet_file_is_one_line_that_says_what_is_wrong(
    command: Callable[..., tuple[int, str, str]], tmp_path: Path, text: str, complaint: str
) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(text)
    code, out, err = command("--fleet", str(file))
    assert (code, out) == (2, "")
    assert complaint in err
    assert str(file) in err


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (("--scenario", "duo"), "trio, fleet"),
        (("--policy", "best"), "clairvoyant"),
        (("--seeds", "1,x"), "whole numbers"),
        (("--sharing", "often"), "global, local"),
        (("--fleet", "/nowhere.yaml"), "cannot be read"),
    ],
)
def test_a_wrong_word_is_answered_with_the_right_ones(
    command: Callable[..., tuple[int, str, str]], args: tuple[str, str], complaint: str
) -> None:
    code, out, err = command(*args)
    assert (code, out) == (2, "")
    assert complaint in err


def children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_killed_command_leaves_no_process_behind() -> None:
    args = ["simulate", "--requests", "1000000", "--policy", "clairvoyant", "--seeds", "1,2,3"]
    command = subprocess.Popen([sys.executable, "-m", "app.cli", *args])
    try:
        # Two workers, and what watches over their shared resources.
        wait_until(lambda: len(children_of(command.pid)) >= 3, within_s=60, what="workers")
        workers = children_of(command.pid)
        # A worker ties itself to its parent before its first job.
        wait_until(lambda: all(busy(pid) for pid in workers[1:]), within_s=60, what="work")
    finally:
        command.kill()
        command.wait()
    wait_until(lambda: not any(map(alive, workers)), within_s=60, what="the end of all")


def busy(pid: int) -> bool:
    """Whether a process has spent a second and a half of CPU: more than it takes to start."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") > 1.5


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_plot_is_a_png(command: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    file = tmp_path / "plot.png"
    code, _, err = command(*FEW, "--plot", str(file))
    assert (code, err) == (0, "")
    assert file.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_message_says_what_to_install(
    command: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, err = command(*FEW, "--plot", str(tmp_path / "plot.png"))
    assert code == 2
    assert "leaseway[plots]" in err
    assert plot.__name__ in sys.modules  # it loads without the library


def test_the_mix_is_the_stated_one() -> None:
    chance = Random(1)
    drawn = [bimodal(chance) for _ in range(20_000)]
    short = [(prompt, answer) for prompt, answer, mean in drawn if mean < 100]
    long = [(prompt, answer) for prompt, answer, mean in drawn if mean > 100]
    assert len(short) == pytest.approx(len(long), rel=0.05)
    assert sum(p for p, _ in short) / len(short) == pytest.approx(200, rel=0.02)
    assert sorted(p for p, _ in long)[len(long) // 2] == pytest.approx(600, rel=0.03)
    assert sorted(a for _, a in long)[len(long) // 2] == pytest.approx(150, rel=0.03)
    assert max(p for p, _ in long) == 6000
    assert max(a for _, a in long) == 800
