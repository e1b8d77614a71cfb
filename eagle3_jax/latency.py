"""How text arrives: a decode stepped from the host one cycle at a time, every arrival timed.

`generate` runs all cycles in one program and hands the text over at its end. A server that streams hands over what each cycle kept;
what its user feels are the gaps between those bursts, and their worst ones.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from eagle3_jax import decode
from eagle3_jax.drafting import Draft
from eagle3_jax.evaluate import Percentiles
from eagle3_jax.generate import prepare
from eagle3_jax.target import Target
from eagle3_jax.tree import Chain, Tree


@dataclasses.dataclass(frozen=True)
class Bursts:
    """gap_seconds: between arrivals, the first token excluded. tokens: of a burst. count: bursts seen."""

    gap_seconds: Percentiles
    tokens: Percentiles
    mean_tokens: float
    count: int


_prefill = jax.jit(decode.prefill, static_argnames=("config",))
_cycle = jax.jit(decode.cycle, static_argnames=("config",), donate_argnames=("state",))


def bursts(
    target: Target, draft: Draft | None, prompts: Sequence[Sequence[int]], tree: Chain | Tree | None, **options: Any
) -> Bursts | None:
    """Every prompt alone, cycle by cycle; None when no cycle ran. options: as in `generate`.

    Compilation and first calls are not timed.
    """
    gaps: list[float] = []
    sizes: list[int] = []
    warm: set[Any] = set()
    for prompt in prompts:
        request, config = prepare(target, draft, [list(prompt)], tree=tree, **options)
        # One shape of prompt per program: the first call of each is run twice.
        shape = (config, request.prompts.shape)
        for counted in (False, True) if shape not in warm else (True,):
            found = _timed(partial(_prefill, target, draft, request, config), partial(_cycle, target, draft, request, config))
            if counted:
                gaps.extend(gap for gap, _ in found)
                sizes.extend(size for _, size in found)
        warm.add(shape)
    gap, size = Percentiles.of(gaps), Percentiles.of(sizes)
    if gap is None or size is None:
        return None
    return Bursts(gap, size, float(np.mean(sizes)), len(sizes))


def _timed(start: Any, step: Any) -> list[tuple[float, int]]:
    """(gap, tokens) of every burst after the prefill's token."""
    state = start()
    before, done = (int(x[0]) for x in jax.device_get((state.n_out, state.done)))
    last, found = time.perf_counter(), []
    while not done:
        state = step(state)
        count, done = (int(x[0]) for x in jax.device_get((state.n_out, state.done)))
        now = time.perf_counter()
        found.append((now - last, count - before))
        last, before = now, count
    return found
