"""Writes docs/conformance.md: what each real client makes of the gateway, call by call.

    python -m tests.clients.conformance

Every client runs twice, through the gateway and directly against a node; the page says where the
two agree. A test holds its rows against what the clients do now.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime

from tests.clients.run import CLIENTS, ROOT, Line, Report, cluster, compare

PAGE = ROOT / "docs" / "conformance.md"
INTRODUCTION = """\
# Conformance: real clients through the gateway

Written by `make conformance` on {date}; not by hand. Each client runs as a script of its own
([tests/clients](../tests/clients)), once through a replica and once directly against the node. The
detail that is compared is what an application uses: texts, event kinds, finish reasons, usage,
tool calls, parsed objects, error classes with their status and code.

| word | meaning |
| --- | --- |
| same | the call works, and the client sees the same as without the gateway |
| differs | the client sees something else than without the gateway |
| fails either way | the call fails with and without the gateway |
| not run | the client was not to be had on the machine that wrote this page |
"""
_HEADING = re.compile(r"## (.+), version (.+)")


def result(through: Line, direct: Line) -> str:
    """One cell: how a call through the gateway stands to the direct one."""
    if through != direct:
        return "differs"
    return "same" if through.result == "ok" else "fails either way"


def rows(through: Report, direct: Report) -> list[tuple[str, str]]:
    """The table of one client: call and result."""
    pairs = zip(through.lines, direct.lines, strict=True)
    return [(one.call, result(one, other)) for one, other in pairs]


def section(through: Report, direct: Report) -> str:
    """The table as Markdown."""
    lines = [f"## {through.client}, version {through.version}", "", "| call | result |"]
    lines += ["| --- | --- |", *(f"| {call} | {said} |" for call, said in rows(through, direct))]
    return "\n".join(lines)


def read_page() -> dict[str, tuple[str, list[tuple[str, str]]]]:
    """The committed page: client → version and rows."""
    found: dict[str, tuple[str, list[tuple[str, str]]]] = {}
    table: list[tuple[str, str]] = []
    for line in PAGE.read_text().splitlines():
        if heading := _HEADING.fullmatch(line):
            table = []
            found[heading.group(1)] = (heading.group(2), table)
        elif found and line.startswith("| ") and not line.startswith(("| call |", "| --- |")):
            call, said = line.strip("| ").split(" | ")
            table.append((call, said))
    return found


def main() -> None:
    """Run every client that is here and write the page."""
    sections = [INTRODUCTION.format(date=datetime.now(UTC).date())]
    with cluster() as (fleet, nodes):
        for client in CLIENTS:
            if client.missing:
                sections.append(f"## {client.name}\n\nnot run: {client.missing}")
                continue
            print(f"{client.name} …", flush=True)
            sections.append(section(*compare(client, fleet, nodes)))
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text("\n\n".join(part.strip() for part in sections) + "\n")
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
