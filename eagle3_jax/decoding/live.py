"""An answer as it comes: whole characters only, the terminal left clean whatever happens, and the figures afterwards."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from eagle3_jax.compile_clock import CompileClock
from eagle3_jax.decoding.generate import Output
from eagle3_jax.decoding.stream import Stream
from eagle3_jax.terminal import duration
from eagle3_jax.tree_names import tree_name

BROKEN = "�"
"""What a decoder writes in place of bytes that are no character, or not one yet."""


class TextPieces:
    """The text of tokens that come piece by piece. A character whose bytes are spread over tokens waits for the last of them.

    decode: ids to text; the pieces together are the text of all ids. Only the last few tokens are decoded at a time.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode = decode
        self._ids: list[int] = []
        self._context = self._said = 0  # ids[_context:_said] have been put out, and stand before the next ones when those are decoded

    def push(self, ids: Sequence[int]) -> str:
        """What may be shown now; empty when no character is complete."""
        self._ids += ids
        new = self._new()
        if not new or new.endswith(BROKEN):
            return ""
        self._context, self._said = self._said, len(self._ids)
        return new

    def finish(self) -> str:
        """The rest, broken characters included."""
        rest = self._new()
        self._context = self._said = len(self._ids)
        return rest

    def _new(self) -> str:
        before = self._decode(self._ids[self._context : self._said])
        return self._decode(self._ids[self._context :])[len(before) :]


@dataclasses.dataclass(frozen=True)
class Shown:
    """A stream that has been shown. first, seconds: to the first token and in all, without the time spent `compiling`.

    interrupted: by Ctrl-C; then `output` holds what had come.
    """

    output: Output
    mode: str
    first: float
    seconds: float
    compiling: float
    interrupted: bool

    def figures(self) -> str:
        """One line about it."""
        tokens, rest = len(self.output.tokens[0]), self.seconds - self.first
        rate = f", then {(tokens - 1) / rest:.1f} tokens/s" if tokens > 1 and rest > 0 else ""
        tau = "" if self.mode == "plain" else f", acceptance length {self.output.tau:.2f}"
        ends = {"stop": "a stop token", "length": "the limit", "unfinished": "your wish"}
        compiling = f"; compiling took {duration(self.compiling)} more" if self.compiling > 0.05 else ""
        return (
            f"{self.mode}: first token after {duration(self.first)}, {tokens} tokens{rate}{tau}; "
            f"ended at {ends[self.output.finish_reasons[0]]}{compiling}"
        )


def show(stream: Stream, decode: Callable[[Sequence[int]], str], clock: CompileClock, out: TextIO | None = None) -> Shown:
    """Writes a stream of one row as it comes, and a line's end after it, also when Ctrl-C or an error ends it."""
    to: TextIO = sys.stdout if out is None else out
    pieces, interrupted = TextPieces(decode), False
    start, compiled = time.perf_counter(), clock.seconds
    first = None

    def elapsed() -> float:
        return time.perf_counter() - start - (clock.seconds - compiled)

    try:
        with stream:
            for event in stream:
                first = first if first is not None else elapsed()
                to.write(pieces.push(event.tokens))
                to.flush()
    except KeyboardInterrupt:
        interrupted = True
    finally:
        to.write(pieces.finish() + "\n")
        to.flush()
    seconds = elapsed()
    return Shown(stream.output, tree_name(stream.tree), seconds if first is None else first, seconds, clock.seconds - compiled, interrupted)
