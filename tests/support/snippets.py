"""The code blocks of the documents, and what it takes to run them.

A fenced block is run by its language. ``<!-- not run: why -->`` on the line before says that it
cannot be, ``<!-- file: NAME -->`` that it is also written to that file, for the blocks after it.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

TOP = Path(__file__).parents[2]
DOCUMENTS = [TOP / "README.md", *sorted((TOP / "docs").glob("*.md")),
             *sorted((TOP / "deploy").rglob("*.md"))]  # fmt: skip
_BLOCK = re.compile(
    r"(?m)^(?:<!-- (?P<mark>not run|file): (?P<said>.*?) -->\n)?"
    r"^```(?P<language>\S*)\n(?P<text>(?s:.*?))^```$"
)
# What `redis-cli` does with these arguments; a server of the tests comes without one.
_REDIS_CLI = """#!{python} -IS
import socket, sys
args = sys.argv[1:]
if args[:1] == ["-p"]:
    assert args[1] == "{port}", args
    args = args[2:]
if args[:2] == ["--scan", "--pattern"]:
    args = ["SCAN", "0", "MATCH", args[2], "COUNT", "1000000"]
link = socket.create_connection(("127.0.0.1", {port}), timeout=10)
stream = link.makefile("rb")
link.sendall(b"*%d\\r\\n" % len(args))
for arg in args:
    link.sendall(b"$%d\\r\\n%s\\r\\n" % (len(arg.encode()), arg.encode()))

def show():
    line = stream.readline().decode().strip()
    if line[0] == "*":
        for _ in range(int(line[1:])):
            show()
    elif line[0] == "$" and line != "$-1":
        print(stream.read(int(line[1:]) + 2)[:-2].decode(errors="replace"))
    elif line[0] == "-":
        sys.exit(line)
    else:
        print(line[1:])

show()
"""


@dataclass(frozen=True, slots=True)
class Snippet:
    """One fenced block. ``line`` is that of its first fence; ``unrun`` says why it is not run."""

    document: str
    line: int
    language: str
    text: str
    file: str = ""
    unrun: str = ""

    @property
    def where(self) -> str:
        """For people."""
        return f"{self.document}:{self.line}"


def snippets(document: Path, text: str | None = None) -> list[Snippet]:
    """All fenced blocks of a document, in order."""
    text = document.read_text() if text is None else text
    name = str(document.relative_to(TOP))
    found = []
    for block in _BLOCK.finditer(text):
        said = {block["mark"]: block["said"]}
        line = text.count("\n", 0, block.start("language")) + 1
        found.append(
            Snippet(
                name, line, block["language"], block["text"],
                said.get("file", ""), said.get("not run", ""),
            )
        )  # fmt: skip
    return found


def documented_keys() -> dict[str, str]:
    """Keys of docs/redis-keys.md, without what stands before them → their types."""
    page = (TOP / "docs/redis-keys.md").read_text()
    return dict(re.findall(r"(?m)^\| `lw:\{pool\}:([^`]+)` \| (\w+) \|", page))


class Desk:
    """A folder and an environment to run blocks in, beside a cluster of ``leaseway up``.

    The documents' fixed addresses are led to the cluster's: ``ports`` maps one to the other.
    """

    def __init__(self, folder: Path, ports: dict[int, int], redis_port: int) -> None:
        self.folder = folder
        self._ports = ports
        tools = folder / ".tools"
        tools.mkdir()
        shim = tools / "redis-cli"
        shim.write_text(_REDIS_CLI.format(python=sys.executable, port=redis_port))
        shim.chmod(shim.stat().st_mode | stat.S_IXUSR)
        (tools / ".curlrc").write_text("fail-with-body\nmax-time = 20\nnoproxy = *\n")
        self._environment = {
            **os.environ,
            "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "CURL_HOME": str(tools),
            "NO_PROXY": "*",
            "REDIS_URL": f"redis://127.0.0.1:{redis_port}/0",
            "KEY": "a-key-of-the-documents-that-nobody-has",
            "COLUMNS": "180",
        }  # fmt: skip

    def local(self, text: str) -> str:
        """``text`` with the addresses of this cluster."""
        return re.sub(
            r"(127\.0\.0\.1:|-p )(\d+)",
            lambda m: m[1] + str(self._ports.get(int(m[2]), m[2])),
            text,
        )

    def run(self, snippet: Snippet) -> str:
        """Run a block of shell or Python. Fails with its output; returns what it printed."""
        command = {"sh": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}
        done = subprocess.run(
            [*command[snippet.language], self.local(snippet.text)],
            cwd=self.folder, env=self._environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (
            f"{snippet.where}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        assert "Traceback" not in done.stderr, f"{snippet.where}:\n{done.stderr}"
        return done.stdout
