"""The mesh, and where everything lies on it: the one place that turns logical axes into PartitionSpecs.

A mesh has three axes. `data` splits the rows of a batch; `fsdp` splits them too, and with them the parameters, which are gathered
block by block as they are used; `tensor` splits heads, feed-forward width and vocabulary, so that each device holds and computes a part.
Parameters name logical axes (`params.param`), arrays inside a program are pinned by `constrain`; both mean the same table, `LOGICAL`.

A program finds its mesh in its arguments: `on_mesh_of(target)` inside a jitted function reads it off the parameters' placement.
Without a mesh every function here does nothing, so that one program serves one device and many.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from eagle3_jax.int8 import Int8
from eagle3_jax.panels import Panels, in_plain
from eagle3_jax.params import fill, named_variables

M = TypeVar("M", bound=nnx.Module)

AXES = ("data", "fsdp", "tensor")

LOGICAL: dict[str | None, tuple[str, ...]] = {
    "rows": ("data", "fsdp"),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "draft_vocab": ("tensor",),
    "fused": (),
    "norm": (),
    None: (),
}
"""Mesh axes of each logical axis. "rows" is the batch's; the others are those of the parameters."""


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of data x fsdp x tensor devices; `devices` None: all of this run's, over all its processes.

    Raises ValueError when the product is not the number of devices.
    """
    shape = {"data": data, "fsdp": fsdp, "tensor": tensor}
    for name, size in shape.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"mesh axis {name} must be a whole number >= 1, found {size!r}")
    chosen = list(jax.devices() if devices is None else devices)
    wanted = math.prod(shape.values())
    if wanted != len(chosen):
        described = " x ".join(f"{name} {size}" for name, size in shape.items())
        raise ValueError(f"mesh {described} takes {wanted} devices, but there are {len(chosen)}; the product must be the same")
    # Devices in the order that suits the interconnect; not every kind of device tells its place, then in their own order.
    kinds = (AxisType.Auto,) * len(AXES)
    if devices is None:
        return jax.make_mesh(tuple(shape.values()), AXES, axis_types=kinds)
    return Mesh(np.array(chosen).reshape(tuple(shape.values())), AXES, axis_types=kinds)


def named_mesh(sizes: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """`make_mesh` of axes by name; an axis that is not named is 1."""
    return make_mesh(sizes.get("data", 1), sizes.get("fsdp", 1), sizes.get("tensor", 1), devices)


def parse_mesh(text: str) -> dict[str, int]:
    """The axes of `named_mesh` from "data=2,fsdp=4". Raises ValueError with what is wrong."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (piece.strip() for piece in part.partition("="))
        if name not in AXES:
            raise ValueError(f"mesh {text!r}: unknown axis {name!r} (known: {', '.join(AXES)}; for example data=2,fsdp=4)")
        if name in sizes:
            raise ValueError(f"mesh {text!r}: axis {name} is named twice")
        if not size.isdecimal() or int(size) < 1:
            raise ValueError(f"mesh {text!r}: axis {name} needs a whole number >= 1, found {size!r}")
        sizes[name] = int(size)
    return sizes


def partition(mesh: Any, shape: Sequence[int], axes: Sequence[str | None]) -> PartitionSpec:
    """The PartitionSpec of an array on `mesh` (concrete or abstract). A dimension that its mesh axes do not divide stays whole."""
    if len(shape) != len(axes):
        raise ValueError(f"shape {tuple(shape)} and axes {tuple(axes)} differ in length")
    # Inside a `shard_map` the axes handled by hand are not to be spoken of again.
    sizes = {name: size for name, size in mesh.shape.items() if name not in getattr(mesh, "manual_axes", ())}
    entries = []
    for size, axis in zip(shape, axes, strict=True):
        names = tuple(name for name in LOGICAL[axis] if sizes.get(name, 1) > 1)
        fits = names and size % math.prod(sizes[name] for name in names) == 0
        entries.append((names[0] if len(names) == 1 else names) if fits else None)
    return PartitionSpec(*entries)


def module_specs(module: nnx.Module, mesh: Any) -> dict[str, PartitionSpec]:
    """The PartitionSpec of every variable of a module, by dotted path; maps without logical axes are whole everywhere.

    Heads are split together or not at all: by whole key/value heads with their query heads.
    """
    config = getattr(module, "config", None)
    kv_heads = getattr(config, "num_kv_heads", 0)
    split_heads = kv_heads % mesh.shape["tensor"] == 0
    placed = {}
    for name, variable in named_variables(module):
        shape = variable.get_value().shape
        axes = tuple(variable.get_metadata().get("axes") or (None,) * len(shape))
        if not split_heads:
            axes = tuple(None if axis in ("heads", "kv_heads") else axis for axis in axes)
        placed[name] = partition(mesh, shape, axes)
    return placed


