"""Decoding in several programs: long prompts by chunks, then some cycles at a time, in caches that grow by bucket.

What `decode.run` does in one program, for requests that it does not fit: prompts longer than a chunk, answers longer than one
buffer, and streams. The sizes of everything come from short lists, so the number of programs is known beforehand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.cache import Cache, resized
from eagle3_jax.decoding import decode
from eagle3_jax.decoding.buckets import chunk_widths, slot_buckets, window
from eagle3_jax.decoding.decode import DecodeConfig, DecodeState, Fed, Request, cycle
from eagle3_jax.drafting import Draft
from eagle3_jax.sharding import on_mesh_of
from eagle3_jax.target import Target

CYCLES = 4
"""Cycles of one dispatch, unless asked otherwise."""


@partial(jax.jit, static_argnames=("slots",))
def blank(target: Target, draft: Draft | None, first_B: jax.Array, slots: int) -> Fed:
    """Program: empty caches."""
    with on_mesh_of(target):
        return decode.blank(target, draft, first_B, slots)


@partial(jax.jit, donate_argnames=("fed",))
def feed(
    target: Target, draft: Draft | None, tokens_BT: jax.Array, following_BT: jax.Array, count_B: jax.Array, prompt_B: jax.Array, fed: Fed
) -> Fed:
    """Program: one chunk of the prompts, the caches updated in place."""
    with on_mesh_of(target):
        return decode.feed(target, draft, tokens_BT, following_BT, count_B, prompt_B, fed)


@partial(jax.jit, static_argnames=("slots",))
def grown(caches: Any, slots: int) -> Any:
    """Program: the same contents in caches of more slots."""
    return jax.tree.map(lambda cache: resized(cache, slots), caches, is_leaf=lambda x: isinstance(x, Cache))


@jax.jit
def shortened(lengths_B: jax.Array, fewer: jax.Array) -> jax.Array:
    """Program: a cache's lengths without its last `fewer` entries."""
    return lengths_B - fewer


@partial(jax.jit, static_argnames=("config",))
def first_token(
    target: Target, request: Request, config: DecodeConfig, hidden_BD: jax.Array, features_BA: jax.Array
) -> tuple[DecodeState, DecodeState]:
    """Program: every row's first token; (what the first cycle starts from, what came out)."""
    with on_mesh_of(target):
        return split(decode.first_token(target, request, config, hidden_BD, features_BA))


@partial(jax.jit, static_argnames=("config",), donate_argnames=("state",))
def advance(
    target: Target, draft: Draft | None, request: Request, config: DecodeConfig, state: DecodeState, cycles: jax.Array
) -> tuple[DecodeState, DecodeState]:
    """Program: at most `cycles` (int32 []) cycles; fewer when all rows are done, the buffer is full, or a cache lacks room for one more.

    request.limits: tokens that each row may still bring. state is donated, its caches are updated in place.
    Returns (what the next call starts from, what came out).
    """
    state = dataclasses.replace(state, **decode.blank_output(request.lengths.shape[0], config))
    slots, C = state.cache.slots, config.steps

    def going(carry: tuple[jax.Array, DecodeState]) -> jax.Array:
        done, s = carry
        room = (jnp.max(s.cache.lengths) + C <= slots) & (jnp.max(s.n_out) < config.max_new)
        return (done < cycles) & ~jnp.all(s.done) & room

    def one(carry: tuple[jax.Array, DecodeState]) -> tuple[jax.Array, DecodeState]:
        return carry[0] + 1, cycle(target, draft, request, config, carry[1])

    with on_mesh_of(target):
        _, state = jax.lax.while_loop(going, one, (jnp.zeros((), jnp.int32), state))
    return split(state)


def split(state: DecodeState) -> tuple[DecodeState, DecodeState]:
    """(what a later cycle needs, what the host reads): the first is donated while the second is still being read."""
    carried = dict.fromkeys(("out", "n_out", "accepted", "cycles", "trees"))
    told = dict.fromkeys(("cache", "draft_cache", "features", "tokens", "count", "pending"))
    return dataclasses.replace(state, **carried), dataclasses.replace(state, **told)


def check_cycles(cycles: int) -> None:
    """Raises ValueError for a number of cycles that is none."""
    if not isinstance(cycles, int) or isinstance(cycles, bool) or cycles < 1:
        raise ValueError(f"cycles: {cycles!r} must be an int >= 1")


def empty(target: Target, draft: Draft | None, request: Request, config: DecodeConfig) -> Fed:
    """Caches of the smallest bucket for the rows of a request."""
    first = np.asarray(request.prompts)[:, 0]
    return blank(target, draft, first, slot_buckets(config, target.config.max_position)[0])


