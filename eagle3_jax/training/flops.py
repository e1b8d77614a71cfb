"""What a training step costs in floating-point operations, counted on paper, and what the machine could do.

Only products count, two operations per multiply-add; the backward pass of a trained product is two products of its size.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import jax
import jax.numpy as jnp

from eagle3_jax.config import DraftConfig, TargetConfig
from eagle3_jax.layers import linear
from eagle3_jax.training.trainer import TrainConfig


class StepFlops(NamedTuple):
    """Operations of one update, padding included."""

    target: float
    draft: float
    heads: float

    @property
    def total(self) -> float:
        return self.target + self.draft + self.heads


def step_flops(draft: DraftConfig, config: TrainConfig, target: TargetConfig | None = None) -> StepFlops:
    """The count for `config`'s static shapes. target: of an online step; None: its features are read, not computed.

    heads: the draft's and the teacher's output heads, and the target's over the full vocabulary where it runs.
    """
    rows = config.rows * config.accumulate
    T, C, J = config.row_tokens, config.row_slots, config.recipe.steps
    D, E, U = draft.hidden_size, draft.target_hidden_size, draft.draft_vocab_size
    q_width, kv_width = draft.num_heads * draft.head_dim, draft.num_kv_heads * draft.head_dim
    pairs = C * T - C * C / 2
    fuse = T * len(draft.taps) * E * D
    first = T * 2 * D * (q_width + 2 * kv_width)
    # What embeddings add to q, k and v is computed once for all steps.
    later = (J - 1) * C * D * (q_width + 2 * kv_width)
    attention = 2 * J * pairs * q_width
    rest = J * C * (q_width * D + 3 * D * draft.intermediate_size)
    # The features are given: fc has a weight gradient only.
    layer = 2 * fuse + 3 * (first + later + attention + rest)
    if config.remat:
        layer += first + later + rest
    head = C * E * U + (3 if config.recipe.train_head else 2) * J * C * D * U
    frozen = 0.0
    if target is not None:
        widths = (target.num_heads + 2 * target.num_kv_heads) * target.head_dim, target.num_heads * target.head_dim
        block = T * target.hidden_size * (sum(widths) + 3 * target.intermediate_size) + T * T * widths[1]
        frozen = target.num_layers * block
        head += C * target.hidden_size * target.vocab_size
    return StepFlops(2.0 * rows * frozen, 2.0 * rows * layer, 2.0 * rows * head)


PEAKS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 1153e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
}
"""Dense bfloat16 operations per second of one device (half a TPU7x chip), by the start of its kind's name, as its maker states them."""


def peak_flops(compute: str, devices: int | None = None) -> float:
    """Operations per second of `devices` devices (None: all): the maker's figure; where it is not listed, a product timed here."""
    count = jax.device_count() if devices is None else devices
    kind = jax.devices()[0].device_kind
    stated = [PEAKS[name] for name in sorted(PEAKS, key=len, reverse=True) if kind.startswith(name)]
    return count * stated[0] if stated else measured_peak(compute)


def measured_peak(compute: str, size: int = 1024, tries: int = 3) -> float:
    """Operations per second of the fastest of `tries` square products in type `compute`."""
    a = jnp.ones((size, size), compute)
    product = jax.jit(linear)
    product(a, a).block_until_ready()
    seconds = []
    for _ in range(tries):
        begun = time.perf_counter()
        product(a, a).block_until_ready()
        seconds.append(time.perf_counter() - begun)
    return 2 * size**3 / min(seconds)
