"""Fuzzing in a time box: the same cases in the same order on every machine, as far as time goes.

``FUZZ_SECONDS`` is the time of one file of tests (default 20); ``FUZZ_SEED`` another order (0).
"""

from __future__ import annotations

import itertools
import os
from time import monotonic
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Callable

SECONDS = float(os.environ.get("FUZZ_SECONDS", "20"))
FIRST_SEED = int(os.environ.get("FUZZ_SEED", "0"))


def fuzz(
    check: Callable[[Any], None],
    cases: st.SearchStrategy[Any],
    *,
    share: float,
    batch: int = 50,
) -> None:
    """Give ``check`` cases, at least one ``batch``, until its ``share`` of the time is over.

    A case that fails is made as small as it goes, and printed.
    """
    until = monotonic() + SECONDS * share
    for number in itertools.count(FIRST_SEED):
        rules = settings(
            max_examples=batch,
            database=None,
            deadline=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
            verbosity=Verbosity.normal,
        )
        seed(number)(rules(given(cases)(check)))()
        if monotonic() > until:
            break
