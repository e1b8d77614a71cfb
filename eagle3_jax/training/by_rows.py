"""A loss and its gradient on a mesh, each device on its own rows: parameters gathered once, gradients summed once.

Left to XLA's partitioner, a loop over chunks of a row would gather the output head and sum its gradient in every round. Here the axes
that split the rows are handled by hand (`shard_map`), and the tensor axis is left to the partitioner.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from eagle3_jax.sharding import LOGICAL

ROWS = LOGICAL["rows"]

Loss = Callable[[dict[str, jax.Array], Any, Any], tuple[jax.Array, Any]]
"""(parameters in the compute type, what is read and never changed, rows) -> (a sum over the rows, further sums over them)."""


class Dealt(NamedTuple):
    """A loss's arguments but the parameters: specs of these by name; `fixed` with its specs; `rows`, arrays with rows in front."""

    specs: dict[str, PartitionSpec]
    fixed: Any
    fixed_specs: Any
    rows: Any


def sum_by_rows(loss: Loss, params: dict[str, jax.Array], dealt: Dealt, dtype: str) -> tuple[jax.Array, Any]:
    """What `loss` gives over all rows, in a program on a mesh."""

    def body(params: dict[str, jax.Array], fixed: Any, rows: Any) -> tuple[jax.Array, Any]:
        return jax.lax.psum(loss(_gather_all(params, dealt.specs, dtype), _gather_fixed(fixed, dealt.fixed_specs), rows), ROWS)

    return _manual(body, params, dealt, (PartitionSpec(), PartitionSpec()))


def gradient_by_rows(loss: Loss, params: dict[str, jax.Array], dealt: Dealt, dtype: str) -> tuple[jax.Array, Any, dict[str, jax.Array]]:
    """As `sum_by_rows`, and the gradient of the first sum, float32, placed as the parameters are."""

    def body(params: dict[str, jax.Array], fixed: Any, rows: Any) -> tuple[jax.Array, Any, dict[str, jax.Array]]:
        known = _gather_fixed(fixed, dealt.fixed_specs)
        own = jax.value_and_grad(lambda params: loss(_gather_all(params, dealt.specs, dtype), known, rows), has_aux=True)
        (total, sums), grads = own(params)
        return *jax.lax.psum((total, sums), ROWS), grads

    placed = {name: _by_hand(dealt.specs[name]) for name in params}
    return _manual(body, params, dealt, (PartitionSpec(), PartitionSpec(), placed))


def _manual(body: Any, params: dict[str, jax.Array], dealt: Dealt, out: Any) -> Any:
    mesh = jax.sharding.get_abstract_mesh()
    ins = (
        {name: _by_hand(dealt.specs[name]) for name in params},
        jax.tree.map(_by_hand, dealt.fixed_specs),
        jax.tree.map(lambda _: PartitionSpec(ROWS), dealt.rows),
    )
    mapped = jax.shard_map(body, mesh=mesh, in_specs=ins, out_specs=out, axis_names=set(ROWS), check_vma=False)
    return mapped(params, dealt.fixed, dealt.rows)


def _by_hand(spec: PartitionSpec) -> PartitionSpec:
    """What of a spec is handled by hand."""
    return PartitionSpec(*("fsdp" if _split(entry) else None for entry in spec))


def _split(entry: Any) -> bool:
    return entry == "fsdp" or (isinstance(entry, tuple) and "fsdp" in entry)


def _split_axis(spec: PartitionSpec) -> int | None:
    return next((axis for axis, entry in enumerate(spec) if _split(entry)), None)


def _gather_all(params: dict[str, jax.Array], specs: dict[str, PartitionSpec], dtype: str) -> dict[str, jax.Array]:
    return {name: _gathered(value, _split_axis(specs[name]), dtype) for name, value in params.items()}


def _gather_fixed(fixed: Any, specs: Any) -> Any:
    def one(value: jax.Array, spec: PartitionSpec) -> jax.Array:
        axis = _split_axis(spec)
        return value if axis is None else jax.lax.all_gather(value, "fsdp", axis=axis, tiled=True)

    return jax.tree.map(one, fixed, specs)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered(value: jax.Array, axis: int | None, dtype: str) -> jax.Array:
    """The whole parameter in the compute type. What crosses the devices is the compute type on the way out, float32 on the way back."""
    value = value.astype(dtype)
    return value if axis is None else jax.lax.all_gather(value, "fsdp", axis=axis, tiled=True)


def _gathered_forward(value: jax.Array, axis: int | None, dtype: str) -> tuple[jax.Array, None]:
    return _gathered(value, axis, dtype), None


def _gathered_backward(axis: int | None, dtype: str, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    del dtype
    grad = cotangent.astype(jnp.float32)
    if axis is None:
        return (jax.lax.psum(grad, ROWS),)
    return (jax.lax.psum(jax.lax.psum_scatter(grad, "fsdp", scatter_dimension=axis, tiled=True), "data"),)


_gathered.defvjp(_gathered_forward, _gathered_backward)
