"""Compiles beforehand what requests will need, so that none of them waits for the compiler."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from eagle3_jax.decoding.buckets import ONE_DISPATCH, WIDTHS, bucket
from eagle3_jax.decoding.decode import DecodeConfig, Request
from eagle3_jax.decoding.generate import execute, prepare
from eagle3_jax.decoding.segments import CYCLES, Segments, check_cycles, shortened
from eagle3_jax.drafting import Draft
from eagle3_jax.target import Target
from eagle3_jax.tree import TreeChoice
from eagle3_jax.verify import Rule


def warmup(
    target: Target,
    draft: Draft | None,
    *,
    batch: int = 1,
    longest_prompt: int | None = None,
    max_new_tokens: int | Sequence[int] = 256,
    tree: TreeChoice = None,
    sampled: bool | None = None,
    short: bool = True,
    long: bool = True,
    cycles: int = CYCLES,
    rule: Rule = "coupled",
    coupled_draft: bool = True,
) -> int:
    """Compiles and runs once every program that requests of this kind can need; returns how many they are.

    Afterwards `generate`, `stream` and `Session` compile nothing for `batch` prompts of up to `longest_prompt` tokens (None: all that the
    context has room for) with these trees and rules.
    max_new_tokens: the values that requests will name; programs of short requests differ by its power of two.
    sampled: whether some row has a temperature; None: both kinds. short: the programs of `generate` for short requests;
    long: those of long ones, of streams with up to `cycles` cycles, and of sessions.
    Call `commands.use_compilation_cache` before, and the next process finds them on disk.
    """
    check_cycles(cycles)
    context = target.config.max_position
    longest = min(longest_prompt if longest_prompt is not None else context - 1, context - 1)
    asked = [max_new_tokens] if isinstance(max_new_tokens, int) else list(max_new_tokens)
    if batch < 1 or longest < 1 or not asked or min(asked) < 0:
        raise ValueError(f"warmup: batch {batch}, longest_prompt {longest_prompt} and max_new_tokens {max_new_tokens} must be positive")
    count, shared = 0, False
    for hot in (False, True) if sampled is None else (sampled,):
        options: dict[str, Any] = {
            "temperature": float(hot),
            "tree": tree,
            "rule": rule,
            "coupled_draft": coupled_draft,
            "eos_token_ids": [],
        }

        def request(length: int, tokens: int, options: dict[str, Any] = options) -> tuple[Request, DecodeConfig]:
            made, config = prepare(target, draft, [[0] * length] * batch, tokens, **options)
            return dataclasses.replace(made, limits=made.limits - made.limits), config

        if short:
            seen = set()
            for length in _powers(min(longest, ONE_DISPATCH[0])):
                for tokens in asked:
                    made, config = request(min(length, longest), tokens)
                    if config.max_new <= ONE_DISPATCH[1] and (length, config.max_new) not in seen:
                        seen.add((length, config.max_new))
                        jax.block_until_ready(execute(target, draft, made, config))
            count += len(seen)
        if long:
            made, config = request(1, max(asked))
            prompts, cycling = warm_segments(target, draft, made, config, cycles, min(longest + max(asked), context))
            count += cycling + (prompts if not shared else 0)
            shared = True
    return count


def warm_segments(target: Target, draft: Draft | None, request: Request, config: DecodeConfig, cycles: int, reach: int) -> tuple[int, int]:
    """Runs the programs of caches of up to `reach` tokens, decoding nothing: (those that know nothing of sampling, the others).

    request: with limits of 0. cycles: as in `Segments`, a number.
    """
    feeding, cycling = (Segments(target, draft, request, config, cycles) for _ in range(2))
    shortened(feeding.caches[0].lengths, np.int32(0))
    cycling.first()
    sizes = [size for i, size in enumerate(feeding.buckets) if i == 0 or feeding.buckets[i - 1] < reach + config.steps]
    prompts = 1 + 1 + (len(sizes) - 1)  # empty caches, cut ones, larger ones
    for size in sizes:
        feeding.reserve(size)
        cycling.reserve(size)
        for width in WIDTHS:
            if width < size:
                feeding.feed(int(feeding.lengths.max()), width)  # behind the end of every prompt: nothing counts
                prompts += 1
        jax.block_until_ready(cycling.dispatch())
    return prompts, 1 + len(sizes)


def _powers(longest: int) -> list[int]:
    """The buckets of prompts up to `longest`."""
    sizes = [bucket(1, 16)]
    while sizes[-1] < longest:
        sizes.append(2 * sizes[-1])
    return sizes
