"""Where a training run's arrays lie on a mesh: state and optimizer with their parameters, batches by rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eagle3_jax.config import DraftConfig
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.sharding import LOGICAL, module_specs, named_specs, partition, place, put, row_shards
from eagle3_jax.training.trainer import Fixed, TrainState
from eagle3_jax.training.ttt import Batch, Frozen


def state_specs(state: TrainState, config: DraftConfig, mesh: Any) -> TrainState:
    """A PartitionSpec for every array of a training state: what belongs to a parameter lies where the parameter lies."""
    return named_specs(state, module_specs(Eagle3Draft(config), mesh))


def fixed_specs(fixed: Fixed, config: DraftConfig, mesh: Any) -> tuple[Frozen, dict[str, PartitionSpec]]:
    """Specs of the target's tables and of the draft's untrained variables."""
    tables = Frozen(
        partition(mesh, fixed.frozen.embed.shape, ("vocab", "embed")),  # pyright: ignore[reportArgumentType]
        partition(mesh, fixed.frozen.teacher_head.shape, ("embed", "draft_vocab")),  # pyright: ignore[reportArgumentType]
    )
    return tables, named_specs(fixed.variables, module_specs(Eagle3Draft(config), mesh))


def on_mesh(tree: Any, specs: Any, mesh: Mesh) -> Any:
    """Concrete arrays on the mesh; abstract ones with their placement."""

    def one(leaf: Any, spec: PartitionSpec) -> Any:
        sharding = NamedSharding(mesh, spec)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return put(leaf, sharding)

    return jax.tree.map(one, tree, specs)


def place_state(state: TrainState, config: DraftConfig, mesh: Mesh | None) -> TrainState:
    """The state on the mesh; `mesh` None: as it is."""
    return state if mesh is None else on_mesh(state, state_specs(state, config, mesh), mesh)


def place_fixed(fixed: Fixed, config: DraftConfig, mesh: Mesh | None) -> Fixed:
    """Tables, untrained variables and the target on the mesh; `mesh` None: as they are."""
    if mesh is None:
        return fixed
    tables, variables = fixed_specs(fixed, config, mesh)
    frozen, target = on_mesh(fixed.frozen, tables, mesh), None
    if fixed.target is not None:
        target = place(fixed.target, mesh)
        # One table, not two.
        frozen = Frozen(target.embed[...], frozen.teacher_head)
    return Fixed(frozen, on_mesh(fixed.variables, variables, mesh), target)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of every array of a global batch [parts, B, ...]: micro-batches one after the other, rows over the devices."""
    return NamedSharding(mesh, PartitionSpec(None, LOGICAL["rows"]))


def check_rows(rows: int, mesh: Mesh | None) -> None:
    """Raises ValueError unless the rows of a micro-batch can be dealt out evenly."""
    if rows % row_shards(mesh):
        assert mesh is not None
        data, fsdp = mesh.shape["data"], mesh.shape["fsdp"]
        raise ValueError(f"{rows} rows per micro-batch cannot be split over data {data} x fsdp {fsdp}: take a multiple of {data * fsdp}")


def own_rows(rows: int, mesh: Mesh | None) -> list[int] | None:
    """The rows of a micro-batch that this process's devices hold, ascending; None: all of them."""
    if mesh is None or jax.process_count() == 1:
        return None
    held: set[int] = set()
    sharding = NamedSharding(mesh, PartitionSpec(LOGICAL["rows"]))
    for index in sharding.addressable_devices_indices_map((rows,)).values():
        assert index is not None
        held.update(range(*index[0].indices(rows)))
    return sorted(held)


def place_batch(own: Batch, rows: int, mesh: Mesh | None) -> Batch:
    """The global batch [parts, rows, ...] of which `own` [parts, own rows, ...] are the rows of `own_rows`, read by this process."""
    if mesh is None:
        return own
    sharding = batch_sharding(mesh)
    held = own_rows(rows, mesh)
    if held is None:
        return jax.tree.map(lambda x: put(x, sharding), own)
    at = {row: i for i, row in enumerate(held)}

    def one(local: np.ndarray) -> jax.Array:
        def part(index: Any) -> np.ndarray:
            wanted = range(*index[1].indices(rows))
            return local[:, at[wanted[0]] : at[wanted[-1]] + 1]

        return jax.make_array_from_callback((local.shape[0], rows, *local.shape[2:]), sharding, part)

    return jax.tree.map(one, own)


def place_rows(batches: Iterator[Batch], mesh: Mesh | None) -> Iterator[Batch]:
    """Batches without the axis of micro-batches, the same on every process, on the mesh."""
    if mesh is None:
        yield from batches
        return
    sharding = NamedSharding(mesh, PartitionSpec(LOGICAL["rows"]))
    for batch in batches:
        yield jax.tree.map(lambda x: put(x, sharding), batch)


def whole(tree: Any) -> Any:
    """numpy arrays of a pytree whose arrays may lie on devices of several processes; every process must call it."""
    from jax.experimental import multihost_utils

    def one(x: jax.Array) -> np.ndarray:
        if x.is_fully_addressable or x.is_fully_replicated:
            return np.asarray(x)
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))

    return jax.tree.map(one, tree)
