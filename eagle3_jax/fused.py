"""Products with what stands beside them in a layer: a norm or a gate before, a residual after.

From native panels each is one custom call: by themselves these small operations cost a pass of few tokens microseconds each, hundreds
of times. Any other weight, or type, is multiplied as if they stood apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from eagle3_jax.layers import linear, rms_norm, swiglu
from eagle3_jax.panels import is_native, native_product


def norm_linear(x: jax.Array, norm: jax.Array, eps: float, w: Any, bias: jax.Array | None = None) -> jax.Array:
    """`linear` of `rms_norm(x, norm, eps)`."""
    return _norm_linear(w, x, bias, norm, eps)


def gated_linear(gate_up: jax.Array, w: Any, bias: jax.Array | None = None, *, add: jax.Array) -> jax.Array:
    """add + `linear` of `swiglu` of the two parts of gate_up [..., 2, I]."""
    return _gated_linear(w, gate_up, bias, add)


def linear_onto(add: jax.Array, x: jax.Array, w: Any, bias: jax.Array | None = None) -> jax.Array:
    """add + `linear(x, w, bias)`."""
    return _linear_onto(w, x, bias, add)


def _fused(call: Callable[..., jax.Array]) -> Callable[[Callable[..., jax.Array]], Callable[..., jax.Array]]:
    """Replaces a function of (w, x, bias, ...) by `call`, where that can take them; its derivative remains that of the function."""

    def of(apart: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        at_once = jax.custom_jvp(call)
        at_once.defjvp(lambda primals, tangents: jax.jvp(apart, primals, tangents))

        def either(w: Any, x: jax.Array, *others: Any) -> jax.Array:
            if is_native(w) and x.dtype == jnp.float32:
                return jax.lax.platform_dependent(w, x, *others, cpu=at_once, default=apart)
            return apart(w, x, *others)

        return either

    return of


def _rows(x: jax.Array, axes: int = 1) -> jax.Array:
    return x.reshape(-1, *x.shape[-axes:])


@_fused(lambda w, x, bias, norm, eps: native_product(w, _rows(x), bias, norm=(norm, eps)).reshape(*x.shape[:-1], *w.outputs))
def _norm_linear(w: Any, x: jax.Array, bias: jax.Array | None, norm: jax.Array, eps: float) -> jax.Array:
    return linear(rms_norm(x, norm, eps), w, bias)


@_fused(lambda w, x, bias, add: native_product(w, _rows(x, 2), bias, gated=True, add=add).reshape(add.shape))
def _gated_linear(w: Any, gate_up: jax.Array, bias: jax.Array | None, add: jax.Array) -> jax.Array:
    return add + linear(swiglu(gate_up[..., 0, :], gate_up[..., 1, :]), w, bias)


@_fused(lambda w, x, bias, add: native_product(w, _rows(x), bias, add=add).reshape(add.shape))
def _linear_onto(w: Any, x: jax.Array, bias: jax.Array | None, add: jax.Array) -> jax.Array:
    return add + linear(x, w, bias)
