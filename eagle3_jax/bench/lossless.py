"""Losslessness, checked: does speculative output equal plain output, and is every difference a numerical near-tie?

Two passes of different width differ in the last bits of float32, so a choice that hangs on less than that may flip. A row's
first divergence therefore counts as a fault unless the scores that the plain run chose from were tied within `TIE`, or the
token stood at the edge of its top-k or top-p set by less than that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax import target as target_model
from eagle3_jax.attention import causal_mask
from eagle3_jax.decoding.generate import Output, bucket, generate
from eagle3_jax.decoding.stream import stream
from eagle3_jax.drafting import Draft
from eagle3_jax.sampling import Sampling, log_distribution, position_noise
from eagle3_jax.target import Target
from eagle3_jax.tree import Chain, Tree, TreeChoice
from eagle3_jax.tree_names import tree_name

TIE = 1e-3


@dataclasses.dataclass(frozen=True)
class Settings:
    """One row's sampling settings, as given to `generate`."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The first position at which a row differs: `plain` and `speculative` tokens there (None: ended), and how close the choice was.

    gap: plain score minus speculative score in units of log-probability / temperature + noise. edge: the distance of either
    token to the boundary of its top-k or top-p set in log-probability (infinite when nothing is cut).
    """

    row: int
    position: int
    plain: int | None
    speculative: int | None
    gap: float
    edge: float

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.gap < TIE or self.edge < TIE


@dataclasses.dataclass(frozen=True)
class Report:
    """positions: tokens compared, up to a row's first divergence; divergences: all of them, near-ties included."""

    positions: int
    divergences: list[Divergence]

    @property
    def faults(self) -> list[Divergence]:
        """Divergences that rounding does not explain: there must be none."""
        return [d for d in self.divergences if not d.near_tie]


def compare(target: Target, prompts: Sequence[Sequence[int]], plain: Output, speculative: Output, settings: Sequence[Settings]) -> Report:
    """Compares row by row; for a row that differs, recomputes the scores at its first divergence from the plain run's text."""
    positions, found = 0, []
    for row, (prompt, a, b, s) in enumerate(zip(prompts, plain.tokens, speculative.tokens, settings, strict=True)):
        same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        positions += same
        if same == len(a) == len(b):
            if plain.finish_reasons[row] != speculative.finish_reasons[row]:
                found.append(Divergence(row, len(prompt) + same, None, None, np.inf, np.inf))
            continue
        positions += 1
        x, y = (a[same] if same < len(a) else None), (b[same] if same < len(b) else None)
        gap = edge = float("inf")
        if x is not None and y is not None:
            gap, edge = score_gap(target, [*prompt, *a[:same]], x, y, s, len(prompt))
        found.append(Divergence(row, len(prompt) + same, x, y, gap, edge))
    return Report(positions, found)


def score_gap(
    target: Target, context: Sequence[int], x: int, y: int, settings: Settings, prompt_length: int | None = None
) -> tuple[float, float]:
    """(score of x minus score of y for the token after `context`, distance of the nearer of the two to its set's boundary).

    prompt_length: how much of the context was the prompt (None: all), which `dynamic` rotary embedding depends on.
    """
    n = len(context)
    padded = np.zeros((1, bucket(n, 16)), np.int32)
    padded[0, :n] = context
    words = jnp.asarray([[settings.seed >> 32, settings.seed & 0xFFFFFFFF]], jnp.uint32)

    def sampling(top_k: int, top_p: float) -> Sampling:
        return Sampling(jnp.float32([settings.temperature]), jnp.int32([top_k]), jnp.float32([top_p]), words)

    logits = _last_logits(target, jnp.asarray(padded), jnp.int32(n), jnp.int32([prompt_length or n]))
    if settings.temperature == 0:
        row = np.asarray(logits[0], np.float64)
        return float(row[x] - row[y]), float("inf")
    noise = np.asarray(position_noise(words, jnp.int32([n]), logits.shape[-1]), np.float64)[0]
    raw = np.asarray(log_distribution(logits, sampling(0, 1.0)), np.float64)[0]
    cut = np.asarray(log_distribution(logits, sampling(settings.top_k, settings.top_p)), np.float64)[0]
    kept = np.isfinite(cut)
    edge = float("inf")
    if not kept.all():
        # A token flips in or out of the set when its log-probability is that close to the last one kept or the first one cut,
        # or, for top-p, when the mass before it is that close to top_p.
        last_in, first_out = raw[kept].min(), raw[~kept].max()
        edge = float(min(abs(raw[t] - (first_out if kept[t] else last_in)) for t in (x, y)))
        if settings.top_p < 1:
            order = np.argsort(-raw, kind="stable")
            k = settings.top_k if settings.top_k else len(order)
            mass = np.exp(raw[order])[:k]
            before = np.concatenate([[0.0], np.cumsum(mass / mass.sum())])
            edge = min(edge, float(np.min(np.abs(before[1:] - settings.top_p))))
    # Scores decide only between tokens that both stand in the set; otherwise the boundary alone can explain the difference.
    gap = float(raw[x] + noise[x] - raw[y] - noise[y]) if kept[x] and kept[y] else float("inf")
    return gap, edge


