"""Products of bfloat16 matrices on a CPU that has an instruction for them (`native/bfloat.cc`): nearly twice the rate of float32.

XLA's own bfloat16 products on the CPU are slower than its float32 ones.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from eagle3_jax.native.build import BEST, BFLOAT, FIRST_TURNED, SECOND_TURNED, available, bfloat_group, has_bfloat

FEWEST = 32
"""Rows from which laying the matrix out anew, as every call does, costs little beside the product."""

NAME = "bfloat_product"
"""What a rematerialisation policy may know these products by."""


def is_native(x: jax.Array, w: jax.Array) -> bool:
    """Whether `product` is for rows x [..., I] and a weight w: both bfloat16, rows enough, one device, and custom calls that can."""
    if x.dtype != jnp.bfloat16 or w.dtype != jnp.bfloat16 or math.prod(x.shape[:-1]) < FEWEST:
        return False
    return jax.sharding.get_abstract_mesh().empty and available() and has_bfloat()


def product(x_XI: jax.Array, w: jax.Array, result: Any = None, *, turned: bool = False) -> jax.Array:
    """bfloat16 x [X, I] times w [I, O], summed in float32: [X, O] in `result` (bfloat16 or float32), or bfloat16. turned: w is [O, I]."""
    return checkpoint_name(_product(jnp.dtype(result or jnp.bfloat16), turned, x_XI, w), NAME)


def gradients(x_XI: jax.Array, w_IO: jax.Array, g_XO: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Those of x and w, bfloat16, where g is that of their `product`."""
    return _backward(None, False, (x_XI, w_IO), g_XO)


def best(x_XI: jax.Array, w: jax.Array, *, turned: bool = False) -> jax.Array:
    """int32 [X]: the argmax of each row of bfloat16 x [X, I] times w [I, O] in float32, ties to the lowest; no product is kept. Rows of
    NaN give some id. turned: w is [O, I]. For programs of the CPU alone."""
    outputs, group = w.shape[0 if turned else 1], bfloat_group()
    shapes = [jax.ShapeDtypeStruct((-(-outputs // group), x_XI.shape[0]), dtype) for dtype in (jnp.float32, jnp.int32)]
    call = jax.ffi.ffi_call(BFLOAT + BEST + (SECOND_TURNED if turned else ""), shapes, vmap_method="sequential")
    peaks, ids = call(x_XI, w)
    return jnp.take_along_axis(ids, jnp.argmax(peaks, axis=0)[None], axis=0)[0]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(result: Any, turned: bool, x: jax.Array, w: jax.Array) -> jax.Array:
    return _call(SECOND_TURNED if turned else "", result, x, w)


def _forward(result: Any, turned: bool, x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(result, turned, x, w), (x, w)


def _backward(result: Any, turned: bool, saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    del result
    x, w = saved
    g = g.astype(jnp.bfloat16)  # as XLA's own products of this type have it
    of_w = _call(FIRST_TURNED, w.dtype, g, x) if turned else _call(FIRST_TURNED, w.dtype, x, g)
    return _call("" if turned else SECOND_TURNED, x.dtype, g, w), of_w


_product.defvjp(_forward, _backward)

_AXES = {"": (1, 0), FIRST_TURNED: (0, 0), SECOND_TURNED: (1, 1)}
"""The axis that is summed over, in each operand."""


def _call(kind: str, result: Any, a: jax.Array, b: jax.Array) -> jax.Array:
    first, second = _AXES[kind]
    shape = jax.ShapeDtypeStruct((a.shape[1 - first], b.shape[1 - second]), result)
    native = jax.ffi.ffi_call(BFLOAT + kind, shape, vmap_method="sequential")
    plain = partial(jax.lax.dot_general, dimension_numbers=(((first,), (second,)), ((), ())), preferred_element_type=result)
    return jax.lax.platform_dependent(a, b, cpu=native, default=plain)
