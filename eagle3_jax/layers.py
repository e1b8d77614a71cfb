"""The small pure functions every layer is made of: linear, rms_norm, rotary, swiglu."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax import bfloat
from eagle3_jax.config import RopeConfig
from eagle3_jax.int8 import Int8
from eagle3_jax.panels import Panels


def linear(x: jax.Array, w: jax.Array | Int8 | Panels, bias: jax.Array | None = None, result: Any = None) -> jax.Array:
    """x [..., I] times w [I, ...O] (+ bias [...O]) in x's dtype. float32 means float32: accelerators must not round it to TF32.

    result: type of the product where it is not x's; it is then not rounded in between.
    """
    exact = precision(x.dtype)
    if isinstance(w, Panels):
        y = w.product(x, result)
    elif isinstance(w, Int8):
        y = w.product(x, exact, result)
    elif bfloat.is_native(x, w):
        y = bfloat.product(x.reshape(-1, x.shape[-1]), w.reshape(w.shape[0], -1), result).reshape(*x.shape[:-1], *w.shape[1:])
    elif x.ndim > 2 and w.ndim == 2:
        # As one matrix: XLA's CPU backend writes out a transposed copy for the weight's gradient of a product with more axes.
        flat = jnp.dot(x.reshape(-1, x.shape[-1]), w, precision=exact, preferred_element_type=result)
        y = flat.reshape(*x.shape[:-1], w.shape[1])
    else:
        y = jnp.tensordot(x, w, axes=1, precision=exact, preferred_element_type=result)
    return y if bias is None else y + bias.reshape((1,) * (y.ndim - bias.ndim) + bias.shape)


def precision(dtype: jnp.dtype) -> jax.lax.Precision:
    """The precision of a product in `dtype`."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, computed in float32 whatever x's dtype; result in x's dtype."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * _align(weight.astype(jnp.float32), x32.ndim)).astype(x.dtype)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """float32 [H/2] inverse wavelengths (radians per position), scaled as Hugging Face's `ROPE_INIT_FUNCTIONS` do.

    For "dynamic" those of contexts no longer than the original one.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inv = (1.0 / np.power(np.float32(rope.theta), exponent)).astype(np.float32)
    if rope.kind in ("default", "dynamic"):
        return inv
    if rope.kind == "linear":
        return (inv / np.float32(rope.factor)).astype(np.float32)
    wavelength = 2 * math.pi / inv
    low = rope.original_max_position / rope.low_freq_factor
    high = rope.original_max_position / rope.high_freq_factor
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * inv / rope.factor + smooth * inv
    scaled = np.where(wavelength > low, inv / rope.factor, np.where(wavelength < high, inv, blended))
    return scaled.astype(np.float32)


def rotary(positions_BT: jax.Array, rope: RopeConfig, head_dim: int, context_BT: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """(cos, sin), each float32 [B, T, 1, H/2], from integer positions: computed, never read from a table that can be outrun.

    context_BT: the length of the context that each token is rotated for, which only "dynamic" asks for; None: the one it ends.
    """
    inv = jnp.asarray(inverse_frequencies(rope, head_dim))[None, None, None, :]
    if rope.kind == "dynamic":
        length = positions_BT + 1 if context_BT is None else context_BT
        inv = inv * _dynamic_stretch(rope, head_dim, length)
    angles = positions_BT.astype(jnp.float32)[..., None, None] * inv
    return jnp.cos(angles), jnp.sin(angles)


def _dynamic_stretch(rope: RopeConfig, head_dim: int, length_BT: jax.Array) -> jax.Array:
    """float32 [B, T, 1, H/2]: what a context of this length does to each frequency; exactly 1 up to the original context.

    The base grows by r^(H / (H - 2)), r = factor * length / original - (factor - 1), hence frequency i shrinks by r^(2i / (H - 2)).
    """
    if head_dim == 2:
        return jnp.ones((*length_BT.shape, 1, 1), jnp.float32)
    # From the excess over the original length, so that r is 1 there without rounding.
    excess = jnp.maximum(length_BT - rope.original_max_position, 0).astype(jnp.float32)
    log_r = jnp.log1p(excess * np.float32(rope.factor / rope.original_max_position))
    share = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim - 2)
    return jnp.exp(-log_r[..., None, None] * jnp.asarray(share)[None, None, None, :])


def rotate(x_BTNH: jax.Array, cos_sin: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Half-split rotation (Hugging Face's `rotate_half`) in float32, result in x's dtype. No gradient reaches cos and sin."""
    return _rotate(x_BTNH.astype(jnp.float32), *cos_sin).astype(x_BTNH.dtype)


@jax.custom_vjp
def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    return jax.lax.platform_dependent(x, cos, sin, cpu=_rotate_by_index, default=_rotate_halves)


def _rotate_halves(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _rotate_by_index(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """The same for XLA's CPU backend, five times as fast: its concatenations inside a fusion run one number at a time, and every head of
    every layer would compute its sines again."""
    half = x.shape[-1] // 2
    other = np.roll(np.arange(2 * half), half)
    return x * jnp.concatenate([cos, cos], axis=-1) + x[..., other] * jnp.concatenate([-sin, sin], axis=-1)


def _rotate_forward(x: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _rotate(x, cos, sin), (cos, sin)


def _rotate_backward(saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, None, None]:
    cos, sin = saved
    return _rotate(g, cos, -sin), None, None  # the way back is the turn the other way


_rotate.defvjp(_rotate_forward, _rotate_backward)


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up, computed in float32; result in gate's dtype."""
    return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)


def _align(weight: jax.Array, ndim: int) -> jax.Array:
    return weight.reshape((1,) * (ndim - 1) + weight.shape)
