"""``docs/configuration.md``: made from the settings model and the comments of the settings file.

Types, bounds and defaults are the model's (its JSON schema), the words are those of
``config/leaseway.yaml``, so neither can say what the other does not. ``python -m
app.lab.settings_page`` writes the page; a test fails when it is stale.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from app.config import Settings

TOP = Path(__file__).parents[2]
PAGE = TOP / "docs/configuration.md"
_LISTED = {"nodes": "NodeSettings", "keys": "KeySettings"}  # lists whose entries have fields

_WORDS = {  # what the patterns of the model mean
    r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$": "name (letters, digits, `.` `_` `-`)",
    r"^[^\x00-\x1f\x7f]{1,256}$": "model name",
    r"^[A-Za-z_][A-Za-z0-9_]*$": "name of an environment variable",
    r"^(\*|[a-z][a-z0-9+.-]*://[^/\sA-Z]+)$": "origin, or `*`",
    r"^sha256:[0-9a-f]{64}$": "`sha256:` and 64 hex digits",
}
_HEAD = """# Configuration

Written by `python -m app.lab.settings_page`; not by hand. Types, bounds and defaults are those of
the settings model ([app/config.py](../app/config.py)), the explanations those of
[config/leaseway.yaml](../config/leaseway.yaml), which is a file to copy and edit.

One YAML file: `leaseway serve --config FILE`. `LEASEWAY_<SECTION>__<KEY>` in the environment goes
over it (lists and mappings as JSON), and `REDIS_URL` over `redis.url`. An unknown key or a bad
value stops the start with file, key, value and what would be right; `leaseway check-config -c
FILE` says the same without a start. `leaseway schema` prints the JSON schema, for editors. A
running replica follows edits of `nodes`, `aliases` and `keys`; all else is read at its start, and
the log says so.
"""


def comments(text: str) -> dict[str, str]:
    """What the settings file says of each setting: ``section.key`` → its comment in one line.

    A section's own comment is under its name. Examples that are commented out (``# - id: …``)
    count as the fields of their list.
    """
    said: dict[str, str] = {}
    section, now = "", ""
    for line in text.splitlines():
        example = re.match(r"#( - |   )(\w+): .*?(?:\s#\s+(.*))?$", line)
        more = re.match(r"(?:#\s+#\s|\s+#\s)\s*(.*)$", line)
        if top := re.match(r"(\w+):[^#]*(?:#\s+(.*))?$", line):
            section = now = top[1]
            said[now] = top[2] or ""
        elif field := re.match(r"  (\w+): [^#]*?(?:\s#\s+(.*))?$", line):
            now = f"{section}.{field[1]}"
            said[now] = field[2] or ""
        elif example and section in _LISTED:
            now = f"{section}.{example[2]}"
            said[now] = example[3] or ""
        elif more and now and line.index("#", 1) > 12:
            said[now] += " " + more[1]
    return said


def kind(schema: dict[str, Any]) -> str:
    """The values that ``schema`` lets pass, for people. Raises ``KeyError`` on a new pattern."""
    if "anyOf" in schema:
        return " or ".join(kind(one) for one in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{one}`" for one in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema["type"] == "array":
        return f"list of {kind(schema['items'])}"
    if schema["type"] == "boolean":
        return "`true`, `false`"
    if schema["type"] == "string":
        if schema.get("format") == "date-time":
            return "date or time"
        return _WORDS[schema["pattern"]] if "pattern" in schema else "text"
    if schema["type"] == "null":
        return "`null`"
    word = "whole number" if schema["type"] == "integer" else "number"
    signs = {"exclusiveMinimum": ">", "minimum": "≥", "maximum": "≤"}
    bounds = [f"{sign} {schema[name]:,.12g}" for name, sign in signs.items() if name in schema]
    return " ".join([word, ", ".join(bounds)]).strip()


def _row(name: str, schema: dict[str, Any], said: str, *, required: bool) -> str:
    default = schema.get("default")
    if isinstance(default, float) and default.is_integer():
        default = int(default)
    shown = "must be given" if required else f"`{json.dumps(default, ensure_ascii=False)}`"
    cells = [f"`{name}`", kind(schema), shown, said]
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _table(prefix: str, model: dict[str, Any], said: dict[str, str]) -> list[str]:
    needed = model.get("required", [])
    return [
        "| setting | value | default | what and why |",
        "| --- | --- | --- | --- |",
        *(
            _row(name, field, said[f"{prefix}.{name}"], required=name in needed)
            for name, field in model["properties"].items()
        ),
    ]


def page(file: str) -> str:
    """The whole page, ``file`` being what the settings file holds. Raises ``KeyError`` when that
    says nothing of a setting."""
    schema, said = Settings.model_json_schema(), comments(file)
    models = schema["$defs"]
    parts = [_HEAD]
    for name, section in schema["properties"].items():
        model = models.get(_LISTED.get(name) or str(section.get("$ref", "")).rpartition("/")[2])
        title = f"`{name}[]`" if name in _LISTED else f"`{name}`"
        parts.append(f"## {title}\n")
        if said[name]:
            parts.append(f"{said[name]}.\n")
        if model is None:  # aliases: a mapping
            parts.append("A mapping from model name to model name; default: none.\n")
        else:
            parts.append("\n".join(_table(name, model, said)) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page((TOP / "config/leaseway.yaml").read_text()))
