"""Runs the real clients: each as a script of its own, in an interpreter of its own.

They come from ``.venv-clients``, ``.venv-load`` and ``tests/clients/node``, which ``make clients``
sets up; a client that is not to be had here is left out with a word.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.admission.keys import hash_key
from app.lab.node import NodeConfig
from app.lab.profiles import IDEAL
from tests.support.fleet import Fleet, Nodes

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
NODE_PACKAGES = "tests/clients/node/node_modules"
NODE_KEY, CLIENT_KEY = "sk-of-the-node", "sk-of-the-client"


@dataclass(frozen=True, slots=True)
class Client:
    """A client: its script, where its packages are, what else it needs on the machine."""

    name: str
    home: str = ".venv-clients"
    tool: str = ""
    pinned: bool = True
    """Whether its version is ours to choose, not the machine's."""

    @property
    def command(self) -> list[str]:
        """How to run its script, without the arguments."""
        if self.home == NODE_PACKAGES:
            return ["node", "tests/clients/node/openai.js"]
        return [f"{self.home}/bin/python", "-m", f"tests.clients.scripts.{self.name}"]

    @property
    def missing(self) -> str:
        """Why it cannot run here; "" when it can."""
        if self.tool and not shutil.which(self.tool):
            return f"{self.tool} is not installed"
        installed = (ROOT / self.home / ".installed").exists()
        return "" if installed else f"{self.home} is not set up: make clients"


CLIENTS = (
    Client("openai_python"),
    Client("openai_async"),
    Client("openai_npm", home=NODE_PACKAGES, tool="node"),
    Client("anthropic_python"),
    Client("langchain_chat"),
    Client("litellm_python"),
    Client("curl_command", tool="curl", pinned=False),
    Client("load_aiperf", home=".venv-load"),
)


@dataclass(frozen=True, slots=True)
class Line:
    """What a client made of one call. ``result``: ``ok`` or ``error``."""

    call: str
    result: str
    detail: Any


@dataclass(frozen=True, slots=True)
class Report:
    """All lines of one client."""

    client: str
    version: str
    lines: list[Line]


def run(client: Client, url: str, key: str) -> Report:
    """Run a client's script against ``url``. Fails when the script itself does."""
    environment = {
        name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")
    }
    ran = subprocess.run(
        [*client.command, url],
        cwd=ROOT,
        env=environment | {"CLIENT_KEY": key, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        capture_output=True,
        timeout=300,
        check=False,
    )
    said = ran.stdout.decode()
    assert ran.returncode == 0, f"{client.name} ended with {ran.returncode}:\n{ran.stderr.decode()}"
    head, *lines = (json.loads(line) for line in said.splitlines() if line.startswith("{"))
    return Report(head["client"], head["version"], [Line(**line) for line in lines])


@contextlib.contextmanager
def cluster() -> Iterator[tuple[Fleet, Nodes]]:
    """Two replicas that want ``CLIENT_KEY``, before two nodes that want ``NODE_KEY``."""
    config = NodeConfig(profile=IDEAL, api_key=NODE_KEY)
    keyed = {"api_key_env": "NODE_KEY"}
    with (
        Nodes(n1=config, n2=config) as nodes,
        Fleet(
            nodes.settings(n1=keyed, n2=keyed),
            replicas=2,
            environment={"NODE_KEY": NODE_KEY},
            keys=[{"name": "client", "hash": hash_key(CLIENT_KEY)}],
        ) as fleet,
    ):
        yield fleet, nodes


def compare(client: Client, fleet: Fleet, nodes: Nodes) -> tuple[Report, Report]:
    """Run a client through the gateway and directly against a node."""
    replica = fleet.urls[CLIENTS.index(client) % len(fleet.urls)]
    through = run(client, replica, CLIENT_KEY)
    return through, run(client, nodes["n1"].url, NODE_KEY)
