"""What a PromQL expression asks for: metrics, and the labels that it wants of each."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import promql_parser as promql

if TYPE_CHECKING:
    from collections.abc import Iterator

_VARIABLES = {"$__rate_interval": "5m", "$__range": "1h"}


@dataclass
class Asked:
    """``labels``: metric → label names; ``values``: (metric, label) → values that are compared
    with; ``kept``: the labels that the result has (None: those of the metric)."""

    labels: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    values: dict[tuple[str, str], set[str]] = field(default_factory=lambda: defaultdict(set))
    kept: set[str] | None = None


def asked(expression: str) -> Asked:
    """Read an expression; Grafana's variables may stand in it. Raises ``ValueError``."""
    for name, value in _VARIABLES.items():
        expression = expression.replace(name, value)
    expression = re.sub(r'(=~?|!~?=?)"\$\w+"', r'\1".*"', expression)
    found = Asked()
    tree = promql.parse(expression)
    _read(tree, found)
    found.kept = _kept(tree)
    return found


def _selectors(tree: promql.Expr) -> Iterator[promql.VectorSelector]:
    seen: list[promql.VectorSelector] = []

    def visit(node: promql.Expr) -> None:
        if isinstance(node, promql.VectorSelector):
            seen.append(node)
        elif isinstance(node, promql.MatrixSelector):
            seen.append(node.vector_selector)

    promql.walk(tree, pre_visit=visit)
    # The walk may or may not go into a range: each once.
    return iter({id(one): one for one in seen}.values())


def _read(tree: promql.Expr, found: Asked) -> None:
    for selector in _selectors(tree):
        name = selector.name or ""
        found.labels[name] |= set()
        for matcher in selector.matchers.matchers:
            found.labels[name].add(matcher.name)
            if matcher.op == promql.MatchOp.Equal:
                found.values[name, matcher.name].add(matcher.value)
            elif matcher.op == promql.MatchOp.Re and matcher.value != ".*":
                found.values[name, matcher.name] |= set(matcher.value.split("|"))

    def visit(node: promql.Expr) -> None:
        wanted: list[str] = []
        parts: list[promql.Expr] = []
        if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            wanted, parts = node.modifier.labels, [node.expr]
        elif isinstance(node, promql.BinaryExpr) and node.modifier is not None:
            matching = node.modifier.matching
            wanted, parts = (matching.labels if matching else []), [node.lhs, node.rhs]
            for selector in _selectors(node.rhs):  # what `group_left` takes over
                found.labels[selector.name or ""] |= set(node.modifier.group_labels or [])
        for part in parts:
            for selector in _selectors(part):
                found.labels[selector.name or ""] |= set(wanted)

    promql.walk(tree, pre_visit=visit)


def _kept(tree: promql.Expr) -> set[str] | None:
    if isinstance(tree, promql.AggregateExpr):
        return set(tree.modifier.labels) if tree.modifier is not None else set()
    if isinstance(tree, promql.BinaryExpr):
        left = _kept(tree.lhs)
        return left if left is not None else _kept(tree.rhs)
    if isinstance(tree, promql.ParenExpr):
        return _kept(tree.expr)
    if isinstance(tree, promql.Call):
        inner = [_kept(arg) for arg in tree.args]
        kept = [one for one in inner if one is not None]
        return kept[-1] - {"le"} if kept else None
    return None
