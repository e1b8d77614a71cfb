"""A conversation whose caches outlive a request: each turn runs only the tokens that are new."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from eagle3_jax.cache import Cache
from eagle3_jax.decoding import auto
from eagle3_jax.decoding.decode import Fed
from eagle3_jax.decoding.generate import Output, prepare
from eagle3_jax.decoding.segments import CYCLES, Segments, check_cycles, empty, shortened
from eagle3_jax.decoding.stream import Stream
from eagle3_jax.drafting import Draft
from eagle3_jax.target import Target


class Session:
    """Caches of target and draft for one row of text.

    Every request gives the whole text so far, as it would to `generate`, and gets the same tokens. Of the text that the caches hold
    already, the longest common prefix is not run again; where the texts part, the caches are cut. So the caller need not say
    what changed: a further turn, an edited one, another conversation. A target whose rotary embedding is "dynamic" keeps nothing of
    texts longer than its original context: their tokens are rotated for the length of the prompt.

    reused: tokens of the latest request that were not run again.
    """

    def __init__(self, target: Target, draft: Draft | None):
        self.target, self.draft = target, draft
        self.reused = 0
        self._tokens: list[int] = []
        self._kept: Fed | None = None
        self._stream: Stream | None = None
        self._heard = 0  # entries of a draft's cache before its first pair

    def stream(self, prompt: Sequence[int], *, cycles: int = CYCLES, **options: Any) -> Stream:
        """As `eagle3_jax.stream` with this one prompt; options are its. A stream of this session that is still open is closed first."""
        self.close()
        check_cycles(cycles)
        request, config = prepare(self.target, self.draft, [prompt], **options)
        text = [int(token) for token in prompt]
        fed = self._cut(text)
        if fed is None:
            fed = empty(self.target, self.draft, request, config)
            self._heard = 0 if fed.draft_cache is None else int(np.asarray(fed.draft_cache.lengths)[0])
        segments = Segments(self.target, self.draft, request, config, cycles, fed, self.reused)

        def release(segments: Segments, output: Output) -> None:
            self._kept, self._stream = segments.kept, None
            if self.draft is not None and options.get("tree") == "auto":
                auto.observe(self.target, self.draft, config.tree, output.accept_lengths)
            # The last token that came out is pending: known, but in no cache yet.
            self._tokens = text + output.tokens[0] if output.tokens[0] else text[: segments.start]

        self._stream = Stream(segments, release)
        return self._stream

    def generate(self, prompt: Sequence[int], **options: Any) -> Output:
        """As `eagle3_jax.generate` with this one prompt."""
        return self.stream(prompt, **options).finish()

    def close(self) -> None:
        """Ends the open stream, if any. The caches stay."""
        if self._stream is not None:
            self._stream.close()

    def forget(self) -> None:
        """Frees the caches."""
        self.close()
        self._tokens, self._kept, self.reused = [], None, 0

    def _cut(self, text: list[int]) -> Fed | None:
        """Caches that hold the first `reused` tokens of `text` and as many pairs, given away; None when there is nothing to keep."""
        kept, self._kept, self.reused = self._kept, None, 0
        rope = self.target.config.rope
        if rope.kind == "dynamic" and max(len(text), len(self._tokens)) > rope.original_max_position:
            return None
        # An interrupted dispatch can leave caches that were given to the device and never came back.
        if kept is None or any(x.is_deleted() for x in jax.tree.leaves((kept.cache, kept.draft_cache))):
            return None
        same = next((i for i, (a, b) in enumerate(zip(self._tokens, text, strict=False)) if a != b), min(len(self._tokens), len(text)))
        # The last common token runs again: its hidden state is asked for, and so is its feature, for the pair with a token that may be new.
        keep = same - 1
        if kept.draft_cache is not None:
            keep = min(keep, int(np.asarray(kept.draft_cache.lengths)[0]) - self._heard)
        if keep < 1:
            return None
        self.reused = keep
        draft_cache = None if kept.draft_cache is None else _first(kept.draft_cache, keep + self._heard)
        return dataclasses.replace(kept, cache=_first(kept.cache, keep), draft_cache=draft_cache)


def _first(cache: Cache, count: int) -> Cache:
    """The cache with its first `count` entries alone."""
    return dataclasses.replace(cache, lengths=shortened(cache.lengths, np.int32(int(np.asarray(cache.lengths)[0]) - count)))
