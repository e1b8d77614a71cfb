"""Tokens per second against the batch: where the gain of speculation ends (paper, Tables 3 and 5).

A full batch leaves no arithmetic idle, and then a drafted token that falls costs as much as one that stands.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from eagle3_jax.bench.benchmark import PLAIN, Benchmark, Sample, benchmark
from eagle3_jax.drafting import Draft
from eagle3_jax.target import Target
from eagle3_jax.tree import Chain, Tree

PAPER_CHAINS = (Chain(2), Chain(3))
BATCHES = (1, 2, 4, 8, 16, 32, 64)


@dataclasses.dataclass(frozen=True)
class Throughput:
    """One batch size and way of decoding. speed_up: over plain decoding of the same batch, after the first token; None for plain."""

    batch: int
    mode: str
    tokens_per_second: float
    speed_up: float | None
    acceptance_length: float


def sweep(
    target: Target,
    draft: Draft | None,
    prompts: Sequence[Sequence[int]],
    batches: Sequence[int] = BATCHES,
    trees: Sequence[Chain | Tree | None] = PAPER_CHAINS,
    *,
    progress: Callable[[int, Sample], None] = lambda batch, sample: None,
    done: Mapping[int, Sequence[Sample]] | None = None,
    **options: Any,
) -> list[Throughput]:
    """Every batch size with every tree, and plainly, in turns; without a draft plainly alone. Each batch size answers `rows_for` of the
    prompts: all of them, so that sizes differ in nothing else.

    progress: called with the batch after each sample; done: samples of an interrupted run by batch. options: as in `benchmark`.
    """
    found: list[Throughput] = []
    for batch in batches:
        result = benchmark(
            target,
            draft,
            rows_for(prompts, batch),
            trees,
            batch=batch,
            progress=partial(progress, batch),
            done=(done or {}).get(batch, ()),
            **options,
        )
        found.extend(points(result, batch))
    return found


def rows_for(prompts: Sequence[Sequence[int]], batch: int) -> list[Sequence[int]]:
    """All prompts, the first ones again until the last batch is full."""
    return [prompts[i % len(prompts)] for i in range(-(-len(prompts) // batch) * batch)]


def points(result: Benchmark, batch: int) -> list[Throughput]:
    """The throughput of every mode of a benchmark of full batches: tokens per second after the first token of each row."""
    return [
        Throughput(
            batch,
            mode.mode,
            mode.decode_tokens_per_second or 0.0,
            mode.decode_speed_up.value if mode.decode_speed_up is not None else None,
            mode.acceptance_length.value,
        )
        for mode in result.modes
    ]


def break_even(found: Sequence[Throughput], mode: str) -> float | None:
    """The batch at which the mode's gain falls to 1.0, between the measured ones on a logarithmic scale; None: it does not within them.

    0.0 when it gains nothing at the smallest batch.
    """
    curve = sorted((t.batch, t.speed_up) for t in found if t.mode == mode and t.speed_up is not None)
    if not curve:
        return None
    if curve[0][1] < 1.0:
        return 0.0
    for (a, gain_a), (b, gain_b) in itertools.pairwise(curve):
        if gain_b < 1.0:
            return 2.0 ** (math.log2(a) + (gain_a - 1.0) / (gain_a - gain_b) * (math.log2(b) - math.log2(a)))
    return None


def modes_in(found: Sequence[Throughput]) -> list[str]:
    """Ways of decoding other than plain, in order."""
    return [mode for mode in dict.fromkeys(t.mode for t in found) if mode != PLAIN]