def named_specs(tree: Any, specs: Mapping[str, PartitionSpec]) -> Any:
    """A pytree of specs for one whose leaves sit in dictionaries by parameter name, as those of an optimizer's state do.

    A leaf of another name, or a scalar kept per parameter, is whole everywhere.
    """

    def one(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey) and key.key in specs]
        return specs[names[-1]] if names and len(specs[names[-1]]) == leaf.ndim else PartitionSpec()

    return jax.tree_util.tree_map_with_path(one, tree)


def pin(tree: Any, specs: Any) -> Any:
    """Pins the arrays of a pytree inside a program to specs of the same structure; nothing without a mesh."""
    if jax.sharding.get_abstract_mesh().empty:
        return tree
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, specs)


def place(module: M, mesh: Mesh | None) -> M:
    """The filled module with every variable on the mesh; `mesh` None: the module itself.

    Raises ValueError for anything but a mesh of our axes. Warns when the tensor axis does not divide the key/value heads: attention is
    then computed whole on every device of that axis.
    """
    check_mesh(mesh)
    if mesh is None:
        return module
    warn_whole_heads(module, mesh)
    specs = module_specs(module, mesh)
    return fill(
        module, {name: put(in_plain(variable.get_value()), NamedSharding(mesh, specs[name])) for name, variable in named_variables(module)}
    )


def check_mesh(mesh: object) -> None:
    """Raises ValueError for anything but None and a mesh of our axes."""
    if mesh is not None and (not isinstance(mesh, Mesh) or mesh.axis_names != AXES):
        raise ValueError(f"mesh: expected one with the axes {', '.join(AXES)}, made by make_mesh; found {mesh!r}")


def warn_whole_heads(module: nnx.Module, mesh: Mesh) -> None:
    """Says what a mesh costs a module whose heads it cannot split."""
    kv_heads, tensor = getattr(getattr(module, "config", None), "num_kv_heads", 0), mesh.shape["tensor"]
    if kv_heads % tensor:
        name = type(module).__name__
        warnings.warn(
            f"tensor={tensor} does not divide the {kv_heads} key/value heads of {name}: its attention is computed whole on every device",
            stacklevel=3,
        )


def abstract(module: M, mesh: Mesh, dtype: Any) -> M:
    """The module with shapes and placements in place of values, floating-point ones in `dtype`: for compiling without weights."""
    specs = module_specs(module, mesh)
    values = {}
    for name, variable in named_variables(module):
        value = variable.get_value()
        kind = dtype if jnp.issubdtype(value.dtype, np.floating) else value.dtype
        values[name] = jax.ShapeDtypeStruct(value.shape, kind, sharding=NamedSharding(mesh, specs[name]))
    return fill(module, values)


def put(value: Any, sharding: NamedSharding) -> jax.Array:
    """`value`, the same on every process, on the sharding's devices; each process copies only what its own devices hold."""
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    host = np.asarray(value)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def row_shards(mesh: Mesh | None) -> int:
    """Into how many parts the rows of a batch are split."""
    return 1 if mesh is None else math.prod(mesh.shape[name] for name in LOGICAL["rows"])


def mesh_of(*trees: Any) -> Any:
    """The abstract mesh that the arrays of these pytrees (traced, concrete or abstract) lie on; None when they lie on none."""
    for leaf in jax.tree.leaves(trees):
        # A traced array says in its type where it lies, the others in their sharding.
        sharding = jax.typeof(leaf).sharding if isinstance(leaf, Tracer) else getattr(leaf, "sharding", None)
        mesh = getattr(sharding, "mesh", None)
        if mesh is not None and not mesh.empty:
            return getattr(mesh, "abstract_mesh", mesh)
    return None


@contextlib.contextmanager
def on_mesh_of(*trees: Any) -> Iterator[None]:
    """Inside, `constrain` and `local` refer to the mesh of these pytrees, if they lie on one."""
    mesh = mesh_of(*trees)
    with contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh):
        yield


