"""Which structure a request wants of its answer: a call of a tool, or JSON by a schema.

The three APIs (chat, Anthropic messages, responses) say the same things under other names.
"""

from __future__ import annotations

from typing import Any, Final

_ANY_OBJECT: Final[dict[str, Any]] = {"type": "object", "properties": {"text": {"type": "string"}}}


def called_tool(raw: dict[str, Any]) -> tuple[str, Any] | None:
    """Pick the tool that the answer calls: its name and its schema.

    The one that `tool_choice` names, else the first; none once a result has come back, so that a
    conversation with tools ends.
    """
    choice = raw.get("tool_choice")
    named: Any = None
    if isinstance(choice, dict):
        inner = choice.get("function")
        named = inner.get("name") if isinstance(inner, dict) else choice.get("name")
        choice = choice.get("type")
    tools = [tool for tool in _dicts(raw.get("tools")) if _name(tool)]
    if choice == "none" or not tools or _has_result(raw):
        return None
    tool = next((tool for tool in tools if _name(tool) == named), tools[0])
    function = tool.get("function")
    described = function if isinstance(function, dict) else tool
    return _name(tool), described.get("parameters") or described.get("input_schema")


def wanted_schema(raw: dict[str, Any]) -> Any:
    """Find the schema that the answer's text must fit; None for free text."""
    for holder, name in ((raw, "response_format"), (raw.get("text"), "format"),
                         (raw.get("output_config"), "format")):  # fmt: skip
        wanted = holder.get(name) if isinstance(holder, dict) else None
        if not isinstance(wanted, dict):
            continue
        if wanted.get("type") == "json_object":
            return _ANY_OBJECT
        if wanted.get("type") == "json_schema":
            inner = wanted.get("json_schema")
            return (inner if isinstance(inner, dict) else wanted).get("schema")
    return None


def _name(tool: dict[str, Any]) -> str:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else tool.get("name")
    return name if isinstance(name, str) else ""


def _has_result(raw: dict[str, Any]) -> bool:
    turns = _dicts(raw.get("messages")) or _dicts(raw.get("input"))
    if not turns:
        return False
    last = turns[-1]
    return (
        last.get("role") == "tool"
        or last.get("type") == "function_call_output"
        or any(part.get("type") == "tool_result" for part in _dicts(last.get("content")))
    )


def _dicts(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
