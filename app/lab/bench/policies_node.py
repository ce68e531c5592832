"""One node of a simulated scenario's fleet as a real fake node: its profile, on a port."""

import argparse

import uvloop

from app.lab.bench.policies_load import NODE_SEED
from app.lab.node import NodeConfig, run
from app.lab.simulate.scenarios import SCENARIOS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--time-scale", type=float, default=1.0)
    asked = parser.parse_args()
    profiles = {spec.name: spec.profile for spec in SCENARIOS[asked.scenario].specs}
    uvloop.run(
        run(
            NodeConfig(
                profile=profiles[asked.node],
                node_id=asked.node,
                port=asked.port,
                seed=NODE_SEED,
                time_scale=asked.time_scale,
            )
        )
    )


if __name__ == "__main__":
    main()