def platform() -> str:
    """The platform that the program at hand is for: that of its mesh, whose devices need not be there, else JAX's default."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return getattr(device, "platform", None) or jax.default_backend()


def on_one_cpu() -> bool:
    """Whether the program at hand is for one CPU, which the custom calls of `native` are made for."""
    return platform() == "cpu" and jax.sharding.get_abstract_mesh().empty


def gathered(module: M, prefix: str) -> M:
    """The module with the parameters whose dotted path starts with `prefix` brought together over fsdp, split over tensor as they were.

    For passes of many tokens. Left to itself, the partitioner would make a ring of small products of each such product.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.shape["fsdp"] == 1:
        return module
    values = {name: variable.get_value() for name, variable in named_variables(module)}
    for name, spec in module_specs(module, mesh).items():
        if name.startswith(prefix):
            whole = PartitionSpec(*(None if entry == "fsdp" else entry for entry in spec))
            values[name] = jax.lax.with_sharding_constraint(values[name], whole)
    return fill(module, values)


def rows_are_split() -> bool:
    """Whether the program at hand runs on a mesh that deals rows out over its devices."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and math.prod(mesh.shape[name] for name in LOGICAL["rows"]) > 1


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Pins an array inside a program to the logical axes of its dimensions; a dimension that cannot be split so stays whole."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, partition(mesh, x.shape, axes))


def lookup(table_VD: jax.Array | Int8 | Panels, tokens: jax.Array) -> jax.Array:
    """table[tokens], [..., D] for tokens [B, ...]. On a mesh every device reads its part of the table, and rows change hands, never the
    table: the partitioner left alone brings all rows to every device."""
    V, D = table_VD.shape
    # Rows of int8 have one scale for their whole width: they are read whole.
    by_vocab, by_width = shards("vocab", V) > 1, shards("embed", D) > 1 and not isinstance(table_VD, Int8)
    by_rows = shards("rows", tokens.shape[0]) > 1
    if not by_vocab and not by_width:
        return constrain(table_VD[tokens], "rows", *(None,) * tokens.ndim)

    def read(table: jax.Array, tokens: jax.Array) -> jax.Array:
        if by_width and by_rows:
            tokens = jax.lax.all_gather(tokens, "fsdp", axis=0, tiled=True)
        if by_vocab:
            at = tokens - jax.lax.axis_index("tensor").astype(tokens.dtype) * table.shape[0]
            own = (at >= 0) & (at < table.shape[0])
            found = jnp.where(own[..., None], table[jnp.clip(at, 0, table.shape[0] - 1)], jnp.zeros((), table.dtype))
            found = jax.lax.psum(found, "tensor")
        else:
            found = table[tokens]
        if by_width and by_rows:
            return jax.lax.all_to_all(found, "fsdp", split_axis=0, concat_axis=found.ndim - 1, tiled=True)
        return jax.lax.all_gather(found, "fsdp", axis=found.ndim - 1, tiled=True) if by_width else found

    axes = [("vocab", "embed"), ("rows", *(None,) * (tokens.ndim - 1))]
    return local(read, axes, ("rows", *(None,) * tokens.ndim))(table_VD, tokens)


def shards(axis: str, size: int) -> int:
    """Into how many parts a dimension of this logical axis and size is split in the program at hand."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return 1
    parts = math.prod(mesh.shape[name] for name in LOGICAL[axis])
    return parts if size % parts == 0 else 1


def local(f: Callable[..., Any], axes: Sequence[tuple[str | None, ...]], out_axes: tuple[str | None, ...]) -> Callable[..., Any]:
    """`f` on each device's own parts of its arguments, where the program runs on a mesh.

    axes: logical axes of each argument's dimensions (an argument may be a pytree of arrays of the same axes); out_axes: those of all
    results, named among the arguments'. `f` must give the same on all devices along a mesh axis over which its result is not split.
    """

    def run(*arguments: Any) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            return f(*arguments)
        sizes: dict[str | None, set[int]] = {}
        for names, argument in zip(axes, arguments, strict=True):
            for array in jax.tree.leaves(argument):
                for name, size in zip(names, array.shape, strict=True):
                    sizes.setdefault(name, set()).add(size)
        whole = {name for name, found in sizes.items() if name is not None and any(shards(name, size) == 1 for size in found)}

        def spec(names: tuple[str | None, ...]) -> PartitionSpec:
            kept = [None if name in whole else name for name in names]
            return partition(mesh, [0] * len(kept), kept)

        return jax.shard_map(f, mesh=mesh, in_specs=tuple(map(spec, axes)), out_specs=spec(out_axes), check_vma=False)(*arguments)

    return run