@jax.jit
def _last_logits(target: Target, tokens_1T: jax.Array, length: jax.Array, prompt_1: jax.Array) -> jax.Array:
    T = tokens_1T.shape[1]
    out = target_model.forward(target, tokens_1T, jnp.arange(T, dtype=jnp.int32)[None], causal_mask(T), prompt_B=prompt_1)
    return target_model.logits(target, jax.lax.dynamic_index_in_dim(out.hidden, length - 1, axis=1, keepdims=False))


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to decode a set of prompts: a tree, a batch size and sampling settings (row i of the set uses seed + i).

    tree: a size, "auto", or "plain" for no draft (a batch of plain rows against each alone). mesh: the name of the one it runs on, ""
    for none. stream: decoded as a stream, prompts by chunks and some cycles at a time.
    """

    tree: Chain | Tree | Literal["auto", "plain"]
    batch: int = 1
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    mesh: str = ""
    stream: bool = False

    @property
    def name(self) -> str:
        """A line that names the case, the same in every run."""
        size = self.tree if isinstance(self.tree, str) else tree_name(self.tree)
        where = (f" mesh {self.mesh}" if self.mesh else "") + (" stream" if self.stream else "")
        return f"{size} batch={self.batch} T={self.temperature:g} top_k={self.top_k} top_p={self.top_p:g} seed={self.seed}{where}"

    @property
    def sampling(self) -> tuple[float, int, float, int]:
        """What the plain run depends on."""
        return self.temperature, self.top_k, self.top_p, self.seed


def whole_stream(*arguments: Any) -> Output:
    """`stream`, read to its end."""
    return stream(*arguments).finish()


def sweep(
    target: Target,
    draft: Draft | None,
    prompts: Sequence[Sequence[int]],
    cases: Sequence[Case],
    max_new_tokens: int,
    on_mesh: Mapping[str, tuple[Target, Draft | None]] | None = None,
) -> Iterator[tuple[Case, Report, float]]:
    """(case, report, acceptance length) for every case: each row of its batch against the same prompt decoded plainly and alone, on
    no mesh. on_mesh: the same models placed on each mesh that a case names.

    Prompts are taken shortest first, so that a batch shares a shape; a set that the batch does not divide repeats its last prompt.
    Stop ids are the target's own. Row numbers in the reports count prompts in the given order.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    plain: dict[tuple[float, int, float, int], dict[int, Output]] = {}
    for case in cases:
        reference = plain.setdefault(case.sampling, {})
        positions, found, kept, cycles = 0, [], 0, 0
        for start in range(0, len(order), case.batch):
            rows = order[start : start + case.batch]
            padded = rows + rows[-1:] * (case.batch - len(rows))

            def decode(
                which: list[int], model: Target, draft: Draft | None, tree: TreeChoice, streamed: bool = False, case: Case = case
            ) -> Output:
                return (whole_stream if streamed else generate)(
                    model,
                    draft,
                    [prompts[i] for i in which],
                    max_new_tokens,
                    case.temperature,
                    case.top_k,
                    case.top_p,
                    [case.seed + i for i in which],
                    tree,
                )

            for i in rows:
                if i not in reference:
                    reference[i] = decode([i], target, None, None)
            model, own = (on_mesh or {})[case.mesh] if case.mesh else (target, draft)
            own, tree = (None, None) if case.tree == "plain" else (own, case.tree)
            output = decode(padded, model, own, tree, case.stream)
            for slot, i in enumerate(rows):
                one = Output([output.tokens[slot]], [output.finish_reasons[slot]], [output.accept_lengths[slot]])
                kept, cycles = kept + sum(one.accept_lengths[0]), cycles + len(one.accept_lengths[0])
                settings = Settings(case.temperature, case.top_k, case.top_p, case.seed + i)
                report = compare(target, [prompts[i]], reference[i], one, [settings])
                positions += report.positions
                found += [dataclasses.replace(d, row=i) for d in report.divergences]
        yield case, Report(positions, found), kept / cycles if cycles else 1.0
