"""What a training step or a decoding cycle would take on a pod: compiled for it, without it and without weights.

Memory is the compiled program's own analysis; products and collectives are counted in its text (`hlo`).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from eagle3_jax.config import DraftConfig, TargetConfig
from eagle3_jax.decoding.decode import DecodeConfig, Request, cycle, prefill
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.params import named_variables
from eagle3_jax.pods.hlo import Traffic, cost
from eagle3_jax.pods.topology import GIB, Chip
from eagle3_jax.sampling import Sampling
from eagle3_jax.sharding import abstract, on_mesh_of, partition
from eagle3_jax.target import Target
from eagle3_jax.training.flops import step_flops
from eagle3_jax.training.placing import batch_sharding, check_rows, fixed_specs, on_mesh, state_specs
from eagle3_jax.training.trainer import Fixed, TrainConfig, is_trained, new_state, train_step
from eagle3_jax.training.ttt import Batch, Frozen
from eagle3_jax.tree import Tree


@dataclasses.dataclass(frozen=True)
class Plan:
    """One compiled program, per device but for `flops` and `paper_flops`, which are of all devices together (paper 0: not reckoned).

    arguments, temporaries, results: bytes; results that take an argument's place are not counted again.
    """

    name: str
    chip: Chip
    mesh: dict[str, int]
    arguments: int
    temporaries: int
    results: int
    flops: float
    paper_flops: float
    collectives: dict[str, Traffic]
    compile_seconds: float

    @property
    def memory(self) -> int:
        return self.arguments + self.temporaries + self.results

    @property
    def fits(self) -> bool:
        """With a tenth of the device's memory to spare."""
        return self.memory <= 0.9 * self.chip.memory


def compile_plan(name: str, lowered: Any, mesh: Mesh, chip: Chip, paper_flops: float = 0.0) -> Plan:
    """Compiles a lowered program and reads off what it takes. XLA refuses a program that does not fit: that is a ValueError."""
    begin = time.perf_counter()
    try:
        compiled = lowered.compile()
    except Exception as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise ValueError(f"{name} does not fit a {chip.name}: {' '.join(str(error).split())[:300]}") from None
        raise
    seconds = time.perf_counter() - begin
    memory, counted = compiled.memory_analysis(), cost(compiled.as_text())
    return Plan(
        name=name,
        chip=chip,
        mesh=dict(mesh.shape),
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        results=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        flops=counted.flops * mesh.size,
        paper_flops=paper_flops,
        collectives=counted.collectives,
        compile_seconds=seconds,
    )


def training_plan(
    target: TargetConfig, draft: DraftConfig, config: TrainConfig, mesh: Mesh, chip: Chip, name: str = "", platform: str = "tpu"
) -> Plan:
    """The training step of `train_step` on a mesh of devices that may be absent; target and activations in `config.compute`."""
    check_rows(config.rows, mesh)
    state, fixed, batch = abstract_training(target, draft, config, mesh)
    lowered = train_step.trace(draft, config, state, fixed, batch).lower(lowering_platforms=(platform,))
    return compile_plan(name or "training step", lowered, mesh, chip, step_flops(draft, config, target if config.online else None).total)


