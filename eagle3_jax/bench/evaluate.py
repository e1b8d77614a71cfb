"""What speculation accepts: figures from an `Output`, and how sure they are.

Words: a cycle drafts, verifies and commits once. Acceptance length (tau): tokens kept per cycle, the target's own token included.
n-alpha (EAGLE-3, section 4.2): how often the (n+1)-th drafted token is accepted when the first n were, measured with a chain.

The cut. A row's last cycle may end at a stop id or at the limit, in the middle of what the target would have accepted. Of a
cycle that kept k tokens the first k-1 were accepted drafts; without a cut the k-th is the target's own, so draft k was refused.
With a cut nobody knows what the k-th was, so a last cycle counts k-1 acceptances and says nothing about draft k. When the
drafted trees were recorded, it is known and counted. Tokens and cycles themselves are always counted as kept, after the cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from eagle3_jax.decoding.generate import Output


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """trials[n]: cycles whose first n drafts stood and whose next one's fate is known; accepted[n]: those in which that one stood too."""

    trials: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def n_alpha(self) -> list[float | None]:
        """accepted[n] / trials[n], None where nothing was tried: the paper's n-alpha with a chain, rates per depth with a tree."""
        return [a / t if t else None for a, t in zip(self.accepted, self.trials, strict=True)]

    @property
    def per_position(self) -> list[float | None]:
        """The chance that a cycle accepts at least i drafts, i = 1..depth: the product of the rates up to there."""
        chances: list[float | None] = []
        for rate in self.n_alpha:
            before = chances[-1] if chances else 1.0
            # Nothing reached this depth: the chance of passing it is not measured, unless nothing passed the one before.
            chances.append(0.0 if before == 0.0 else None if before is None or rate is None else before * rate)
        return chances


@dataclasses.dataclass(frozen=True)
class Interval:
    """A figure and its bootstrap interval over prompts; low and high are None with fewer than two prompts."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclasses.dataclass(frozen=True)
class Percentiles:
    """Of a list of figures: the median and the two that few exceed."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles | None:
        """None of an empty list."""
        return cls(*(float(x) for x in np.percentile(values, (50, 90, 99)))) if len(values) else None


def acceptance(output: Output, depth: int) -> Acceptance:
    """Counts of accepted drafts by depth, 1..depth; the module docstring says how a cut cycle counts. All zero for plain decoding."""
    trials, accepted = np.zeros(depth, int), np.zeros(depth, int)
    for row, lengths in enumerate(output.accept_lengths):
        end = 1
        for cycle, kept in enumerate(lengths):
            end += kept
            stood, refused = kept - 1, True
            if cycle == len(lengths) - 1:
                drafted = _last_was_drafted(output, row, cycle, output.tokens[row][end - kept : end])
                stood += drafted is True
                refused = drafted is False
            trials[:stood] += 1
            accepted[:stood] += 1
            if refused and stood < depth:
                trials[stood] += 1
    return Acceptance(tuple(trials.tolist()), tuple(accepted.tolist()))


def split_rows(output: Output) -> list[Output]:
    """One Output per row."""
    trees = output.trees or [None] * len(output.tokens)
    rows = zip(output.tokens, output.finish_reasons, output.accept_lengths, trees, strict=True)
    return [Output([tokens], [reason], [lengths], None if tree is None else [tree]) for tokens, reason, lengths, tree in rows]


def n_alpha_intervals(outputs: Sequence[Output], depth: int, confidence: float = 0.95) -> list[Interval | None]:
    """n-alpha for n = 0..depth-1 over all rows of the outputs, with intervals over rows; None where nothing was tried."""
    rows = [acceptance(row, depth) for output in outputs for row in split_rows(output)]
    found: list[Interval | None] = []
    for n in range(depth):
        # Rows that never got so far say nothing about this rate; without them no resample divides by zero.
        parts = [[row.accepted[n], row.trials[n]] for row in rows if row.trials[n]]
        found.append(bootstrap(parts, lambda sums: sums[..., 0] / sums[..., 1], confidence) if parts else None)
    return found


def acceptance_length(outputs: Sequence[Output], confidence: float = 0.95) -> Interval:
    """Tokens kept per cycle over all rows of the outputs, with the interval over rows; 1 when no cycle ran."""
    return bootstrap(kept_and_cycles(outputs), lambda sums: tokens_per_cycle(sums[..., 0], sums[..., 1]), confidence)


def tokens_per_cycle(kept: np.ndarray, cycles: np.ndarray) -> np.ndarray:
    """kept / cycles, 1 where no cycle ran."""
    return np.where(cycles > 0, kept / np.maximum(cycles, 1), 1.0)


def kept_and_cycles(outputs: Sequence[Output]) -> list[tuple[int, int]]:
    """(tokens kept, cycles) of every row of the outputs, in order."""
    return [(sum(row), len(row)) for output in outputs for row in output.accept_lengths]


def _last_was_drafted(output: Output, row: int, cycle: int, kept: list[int]) -> bool | None:
    """Whether the last kept token of a cycle is a node of the drafted tree; None when trees were not recorded."""
    if output.trees is None:
        return None
    return len(accepted_path(*output.trees[row][cycle], kept)) - 1 == len(kept)


def accepted_path(tokens: Sequence[int], parents: Sequence[int], kept: Sequence[int]) -> list[int]:
    """Nodes of a drafted tree that the tokens of its cycle follow, the root (node 0) first; a kept token outside the tree ends it."""
    path = [0]
    for token in kept:
        child = next((m for m in range(1, len(tokens)) if parents[m] == path[-1] and tokens[m] == token), None)
        if child is None:
            break
        path.append(child)
    return path


def add_acceptance(counts: Sequence[Acceptance]) -> Acceptance:
    """The sum over outputs of one depth."""
    return Acceptance(
        tuple(map(sum, zip(*(c.trials for c in counts), strict=True))), tuple(map(sum, zip(*(c.accepted for c in counts), strict=True)))
    )


def bootstrap(
    parts: Any,
    statistic: Callable[[np.ndarray], np.ndarray],
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """A statistic of column sums, with its percentile interval over resampled rows (prompts).

    parts: [P, k], what each prompt adds. statistic: sums [..., k] -> [...]. A ratio of sums weighs long answers more, as a user feels it.
    """
    table = np.asarray(parts, np.float64)
    value = float(statistic(table.sum(axis=0)))
    P = len(table)
    if P < 2:
        return Interval(value)
    draws = np.random.default_rng(seed).multinomial(P, np.full(P, 1.0 / P), size=resamples)
    low, high = np.quantile(statistic(draws @ table), [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(value, float(low), float(high))
