"""What engines say of their load on their Prometheus pages: optional news, never required.

Sources, by engine: vLLM ``vllm/v1/metrics/loggers.py``, and before V1 ``vllm/engine/metrics.py``;
SGLang ``srt/metrics/collector.py`` (``--enable-metrics``); llama.cpp ``tools/server/README.md``
(``--metrics``; it tells the use of its KV cache up to May 2025 only, ggml-org/llama.cpp#13660);
TGI ``docs/source/reference/metrics.md``. What a page leaves out, ``/props`` of llama.cpp and
``/info`` of TGI may say.

A page may be cut off, huge, or made to hurt. Only the lines of the names that are wanted are
parsed, up to a number of bytes, and a line that is wrong is left out.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson
from prometheus_client.parser import text_string_to_metric_families

from app.cluster.engines import NO_ANSWER, get_page

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

    from app.model import Node

log = logging.getLogger("leaseway.signals")
_WITHOUT = {"ollama", "generic"}  # engines that have no such page
_LINE_BYTES, _PARSED_BYTES = 4 * 1024, 64 * 1024
_MOST = 2**31  # above it is no count
_LINE_END = 0x0A


class Signals(NamedTuple):
    """The load of a node, as its engine tells it.

    ``waiting``, ``running``: requests. ``kv_used``: share of the KV cache in use, 0 to 1; without
    what is only kept for a next time. ``slots``: requests that may run at once. ``kv_tokens``:
    size of the KV cache. None: the engine does not say.
    """

    waiting: int
    running: int
    kv_used: float | None = None
    slots: int | None = None
    kv_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class _Engine:
    """Where an engine says what.

    ``waiting`` are added up, of ``kv_used`` the first counts that is there: later names are older.
    ``rank`` is the label that tells engines behind one server apart (data parallel). They add
    up; series that differ in another label (tensor rank, priority) are views of the same.
    ``limits`` is a JSON page, with the members that hold ``slots`` and ``kv_tokens``.
    """

    running: str
    waiting: tuple[str, ...]
    kv_used: tuple[str, ...] = ()
    kv_held: str = ""  # in tokens: where the engine tells no share
    kv_tokens: str = ""
    kv_config: str = ""  # a metric that tells the size in its labels
    rank: str = ""
    limits: str = ""
    slots_name: str = ""
    kv_name: str = ""


_ENGINES = (
    _Engine(
        "vllm:num_requests_running",
        waiting=("vllm:num_requests_waiting", "vllm:num_requests_swapped"),  # the latter before V1
        kv_used=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),  # 1 is 100 percent
        kv_config="vllm:cache_config_info",
        rank="engine",
    ),
    _Engine(
        "sglang:num_running_reqs",
        waiting=("sglang:num_queue_reqs", "sglang:num_grammar_queue_reqs"),
        kv_used=("sglang:token_usage",),
        kv_tokens="sglang:max_total_num_tokens",
        rank="dp_rank",
    ),
    _Engine(
        "llamacpp:requests_processing",
        waiting=("llamacpp:requests_deferred",),
        kv_used=("llamacpp:kv_cache_usage_ratio",),
        limits="/props",
        slots_name="total_slots",
    ),
    _Engine(
        "tgi_batch_current_size",
        waiting=("tgi_queue_size",),
        kv_held="tgi_batch_current_max_tokens",
        limits="/info",
        slots_name="max_batch_size",
        kv_name="max_batch_total_tokens",
    ),
)


async def scrape(client: httpx.AsyncClient, node: Node) -> Signals | None:
    """What the engine of ``node`` says of its load now; None when it does not. Never raises."""
    if node.engine in _WITHOUT:
        return None
    page = await _body(client, node, "/metrics")
    # In a thread: over a page made to hurt this takes tenths of a second.
    engine = await asyncio.to_thread(_engine_of, page)
    if engine is None:
        return None
    limits = await _body(client, node, engine.limits) if engine.limits else b""
    return await asyncio.to_thread(read, page, limits)


async def _body(client: httpx.AsyncClient, node: Node, path: str) -> bytes:
    try:
        page = await get_page(client, node, path)
    except NO_ANSWER as exc:
        log.debug("node %s: no %s: %s", node.id, path, exc or type(exc).__name__)
        return b""
    return page.body if page.status == 200 else b""


def read(page: bytes, limits: bytes = b"") -> Signals | None:
    """The signals on a metrics page, and on the page of limits that belongs to it.

    None when it is the page of no engine that is known. Never raises.
    """
    engine = _engine_of(page)
    if engine is None:
        return None
    found = _Series(page, engine.rank)
    running, queues = found.total(engine.running), [found.total(name) for name in engine.waiting]
    shares = (found.mean(name) for name in engine.kv_used)
    kv_used = next((share for share in shares if share is not None), None)
    kv_held = found.total(engine.kv_held)
    slots, kv_limit = _limits(engine, limits)
    kv_tokens = found.total(engine.kv_tokens) or found.total(engine.kv_config) or kv_limit
    if running is None or found.overflowed:
        return None
    if kv_used is None and kv_held is not None and kv_tokens:
        kv_used = kv_held / kv_tokens
    return Signals(
        waiting=int(sum(queue or 0 for queue in queues)),
        running=int(running),
        kv_used=None if kv_used is None else min(1.0, kv_used),
        slots=slots,
        kv_tokens=int(kv_tokens) if kv_tokens else None,
    )


def _engine_of(page: bytes) -> _Engine | None:
    return next((one for one in _ENGINES if any(_lines(page, one.running))), None)


def _lines(page: bytes, name: str) -> Iterator[bytes]:
    """The lines of a metric; not the one that the page's end cuts off, perhaps in a number."""
    wanted, at = name.encode(), 0
    while name and (at := page.find(wanted, at)) >= 0:
        end = page.find(b"\n", at)
        if end < 0:
            return
        behind = page[at + len(wanted) : at + len(wanted) + 1]
        if (at == 0 or page[at - 1] == _LINE_END) and behind in {b"{", b" ", b"\t"}:
            yield page[at:end]
        at = end