def abstract_training(target: TargetConfig, draft: DraftConfig, config: TrainConfig, mesh: Mesh) -> tuple[Any, Fixed, Batch]:
    """The arguments of `train_step` as shapes with placements."""
    compute = jnp.dtype(config.compute)
    shapes = {name: variable.get_value() for name, variable in named_variables(Eagle3Draft(draft))}
    params = {name: jax.ShapeDtypeStruct(x.shape, jnp.float32) for name, x in shapes.items() if is_trained(name, config.recipe)}
    state = jax.eval_shape(lambda params: new_state(params, config), params)
    D, V, U = target.hidden_size, target.vocab_size, draft.draft_vocab_size
    fixed = Fixed(
        Frozen(jax.ShapeDtypeStruct((V, D), compute), jax.ShapeDtypeStruct((D, U), compute)),  # pyright: ignore[reportArgumentType]
        {name: x for name, x in shapes.items() if name not in params},
    )
    tables, variables = fixed_specs(fixed, draft, mesh)
    fixed = Fixed(
        on_mesh(fixed.frozen, tables, mesh),
        on_mesh(fixed.variables, variables, mesh),
        abstract(Target(target), mesh, compute) if config.online else None,
    )
    parts, B, T, C = config.accumulate, config.rows, config.row_tokens, config.row_slots

    def rows(*shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct((parts, B, *shape), dtype, sharding=batch_sharding(mesh))

    known = None if config.online else rows
    batch = Batch(
        tokens=rows(T),
        positions=rows(T),
        features=known and known(T, D * len(draft.taps), dtype=jnp.bfloat16),
        hidden=known and known(T, D, dtype=jnp.bfloat16),
        argmax=known and known(T),
        response=rows(T),
        segments=rows(T),
        valid=rows(T, dtype=jnp.bool_),
        slots=rows(C),
    )
    return on_mesh(state, state_specs(state, draft, mesh), mesh), fixed, batch


def decoding_shape(target: TargetConfig, devices: int) -> dict[str, int]:
    """A mesh for decoding on so many devices: tensor as far as the key/value heads go, rows over the rest."""
    tensor = math.gcd(target.num_kv_heads, devices)
    return {"data": devices // tensor, "tensor": tensor}


def training_shape(devices: int) -> dict[str, int]:
    """A mesh for training on so many devices: parameters over at most 64 of them, rows over all."""
    fsdp = math.gcd(64, devices)
    return {"data": devices // fsdp, "fsdp": fsdp}


def decoding_plan(
    target: TargetConfig,
    draft: DraftConfig | None,
    tree: Tree | None,
    batch: int,
    context: int,
    mesh: Mesh,
    chip: Chip,
    sampled: bool = False,
    name: str = "",
) -> Plan:
    """One draft-and-verify cycle of `batch` rows over caches of `context` slots, in bfloat16."""
    state_shape, arguments, config = abstract_decoding(target, draft, tree, batch, context, mesh, sampled)

    def one(target: Target, draft: Eagle3Draft | None, request: Request, state: Any) -> Any:
        with on_mesh_of(target):
            return cycle(target, draft, request, config, state)

    lowered = jax.jit(one, donate_argnums=3).trace(*arguments, state_shape).lower(lowering_platforms=("tpu",))
    return compile_plan(name or "decoding cycle", lowered, mesh, chip)


def abstract_decoding(
    target: TargetConfig, draft: DraftConfig | None, tree: Tree | None, batch: int, context: int, mesh: Mesh, sampled: bool
) -> tuple[Any, tuple[Target, Eagle3Draft | None, Request], DecodeConfig]:
    """(state, (target, draft, request), configuration) of `cycle` as shapes with placements."""
    modules = (abstract(Target(target), mesh, jnp.bfloat16), None if draft is None else abstract(Eagle3Draft(draft), mesh, jnp.bfloat16))

    def rows(*shape: int, dtype: Any = jnp.int32) -> Any:
        spec = partition(mesh, (batch, *shape), ("rows", *(None,) * len(shape)))
        return jax.ShapeDtypeStruct((batch, *shape), dtype, sharding=NamedSharding(mesh, spec))

    sampling = Sampling(rows(dtype=jnp.float32), rows(), rows(dtype=jnp.float32), rows(2, dtype=jnp.uint32))
    request = Request(rows(16), rows(), rows(), rows(4), sampling)
    config = DecodeConfig(tree=tree, slots=context, max_new=256, sampled=sampled)

    def start(target: Target, draft: Eagle3Draft | None, request: Request) -> Any:
        with on_mesh_of(target):
            return prefill(target, draft, request, config)

    def placed(x: Any) -> Any:
        axes: tuple[str | None, ...] = ("rows", *(None,) * (x.ndim - 1)) if x.ndim else ()
        # The only arrays of four dimensions are the caches.
        axes = ("rows", "kv_heads", None, None) if x.ndim == 4 else axes
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, partition(mesh, x.shape, axes)))

    state = jax.tree.map(placed, jax.eval_shape(start, *modules, request))
    return state, (*modules, request), config


def plan_table(plans: Sequence[Plan]) -> str:
    """A Markdown table, one program per line."""
    lines = [
        "| program | mesh | GiB per device: arguments + temporaries | of | fits | TFLOP per device | of paper's | collectives per device |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for plan in plans:
        mesh = " x ".join(f"{name} {size}" for name, size in plan.mesh.items() if size > 1) or "one device"
        ratio = f"{plan.flops / plan.paper_flops:.2f}x" if plan.paper_flops else ""
        moved = ", ".join(f"{kind} {t.count} ({_size(t.bytes)})" for kind, t in sorted(plan.collectives.items())) or "none"
        room = "yes" if plan.fits else "tight" if plan.memory <= plan.chip.memory else "NO"
        memory = f"{plan.memory / GIB:.2f}: {plan.arguments / GIB:.2f} + {plan.temporaries / GIB:.2f}"
        flops = f"{plan.flops / math.prod(plan.mesh.values()) / 1e12:.4g}"
        lines.append(f"| {plan.name} | {mesh} | {memory} | {plan.chip.memory // GIB} | {room} | {flops} | {ratio} | {moved} |")
    return "\n".join(lines)


def _size(number: float) -> str:
    for unit in ("B", "KB", "MB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} GB"
