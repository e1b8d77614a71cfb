"""`stream`: tokens as they come, one dispatch per few cycles; the same tokens as `generate`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Generator, Iterator, Sequence

from eagle3_jax.decoding import auto
from eagle3_jax.decoding.decode import DecodeState
from eagle3_jax.decoding.generate import Output, collect, finish_reason, judge, prepare
from eagle3_jax.decoding.segments import CYCLES, Segments, check_cycles, join
from eagle3_jax.drafting import Draft
from eagle3_jax.target import Target
from eagle3_jax.tree import TreeChoice
from eagle3_jax.verify import Rule


@dataclasses.dataclass(frozen=True)
class Event:
    """What one dispatch brought to one row.

    tokens: the new ones, in order, none when the row ended without (a limit of 0). accept_lengths: tokens kept by each cycle of the
    dispatch. finish_reason: "stop" or "length" with the row's last event, else None.
    """

    row: int
    tokens: list[int]
    accept_lengths: list[int]
    finish_reason: str | None


class Stream(Iterator[Event]):
    """Events of a request. Work begins with the first `next`, and stops when nobody asks for more: `close` (or leaving a `with` block, or
    dropping the stream) frees caches and everything else.

    tree: what is drafted per cycle; None for plain decoding. first_token_seconds: from the first `next` to every row's first token on the
    host; None before.
    """

    def __init__(self, segments: Segments, release: Callable[[Segments, Output], None] | None = None):
        """release: called once with the segments and what came out, when the stream ends in whatever way."""
        self.tree = segments.config.tree
        self.first_token_seconds: float | None = None
        self._segments: Segments | None = segments
        self._release = release
        self._batch = len(segments.lengths)
        self._reports: list[DecodeState] = []
        self._events = self._run(segments)

    @property
    def output(self) -> Output:
        """All that has come so far, as `generate` returns it; rows that have not ended are "unfinished"."""
        if not self._reports:
            return Output([[] for _ in range(self._batch)], ["unfinished"] * self._batch, [[] for _ in range(self._batch)])
        return collect(join(self._reports))

    def __next__(self) -> Event:
        try:
            return next(self._events)
        except BaseException:  # Its end, Ctrl-C, a failing device: in every case there will be no more.
            self.close()
            raise

    def finish(self) -> Output:
        """Waits for the end; everything that came, also what was looked at before."""
        for _ in self:
            pass
        return self.output

    def close(self) -> None:
        """Ends the stream; a second call does nothing."""
        self._events.close()
        segments, self._segments = self._segments, None
        if segments is not None and self._release is not None:
            self._release(segments, self.output)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, segments: Segments) -> Generator[Event, None, None]:
        start = time.perf_counter()
        ended = [False] * self._batch
        for told in segments.reports():
            if self.first_token_seconds is None:
                self.first_token_seconds = time.perf_counter() - start
            self._reports.append(told)
            for row in range(self._batch):
                tokens = told.out[row, : told.n_out[row]].tolist()
                accepted = told.accepted[row, : told.cycles[row]].tolist()
                reason = finish_reason(told, row) if told.done[row] and not ended[row] else None
                ended[row] = bool(told.done[row])
                if tokens or reason is not None:
                    yield Event(row, tokens, accepted, reason)
        judge(self._reports[-1], self.output)


def stream(
    target: Target,
    draft: Draft | None,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int] = 256,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    seed: int | Sequence[int] = 0,
    tree: TreeChoice = None,
    eos_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
    *,
    cycles: int = CYCLES,
    rule: Rule = "coupled",
    coupled_draft: bool = True,
    record_trees: bool = False,
) -> Stream:
    """As `generate`, but an iterator of events: every row's first token as soon as the prompt has been run, then one dispatch per `cycles`
    cycles. Fewer cycles come sooner, more cost less time between dispatches.

    Arguments are checked at once, before any work, and raise as `generate`'s do; NonFiniteLogitsError comes after the last event.
    """
    check_cycles(cycles)
    request, config = prepare(
        target, draft, prompts, max_new_tokens, temperature, top_k, top_p, seed, tree, eos_token_ids, rule, coupled_draft, record_trees
    )

    def observe(segments: Segments, output: Output) -> None:
        if draft is not None and tree == "auto":
            auto.observe(target, draft, config.tree, output.accept_lengths)

    return Stream(Segments(target, draft, request, config, cycles), observe)