class _Series:
    """The numbers of a page, read name by name within a number of bytes.

    ``overflowed``: there were more, and sums are too small.
    """

    def __init__(self, page: bytes, rank: str) -> None:
        self._page = page
        self._rank = rank
        self._left = _PARSED_BYTES
        self.overflowed = False

    def total(self, name: str) -> float | None:
        """The sum over ranks; None without any."""
        ranks = self._by_rank(name)
        return sum(ranks.values()) if ranks else None

    def mean(self, name: str) -> float | None:
        """The mean over ranks; None without any."""
        ranks = self._by_rank(name)
        return sum(ranks.values()) / len(ranks) if ranks else None

    def _by_rank(self, name: str) -> dict[str, float]:
        ranks: dict[str, float] = {}
        for line in _lines(self._page, name):
            if len(line) > _LINE_BYTES:
                continue
            self._left -= len(line)
            if self._left < 0:
                self.overflowed = True
                break
            labels, value = _parsed(line)
            if value is not None:
                rank = labels.get(self._rank, "")
                ranks[rank] = max(value, ranks.get(rank, 0.0))
        return ranks


def _parsed(line: bytes) -> tuple[dict[str, str], float | None]:
    """Labels and value of a line; no value when there is none that makes sense."""
    text = line.decode("utf-8", "replace") + "\n"
    try:
        [family] = text_string_to_metric_families(text)
        [sample] = family.samples
        labels, value = sample.labels, float(sample.value)
    except Exception:  # a parser for pages that mean well
        return {}, None
    if "num_gpu_blocks" in labels:  # of `vllm:cache_config_info`, whose value is always 1
        value = _config_tokens(labels)
    return labels, value if 0 <= value < _MOST else None  # not NaN either


def _config_tokens(labels: dict[str, str]) -> float:
    """Size of vLLM's KV cache; the first name is newer, and right for hybrid models too."""
    told = labels.get("kv_cache_size_tokens", "")
    if told.isdecimal():
        return float(told)
    blocks, block_size = labels["num_gpu_blocks"], labels.get("block_size", "")
    known = blocks.isdecimal() and block_size.isdecimal()
    return float(blocks) * float(block_size) if known else -1.0


def _limits(engine: _Engine, page: bytes) -> tuple[int | None, int | None]:
    """Slots and size of the KV cache, as far as the page of limits tells them."""
    try:
        said: Any = orjson.loads(page)
    except orjson.JSONDecodeError:
        return None, None
    members = said if isinstance(said, dict) else {}
    slots, kv_tokens = members.get(engine.slots_name), members.get(engine.kv_name)
    return _count(slots), _count(kv_tokens)


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 < value < _MOST else None
