"""Cross-entropy and its gradient in one walk over the logits, for one CPU (`native/cross_entropy.cc`): XLA takes nine."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from eagle3_jax.native.build import CROSS_ENTROPY, available
from eagle3_jax.sharding import on_one_cpu


def is_native() -> bool:
    """Whether the program at hand is for one CPU whose custom calls are to be had."""
    return on_one_cpu() and available()


def cross_entropy(
    draft_JRU: jax.Array, teacher_RU: jax.Array, weight_JR: jax.Array, label_R: jax.Array, dtype: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(loss float32 [J, R], correct bool [J, R], gradient [J, R, U] in `dtype`, float32 or bfloat16) of float32 logits.

    The gradient is that of weight times loss. correct: the first best of a draft is the label, int32, which is none where negative.
    """
    shapes = (
        jax.ShapeDtypeStruct(weight_JR.shape, jnp.float32),
        jax.ShapeDtypeStruct(weight_JR.shape, jnp.bool_),
        jax.ShapeDtypeStruct(draft_JRU.shape, dtype),
    )
    call = jax.ffi.ffi_call(CROSS_ENTROPY, shapes, vmap_method="sequential")
    loss, correct, gradient = call(draft_JRU, teacher_RU, weight_JR, label_R)
    return loss, correct, gradient
