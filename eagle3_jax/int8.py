"""Weights of one byte: int8 values and a float32 scale per output channel, symmetric, rounded to nearest. Activations stay as they are.

What an int8 model computes is defined by these weights, whatever pass computes it: speculative decoding with an int8 target equals
plain decoding with the same int8 target.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

BLOCK = 1 << 20
"""Bytes of floats that a CPU makes of int8 weights at a time: they stay in its cache."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8:
    """Stands for values * scale. values: int8 [I, ...O]; scale: float32, of size 1 along the input axis.

    dtype: what it stands for, the compute type. transposed: it stands for the transpose, [O, I] read as [I, O]; an embedding table
    [V, D] has its scales along V, so that it serves as a tied head too.
    """

    values: jax.Array
    scale: jax.Array
    dtype: Any = dataclasses.field(metadata={"static": True})
    transposed: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape[::-1] if self.transposed else self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def size(self) -> int:
        return self.values.size

    @property
    def sharding(self) -> Any:
        return self.values.sharding

    @property
    def T(self) -> Int8:
        """Of a matrix; no number moves."""
        return dataclasses.replace(self, transposed=not self.transposed)

    def __getitem__(self, index: Any) -> Any:
        """[...]: itself. Anything else picks along the first axis (an embedding's rows) and gives floats."""
        if index is ...:
            return self
        if self.transposed:
            raise TypeError("rows are picked from a table, not from its transpose")
        return (self.values[index].astype(jnp.float32) * self.scale[index]).astype(self.dtype)

    def product(self, x: jax.Array, precision: jax.lax.Precision, result: Any = None) -> jax.Array:
        """x [..., I] times it, [..., *O] in `result`, or x's dtype. The scale is applied to the product: no floats are kept."""
        flat_XI = x.reshape(-1, x.shape[-1])
        matrix = self.values if self.transposed else self.values.reshape(self.values.shape[0], -1)
        multiply = partial(_by_rows if self.transposed else _by_inputs, precision=precision)
        # XLA on the CPU multiplies floats fast, and a product fused with its conversion slowly: it gets blocks of floats. Elsewhere the
        # conversion belongs inside the product. On a mesh blocks would be gathered.
        whole = partial(_whole, precision=precision, transposed=self.transposed)
        if jax.sharding.get_abstract_mesh().empty:
            y = jax.lax.platform_dependent(flat_XI, matrix, cpu=multiply, default=whole)
        else:
            y = whole(flat_XI, matrix)
        outputs = self.shape[1:]
        return (y * self.scale.reshape(1, -1)).astype(result or x.dtype).reshape(*x.shape[:-1], *outputs)


def _whole(x_XI: jax.Array, matrix: jax.Array, precision: jax.lax.Precision, transposed: bool) -> jax.Array:
    """float32 [X, O] from [I, O], or from [O, I] when transposed."""
    axes = ((1,), (1 if transposed else 0,))
    return jax.lax.dot_general(x_XI, matrix.astype(x_XI.dtype), (axes, ((), ())), precision=precision, preferred_element_type=jnp.float32)


def _by_inputs(x_XI: jax.Array, matrix_IO: jax.Array, precision: jax.lax.Precision) -> jax.Array:
    """As `_whole`, summed over blocks of inputs."""
    inputs, outputs = matrix_IO.shape
    block = _block(inputs, outputs)

    def part(start: Any, size: int) -> jax.Array:
        weights = jax.lax.dynamic_slice_in_dim(matrix_IO, start, size, 0)
        return _whole(jax.lax.dynamic_slice_in_dim(x_XI, start, size, 1), _floats(weights, x_XI.dtype), precision, False)

    whole_blocks = inputs // block
    total = jnp.zeros((x_XI.shape[0], outputs), jnp.float32)
    total = jax.lax.fori_loop(0, whole_blocks, lambda i, total: total + part(i * block, block), total)
    rest = inputs - whole_blocks * block
    return total + part(inputs - rest, rest) if rest else total


def _by_rows(x_XI: jax.Array, matrix_OI: jax.Array, precision: jax.lax.Precision) -> jax.Array:
    """As `_whole` of a transposed matrix, block after block of its rows: each gives some of the outputs."""
    outputs, inputs = matrix_OI.shape
    block = _block(outputs, inputs)

    def part(start: Any, size: int) -> jax.Array:
        return _whole(x_XI, _floats(jax.lax.dynamic_slice_in_dim(matrix_OI, start, size, 0), x_XI.dtype), precision, True)

    def step(i: Any, y: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(y, part(i * block, block), i * block, 1)

    whole_blocks = outputs // block
    y = jax.lax.fori_loop(0, whole_blocks, step, jnp.zeros((x_XI.shape[0], outputs), jnp.float32))
    rest = outputs - whole_blocks * block
    return jax.lax.dynamic_update_slice_in_dim(y, part(outputs - rest, rest), outputs - rest, 1) if rest else y


def _block(size: int, width: int) -> int:
    """How many of `size` rows of this width to take at a time: a divisor near the limit where there is one, for a rest costs more."""
    limit = min(size, max(1, BLOCK // (4 * width)))
    divisor = next(n for n in range(limit, 0, -1) if size % n == 0)
    return divisor if 2 * divisor >= limit else limit


def _floats(weights: jax.Array, dtype: Any) -> jax.Array:
    """A block as floats, made before the product and not inside it."""
    return jax.lax.optimization_barrier(weights.astype(dtype))


def to_int8(weight: jax.Array, input_axis: int = 0) -> Int8:
    """The nearest int8 weights: per output channel the largest magnitude becomes 127."""
    values, scale = _round(weight, input_axis)
    return Int8(values, scale, jnp.dtype(weight.dtype))


@jax.jit(static_argnames=("input_axis",))
def _round(weight: jax.Array, input_axis: int) -> tuple[jax.Array, jax.Array]:
    exact = weight.astype(jnp.float32)
    scale = jnp.max(jnp.abs(exact), axis=input_axis, keepdims=True) / 127.0
    scale = jnp.where(scale > 0, scale, 1.0)
    return jnp.round(exact / scale).astype(jnp.int8), scale