class Segments:
    """One request on its way: `reports` feeds the prompts, then dispatches cycles, and tells after each what came out.

    It holds the only references to the caches (in `fed` before the first token, in `state` after): dropping it frees them.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        request: Request,
        config: DecodeConfig,
        cycles: int | None = None,
        fed: Fed | None = None,
        start: int = 0,
    ):
        """cycles: of one dispatch; None: as many as the buffer of the usual number holds.

        fed, start: caches that hold the first `start` tokens of every prompt, and as many pairs; given, they are used up.
        """
        self.target, self.draft = target, draft
        self.prompts, self.lengths = np.asarray(request.prompts), np.asarray(request.lengths)
        self.limits = np.array(request.limits)
        self.request = dataclasses.replace(request, prompts=np.zeros((len(self.lengths), 0), np.int32))
        self.config = dataclasses.replace(config, slots=0, max_new=window(config, cycles or CYCLES), keep_caches=False)
        self.cycles = cycles or self.config.max_new
        self.start = start
        """Prompt tokens that have been run, of the longest row."""
        self.buckets = slot_buckets(config, target.config.max_position)
        self.fed = fed if fed is not None else empty(target, draft, request, config)
        self.state: DecodeState | None = None
        self.sent = np.zeros_like(self.lengths)
        """Tokens that each row has brought so far."""

    @property
    def kept(self) -> Fed:
        """The caches as they are now, for a later request that begins alike."""
        cache, draft_cache = self.caches
        return dataclasses.replace(self.fed, cache=cache, draft_cache=draft_cache)

    @property
    def caches(self) -> tuple[Any, Any]:
        """The target's and the draft's."""
        holder = self.state if self.state is not None else self.fed
        return holder.cache, holder.draft_cache

    def reports(self) -> Iterator[DecodeState]:
        """What came out, as numpy arrays: every row's first token, then some cycles each, until all rows are done.

        The next dispatch is on its way while the caller looks at the last one's tokens, but for the first token: that comes at once.
        """
        self.prefill()
        report = self.first()
        yield report
        ahead = None
        while not report.done.all():
            report = self.note(ahead if ahead is not None else self.dispatch())
            ahead = None if report.done.all() else self.dispatch()
            yield report

    def prefill(self) -> None:
        """Runs the prompts, chunk by chunk."""
        start = self.start
        for width in chunk_widths(start, int(self.lengths.max()), self.buckets[-1]):
            # One slot more than the chunk's: a draft may hold the first token beside its pairs.
            self.reserve(start + width + 1)
            self.feed(start, width)
            start += width
            self.start = min(start, int(self.lengths.max()))

    def feed(self, start: int, width: int) -> None:
        """Runs tokens start..start+width-1 of every prompt."""
        columns = np.minimum(np.arange(start, start + width + 1), self.prompts.shape[1] - 1)
        tokens = self.prompts[:, columns]
        count = np.clip(self.lengths - start, 0, width).astype(np.int32)
        self.fed = feed(self.target, self.draft, tokens[:, :-1], tokens[:, 1:], count, self.lengths, self.fed)

    def first(self) -> DecodeState:
        """Every row's first token."""
        fed = self.fed
        state, report = first_token(self.target, self.request, self.config, fed.hidden, fed.features)
        self.state = dataclasses.replace(state, cache=fed.cache, draft_cache=fed.draft_cache)
        self.fed = dataclasses.replace(fed, cache=None, draft_cache=None)
        return self.note(report)

    def dispatch(self) -> DecodeState:
        """Sends the next cycles on their way; what will have come out, not waited for."""
        assert self.state is not None, "the first token comes first"
        # The longest row's cache holds all its tokens but the pending one; a cycle writes `steps` slots behind them.
        self.reserve(int((self.lengths + self.sent).max()) - 1 + self.config.steps)
        request = dataclasses.replace(self.request, limits=(self.limits - self.sent).astype(np.int32))
        self.state, report = advance(self.target, self.draft, request, self.config, self.state, np.int32(self.cycles))
        return report

    def note(self, report: DecodeState) -> DecodeState:
        """The report on this machine, once it is there."""
        told = jax.device_get(report)
        self.sent = self.sent + told.n_out
        return told

    def reserve(self, slots: int) -> None:
        """Moves the caches to the smallest bucket that has so many slots, if theirs has not. Bucket by bucket: fewer programs."""
        while self.caches[0].slots < slots:
            cache, draft_cache = grown(self.caches, next(size for size in self.buckets if size > self.caches[0].slots))
            if self.state is not None:
                self.state = dataclasses.replace(self.state, cache=cache, draft_cache=draft_cache)
            else:
                self.fed = dataclasses.replace(self.fed, cache=cache, draft_cache=draft_cache)


def join(reports: Sequence[DecodeState]) -> DecodeState:
    """One report of all, each row's parts behind each other."""
    last = reports[-1]

    def rows(values: Sequence[Any], counts: Sequence[Any]) -> np.ndarray:
        """values: per report [B, X, ...], of which counts [B] are meant; [B, most, ...]."""
        joined = np.zeros((len(last.done), max(1, int(np.sum(counts, axis=0).max())), *values[0].shape[2:]), values[0].dtype)
        for b in range(len(joined)):
            parts = np.concatenate([value[b, : count[b]] for value, count in zip(values, counts, strict=True)])
            joined[b, : len(parts)] = parts
        return joined

    n_out, cycles = [r.n_out for r in reports], [r.cycles for r in reports]
    trees = None
    if last.trees is not None:
        # [cycle, B, M] per report: rows come first here, and go back behind.
        recorded = zip(*(report.trees or () for report in reports), strict=True)
        trees = tuple(np.swapaxes(rows([np.swapaxes(part, 0, 1) for part in parts], cycles), 0, 1) for parts in recorded)
    return dataclasses.replace(
        last,
        out=rows([r.out for r in reports], n_out),
        n_out=np.sum(n_out, axis=0),
        accepted=rows([r.accepted for r in reports], cycles),
        cycles=np.sum(cycles, axis=0),
        trees=trees,
    )
