"""How text arrives: a stream of one cycle per dispatch, every arrival timed.

`generate` runs all cycles in one program and hands the text over at its end. A server that streams hands over what each cycle kept;
what its user feels are the gaps between those bursts, and their worst ones.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from eagle3_jax.bench.evaluate import Percentiles
from eagle3_jax.compile_clock import CompileClock
from eagle3_jax.decoding.stream import stream
from eagle3_jax.drafting import Draft
from eagle3_jax.target import Target
from eagle3_jax.tree import Chain, Tree


@dataclasses.dataclass(frozen=True)
class Bursts:
    """gap_seconds: between arrivals, the first token excluded. tokens: of a burst. count: bursts seen."""

    gap_seconds: Percentiles
    tokens: Percentiles
    mean_tokens: float
    count: int


def bursts(
    target: Target, draft: Draft | None, prompts: Sequence[Sequence[int]], tree: Chain | Tree | None, **options: Any
) -> Bursts | None:
    """Every prompt alone, cycle by cycle; None when no cycle ran. options: as in `generate`.

    A gap in which something was compiled is not counted.
    """
    clock = CompileClock()
    gaps: list[float] = []
    sizes: list[int] = []
    for prompt in prompts:
        arrival: tuple[float, float] | None = None
        with stream(target, draft, [list(prompt)], tree=tree, cycles=1, **options) as events:
            for event in events:
                now = time.perf_counter(), clock.seconds
                if arrival is not None:
                    sizes.append(len(event.tokens))
                    if now[1] == arrival[1]:
                        gaps.append(now[0] - arrival[0])
                arrival = now
    gap, size = Percentiles.of(gaps), Percentiles.of(sizes)
    if gap is None or size is None:
        return None
    return Bursts(gap, size, float(np.mean(sizes)), len(sizes))
