"""``leaseway bench policies`` from end to end: what it counts, not how fast anything is."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# Nodes ten times as fast and a tenth of the load: a second or two for each policy.
COMMAND = (
    sys.executable, "-W", "error", "-m", "app.cli", "bench", "policies",
    "--policies", "round_robin,ttft", "--load", "0.1", "--seeds", "1", "--replicas", "2",
    "--seconds", "10", "--scale", "0.1",
)  # fmt: skip
NODES = {"a100", "rtx4090", "xeon"}


def test_two_policies_are_asked_the_same_and_nothing_is_lost() -> None:
    done = subprocess.run([*COMMAND, "--json"], capture_output=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr.decode()
    report = json.loads(done.stdout)
    rows = report["rows"]
    assert [(row["policy"], row["replicas"], row["seeds"]) for row in rows] == [
        ("round_robin", 2, [1]),
        ("ttft", 2, [1]),
    ]
    for row in rows:
        assert row["sent"] == row["whole"] + row["cut"] + row["unheard"] + row["errors"]
        assert (row["errors"], row["reasons"], row["moved"]) == (0, {}, 0)
        assert (row["astray"], row["degraded"], row["leases_left"]) == (0, 0, 0)
        assert row["whole"] > 0
        assert 0 < row["counted"] < row["sent"], "the warm-up counts for nothing"
        assert set(row["share"]) == NODES
        assert sum(row["share"].values()) == pytest.approx(1)
        assert 0 < row["p50_ttft_ms"] <= row["p99_ttft_ms"]
        assert row["tokens_per_s"] > 0
        assert set(row["trust"]) == {"lag_p99_ms", "busiest", "busiest_cpu", "machine_cpu"}
    assert rows[0]["sent"] == rows[1]["sent"], "each policy is asked the same"
    assert rows[0]["counted"] == rows[1]["counted"]
    # By turns over the whole cluster, whatever the machine does meanwhile: a third each.
    assert min(rows[0]["share"].values()) > 0.2
    assert report["by_seed"] == rows


def test_a_policy_that_is_none_stops_it_before_anything_starts() -> None:
    done = subprocess.run(
        [*COMMAND, "--policies", "fastest"], capture_output=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert b"no policy is called 'fastest': " in done.stderr
    assert b"round_robin" in done.stderr
