"""Weights in the order in which a CPU reads them: panels of a few outputs each, multiplied by `native/product.cc`.

A pass of few tokens costs what its weights cost to read. XLA's own products on the CPU reach that for one row; for 2 to 16 they take
half as long again and more. From panels a product takes as long for four rows as for one, and every row has the same bits whatever
else is in the pass.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.int8 import Int8
from eagle3_jax.large_pages import Room
from eagle3_jax.native.build import PRODUCT, available, panel_width


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Panels:
    """Stands for a float32 weight [I, ...O]. values: float32 or int8 [P, I, W], panel p holding outputs p W .. p W + W - 1, the last one
    filled up with zeros; scale: float32 [O] beside int8 values, which it multiplies, else None.

    outputs: ...O. transposed: it stands for the transpose [O, I], an embedding table that serves as a tied head too.
    """

    values: jax.Array
    scale: jax.Array | None
    outputs: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    transposed: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def dtype(self) -> Any:
        """The compute type."""
        return jnp.dtype(jnp.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        inputs = self.values.shape[1]
        return (*self.outputs, inputs) if self.transposed else (inputs, *self.outputs)

    @property
    def ndim(self) -> int:
        return 1 + len(self.outputs)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def sharding(self) -> Any:
        return self.values.sharding

    @property
    def T(self) -> Panels:
        """Of a matrix; no number moves."""
        return dataclasses.replace(self, transposed=not self.transposed)

    def __getitem__(self, index: Any) -> Any:
        """[...]: itself. Ids of a table (an embedding's), an int32 array: its rows, floats [..., I]. Anything else: of the plain weight."""
        if index is ...:
            return self
        if not self.transposed or not isinstance(index, jax.Array | np.ndarray) or not jnp.issubdtype(index.dtype, jnp.integer):
            return in_plain(self)[index]
        width = self.values.shape[2]
        rows = self.values[index // width, :, index % width].astype(jnp.float32)
        return rows if self.scale is None else rows * self.scale[index][..., None]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The floats that it stands for, a copy."""
        plain = in_plain(self)
        floats = plain if self.scale is None else plain.values.astype(jnp.float32) * plain.scale
        return np.array(floats, dtype)

    def product(self, x: jax.Array, result: Any = None) -> jax.Array:
        """x [..., I] times it, [..., *O] in `result`, or x's dtype; computed in float32."""
        flat_XI = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
        if is_native(self):
            y = jax.lax.platform_dependent(self, flat_XI, cpu=_read_once, default=Panels._as_matrix)
        else:
            y = self._as_matrix(flat_XI)
        return y.astype(result or x.dtype).reshape(*x.shape[:-1], *self.outputs)

    def _as_matrix(self, x_XI: jax.Array) -> jax.Array:
        y = jnp.dot(x_XI, _matrix(self).astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
        return y if self.scale is None else y * self.scale[None]


@jax.custom_jvp
def _read_once(panels: Panels, x_XI: jax.Array) -> jax.Array:
    return native_product(panels, x_XI)


@_read_once.defjvp
def _derivative(primals: tuple[Panels, jax.Array], tangents: tuple[Panels, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return jax.jvp(Panels._as_matrix, primals, tangents)


def native_product(
    panels: Panels,
    x: jax.Array,
    bias: jax.Array | None = None,
    *,
    gated: bool = False,
    norm: tuple[jax.Array, Any] | None = None,
    add: jax.Array | None = None,
) -> jax.Array:
    """The custom call: float32 x [X, I] times panels that are native, + bias [...O] + add [X, O]; [X, O].

    gated: of silu(gate) * up of x [X, 2, I]. norm: of the rms norm of x with this weight [I] and epsilon.
    """
    rows, inputs = x.shape[0], x.shape[-1]
    weight, eps = (None, None) if norm is None else (norm[0], jnp.reshape(norm[1], 1))
    floats = [jnp.zeros(0) if a is None else a.astype(jnp.float32) for a in (panels.scale, bias, weight, eps, add)]
    made = (rows, inputs) if gated or norm is not None else (0,)
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((rows, math.prod(panels.outputs)), made)]
    return jax.ffi.ffi_call(PRODUCT, results, vmap_method="sequential")(x, panels.values, *floats)[0]


def is_native(weight: Any) -> bool:
    """Whether it is panels that this process has the custom calls for. Those of another machine, or cast to another type, are a matrix
    like any other."""
    if not isinstance(weight, Panels) or weight.values.dtype not in (jnp.float32, jnp.int8):
        return False
    return available() and weight.values.shape[2] == panel_width()


def _matrix(panels: Panels) -> jax.Array:
    """[I, O], without the scale."""
    inputs_first = panels.values.transpose(1, 0, 2)
    return inputs_first.reshape(len(inputs_first), -1)[:, : math.prod(panels.outputs)]


def in_panels(weight: jax.Array | Int8, width: int, table: bool = False, room: Room | None = None) -> Panels:
    """A float32 weight [I, ...O] in panels of `width` outputs; an `Int8` keeps its bytes and scales. table: it is [O, I].

    room: where their memory comes from, shared by a model's matrices; None: memory of their own.
    """
    given = weight.values if isinstance(weight, Int8) else weight
    values, outputs = _cut(given, width, table, room or Room()), tuple(given.shape[:1] if table else given.shape[1:])
    return Panels(values, weight.scale.reshape(-1) if isinstance(weight, Int8) else None, outputs, table)


def in_plain(weight: Any) -> Any:
    """The array, or `Int8`, that panels were made of, to the bit; anything else as it is."""
    if not isinstance(weight, Panels):
        return weight
    plain = _matrix(weight).T if weight.transposed else _matrix(weight).reshape(weight.shape)
    if weight.scale is None:
        return plain
    scale = weight.scale[:, None] if weight.transposed else weight.scale.reshape(1, *weight.outputs)
    return Int8(plain, scale, weight.dtype)


def _cut(given: Any, width: int, table: bool, room: Room) -> jax.Array:
    """[P, I, W] from [I, ...O], or from [O, I]. On the host: XLA's transposition on the CPU is slower than numpy's copy."""
    array = np.asarray(given)
    matrix_OI = array if table else array.reshape(array.shape[0], -1).T
    outputs, inputs = matrix_OI.shape
    panels = -(-outputs // width)
    values = room.empty((panels, inputs, width), array.dtype)
    for p in range(panels):
        part = matrix_OI[p * width : (p + 1) * width]
        values[p, :, : len(part)] = part.T
        values[p, :, len(part) :] = 0
    return jax.device_put(values, may_alias=True)  # nobody else writes to it
