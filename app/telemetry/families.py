"""Counters and histograms that cost a fifth of the library's: one thread alone writes them.

prometheus-client locks, and walks the buckets, at every observation. Here a series is a number or a
list of counts; what a scrape shows is made when it is asked for, in whatever thread. ``of`` gives
what counts one series, kept so that it is looked up once.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from prometheus_client import CollectorRegistry, Metric

_MOST_COUNTS, _MOST_TIMINGS = 2000, 500  # a page of all of them must not hold requests up


class _Family(Collector):
    """All series of one metric, told apart by ``labels``. Beyond ``most``, whatever made them, all
    that is new is one series, ``other``."""

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str],
        *,
        most: int,
        registry: CollectorRegistry,
    ) -> None:
        self._most = most
        self._name = name
        self._documentation = documentation
        self._labels = labels
        self._series: dict[tuple[str, ...], Any] = {}
        registry.register(self)

    def _one(self, values: tuple[Any, ...]) -> Any:
        """The series of these label values; an ``int`` may be one."""
        named = tuple(map(str, values))
        if named not in self._series and len(self._series) >= self._most:
            named = ("other",) * len(named)
        return self._series.setdefault(named, self._new())

    @abstractmethod
    def _new(self) -> Any: ...

    def describe(self) -> Iterable[Metric]:
        """For the registry, which refuses a name given twice."""
        return self.collect()


class _Count:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, amount: float = 1.0) -> None:
        self.value += amount


class Counts(_Family):
    """A family of counters; ``name`` goes without ``_total``."""

    def __init__(
        self, name: str, documentation: str, labels: Sequence[str], *, registry: CollectorRegistry
    ) -> None:
        super().__init__(name, documentation, labels, most=_MOST_COUNTS, registry=registry)
        self.of = lru_cache(2 * _MOST_COUNTS)(self._of)

    def _of(self, *values: Any) -> Callable[..., None]:
        add: Callable[..., None] = self._one(values).add
        return add

    def _new(self) -> _Count:
        return _Count()

    def collect(self) -> Iterator[CounterMetricFamily]:
        """As prometheus-client wants it."""
        family = CounterMetricFamily(self._name, self._documentation, labels=self._labels)
        for values, count in list(self._series.items()):
            family.add_metric(values, count.value)
        yield family


class _Buckets:
    """``counts[i]``: observations within the i-th bucket, the last above all."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self._bounds, seconds)] += 1
        self.sum += seconds


class Timings(_Family):
    """A family of histograms of seconds; ``buckets_s`` are upper bounds."""

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str],
        *,
        buckets_s: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._bounds = tuple(buckets_s)
        super().__init__(name, documentation, labels, most=_MOST_TIMINGS, registry=registry)
        self.of = lru_cache(2 * _MOST_TIMINGS)(self._of)

    def _of(self, *values: Any) -> Callable[[float], None]:
        observe: Callable[[float], None] = self._one(values).observe
        return observe

    def _new(self) -> _Buckets:
        return _Buckets(self._bounds)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """As prometheus-client wants it: cumulative counts by upper bound."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        bounds = [*(repr(float(bound)) for bound in self._bounds), "+Inf"]
        for values, series in list(self._series.items()):
            counts = [float(count) for count in accumulate(series.counts)]
            family.add_metric(values, list(zip(bounds, counts, strict=True)), series.sum)
        yield family
