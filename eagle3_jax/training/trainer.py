"""The training step, its state, and the loop around it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from eagle3_jax.attention import IMPLEMENTATIONS
from eagle3_jax.config import DraftConfig
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.params import fill, named_variables
from eagle3_jax.sharding import constrain, lookup, module_specs, named_specs, on_mesh_of, partition, pin, rows_are_split
from eagle3_jax.target import Target
from eagle3_jax.training.by_rows import Dealt, gradient_by_rows, sum_by_rows
from eagle3_jax.training.online import observe
from eagle3_jax.training.ttt import RECIPES, Batch, Frozen, Metrics, Recipe, divisors, scored, ttt_loss

Params = dict[str, jax.Array]
"""Trained parameters by name, float32."""

OPTIMIZERS = ("adamw", "muon")
SCHEDULES = ("cosine", "linear")
COMPUTE_TYPES = ("float32", "bfloat16")

ORTHOGONAL = ("fc", "q", "k", "v", "o", "gate", "up", "down")
"""Matrices that the "muon" optimizer updates with orthogonalised momentum; norms and the output head stay with AdamW."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Everything that decides what training computes.

    steps: optimizer updates. row_tokens, row_slots: static widths T and C of a packed row; rows per micro-batch; accumulate micro-batches
    per update. peak_lr is reached after `warmup` updates, held, and lowered along a half cosine or a line (`schedule`) over the last
    `decay` updates to floor * peak_lr (decay None: all updates after the warm-up). clip: global gradient norm. optimizer: "adamw" or
    "muon". compute: the type of activations and products; parameters, their gradients' sums and the optimizer are float32 always.
    online: the target runs within the step, instead of features computed beforehand, with its causal pass by `attention`.
    remat: see `ttt_loss`.
    """

    recipe: Recipe = RECIPES["aligned"]
    steps: int = 1000
    rows: int = 3
    row_tokens: int = 832
    row_slots: int = 640
    accumulate: int = 1
    peak_lr: float = 2e-3
    warmup: int = 40
    decay: int | None = None
    floor: float = 0.02
    clip: float = 1.0
    weight_decay: float = 0.0
    b1: float = 0.9
    b2: float = 0.95
    optimizer: str = "adamw"
    seed: int = 0
    schedule: str = "cosine"
    compute: str = "float32"
    online: bool = False
    attention: str = "xla"
    remat: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "rows", "row_tokens", "row_slots", "accumulate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} must be at least 1")
        if self.row_slots > self.row_tokens:
            raise ValueError(f"row_slots {self.row_slots} exceeds row_tokens {self.row_tokens}")
        for name, known in (("optimizer", OPTIMIZERS), ("schedule", SCHEDULES), ("compute", COMPUTE_TYPES), ("attention", IMPLEMENTATIONS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r} is unknown (known: {', '.join(known)})")
        if not self.peak_lr > 0 or not self.clip > 0 or not 0 <= self.floor <= 1:
            raise ValueError("peak_lr and clip must be positive and floor must lie in 0..1")
        if self.warmup + (self.decay or 0) > self.steps:
            raise ValueError(f"warmup {self.warmup} and decay {self.decay} do not fit into {self.steps} steps")

    def learning_rate(self, step: ArrayLike) -> jax.Array:
        """float32 learning rate of update `step` (from 0)."""
        decay = self.steps - self.warmup if self.decay is None else self.decay
        step = jnp.asarray(step, jnp.float32)
        rising = (step + 1.0) / max(1, self.warmup)
        left = jnp.clip((self.steps - step) / max(1, decay), 0.0, 1.0)
        shape = left if self.schedule == "linear" else 0.5 * (1.0 - jnp.cos(jnp.pi * left))
        falling = self.floor + (1.0 - self.floor) * shape
        return jnp.float32(self.peak_lr) * jnp.minimum(jnp.minimum(rising, 1.0), falling)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """params: the trained parameters by name (float32 masters); opt_state: optax's; step: int32, updates done."""

    params: Params
    opt_state: Any
    step: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fixed:
    """What a step reads and never changes: the target's tables, the draft's untrained variables by name (d2t, a frozen head), and the
    target itself where it runs within the step."""

    frozen: Frozen
    variables: dict[str, jax.Array]
    target: Target | None = None


class StepMetrics(NamedTuple):
    """Device scalars of one update; reading them waits for it, so the loop reads those of the update before."""

    total: jax.Array
    per_step: Metrics
    gradient_norm: jax.Array
    learning_rate: jax.Array


def is_trained(name: str, recipe: Recipe) -> bool:
    """Whether training moves the draft's variable `name`. An embedding of the head's own stays as it came, as the target's does."""
    return name not in ("d2t", "embed") and (recipe.train_head or name != "head") and (recipe.train_fusion or name != "fc")


def split(draft: Eagle3Draft, recipe: Recipe) -> tuple[Params, dict[str, jax.Array]]:
    """(trained parameters in float32, all other variables) by name. The first are copies: a donated step must not take the module's."""
    values = {name: variable.get_value() for name, variable in named_variables(draft)}
    trained = {name: jnp.array(value, jnp.float32, copy=True) for name, value in values.items() if is_trained(name, recipe)}
    return trained, {name: value for name, value in values.items() if name not in trained}


def join(config: DraftConfig, params: Mapping[str, Any], variables: Mapping[str, Any]) -> Eagle3Draft:
    """The draft module that holds both."""
    return fill(Eagle3Draft(config), {**params, **variables})


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Clip by global norm, then AdamW, or Muon for the inner matrices with AdamW for the rest."""
    adamw = partial(optax.adamw, config.learning_rate, b1=config.b1, b2=config.b2, weight_decay=config.weight_decay)
    if config.optimizer == "adamw":
        return optax.chain(optax.clip_by_global_norm(config.clip), adamw())
    muon = optax.contrib.muon(config.learning_rate, weight_decay=config.weight_decay, consistent_rms=0.2)
    labels = lambda params: {name: "muon" if name in ORTHOGONAL else "adamw" for name in params}  # noqa: E731
    return optax.chain(optax.clip_by_global_norm(config.clip), optax.partition({"muon": muon, "adamw": adamw()}, labels))


def new_state(params: Params, config: TrainConfig) -> TrainState:
    """The state before the first update."""
    return TrainState(params, make_optimizer(config).init(params), jnp.zeros((), jnp.int32))


def loss_and_gradient(
    draft_config: DraftConfig, config: TrainConfig, params: Params, fixed: Fixed, batch: Batch
) -> tuple[jax.Array, Metrics, Params]:
    """(total, metrics, gradients) of one global batch: every array of `batch` has a leading axis of micro-batches.

    What each step's losses are divided by comes from the masks of all micro-batches, so cutting the batch changes nothing.
    """
    masks = jax.vmap(lambda part: scored(config.recipe, part.response, part.segments, part.valid))(batch)
    parts, J, B, T = masks.shape
    global_divisors = divisors(config.recipe, masks.transpose(1, 0, 2, 3).reshape(J, parts * B, T))

    loss = partial(_loss, draft_config, config.recipe, config.remat)

    def gradient(part: Batch) -> tuple[jax.Array, Metrics, Params]:
        part = complete(draft_config, fixed, part, config.attention)
        known = Known(fixed.frozen, fixed.variables, global_divisors)
        if not rows_are_split():
            own = jax.value_and_grad(lambda params: loss(in_type(params, config.compute), known, part), has_aux=True)
            (total, metrics), grads = own(params)
            return pinned((total, metrics, grads), draft_config)
        dealt = _deal_out(draft_config, known, part)
        return pinned(gradient_by_rows(partial(_own_rows, loss), params, dealt, config.compute), draft_config)

    first = jax.tree.map(lambda x: x[0], batch)
    if parts == 1:
        return gradient(first)
    zeros = pinned(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(gradient, first)), draft_config)
    summed, _ = jax.lax.scan(lambda carry, part: (jax.tree.map(jnp.add, carry, gradient(part)), None), zeros, batch)
    return summed


class Known(NamedTuple):
    """What the loss of a part reads: tables, untrained variables, and what each step's sum is divided by, [J]."""

    frozen: Frozen
    variables: dict[str, jax.Array]
    divisors: jax.Array


def _loss(draft_config: DraftConfig, recipe: Recipe, remat: bool, params: Params, known: Known, part: Batch) -> tuple[jax.Array, Metrics]:
    return ttt_loss(join(draft_config, params, known.variables), known.frozen, part, recipe, known.divisors, remat=remat)


def pinned(tree: Any, draft_config: DraftConfig) -> Any:
    """On a mesh: every array that belongs to a parameter where the parameter lies, all others whole everywhere."""
    mesh = jax.sharding.get_abstract_mesh()
    return tree if mesh.empty else pin(tree, named_specs(tree, module_specs(Eagle3Draft(draft_config), mesh)))


def _deal_out(draft_config: DraftConfig, known: Known, part: Batch) -> Dealt:
    """The loss's arguments for each device's own rows: embeddings are looked up here, where the table is split over the devices."""
    mesh = jax.sharding.get_abstract_mesh()
    embed, head = known.frozen.embed, known.frozen.teacher_head
    specs = module_specs(Eagle3Draft(draft_config), mesh)
    # The embedding of token 0, which stands behind the end of every document, is the table's only row that every device needs.
    fixed = (head, known.variables, known.divisors, constrain(embed[:1], None, None))
    fixed_specs = (
        partition(mesh, head.shape, ("embed", "draft_vocab")),
        named_specs(known.variables, specs),
        PartitionSpec(),
        PartitionSpec(),
    )
    rows = (part, lookup(embed, part.tokens))
    return Dealt(specs, fixed, fixed_specs, rows)


def _own_rows(loss: Any, params: Params, fixed: Any, rows: tuple[Batch, jax.Array]) -> tuple[jax.Array, Metrics]:
    """`_loss` with a table of the rows' own embeddings in place of the target's, and tokens that count through it."""
    head, variables, own_divisors, first = fixed
    part, embedded_BTD = rows
    B, T, D = embedded_BTD.shape
    table = jnp.concatenate([first, embedded_BTD.reshape(B * T, D)])
    tokens = 1 + jnp.arange(B * T, dtype=jnp.int32).reshape(B, T)
    return loss(params, Known(Frozen(table, head), variables, own_divisors), dataclasses.replace(part, tokens=tokens))


def in_type(params: Params, dtype: str) -> Params:
    """The float32 masters as the forward pass reads them; gradients come back in float32 through the cast."""
    return {name: value.astype(dtype) for name, value in params.items()}


def complete(draft_config: DraftConfig, fixed: Fixed, batch: Batch, attention: str = "xla") -> Batch:
    """The batch with the target's features, computed here when the target is at hand."""
    return batch if fixed.target is None else observe(fixed.target, draft_config.taps, batch, attention)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def train_step(
    draft_config: DraftConfig, config: TrainConfig, state: TrainState, fixed: Fixed, batch: Batch
) -> tuple[TrainState, StepMetrics]:
    """One update, on the mesh that the state lies on, if on one. `state` is donated: use only the returned one."""
    with on_mesh_of(state):
        total, metrics, grads = loss_and_gradient(draft_config, config, state.params, fixed, batch)
        # Optax mixes types and ranks (decay ** count); a caller's strict promotion rules are for this library's own code.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            updates, opt_state = make_optimizer(config).update(grads, state.opt_state, state.params)
            params = cast(Params, optax.apply_updates(state.params, updates))
        norm, rate = optax.tree.norm(grads), config.learning_rate(state.step)
        new = TrainState(params, opt_state, state.step + 1), StepMetrics(total, metrics, norm, rate)
        return pinned(new, draft_config)


@partial(jax.jit, static_argnums=(0, 1))
def eval_step(draft_config: DraftConfig, recipe: Recipe, params: Params, fixed: Fixed, batch: Batch) -> Metrics:
    """Metrics of one batch (arrays without the micro-batch axis)."""
    with on_mesh_of(params):
        batch = complete(draft_config, fixed, batch)
        scored_JBT = scored(recipe, batch.response, batch.segments, batch.valid)
        known = Known(fixed.frozen, fixed.variables, divisors(recipe, scored_JBT))
        loss = partial(_loss, draft_config, recipe, False)
        if not rows_are_split():
            return pinned(loss(params, known, batch)[1], draft_config)
        dealt = _deal_out(draft_config, known, batch)
        return pinned(sum_by_rows(partial(_own_rows, loss), params, dealt, "float32")[1], draft_config)


class Evaluation(NamedTuple):
    """Over a whole set, per step: mean loss per scored slot, accuracy, and survival (every step so far correct). Floats."""

    loss: list[float]
    accuracy: list[float]
    survival: list[float]


def evaluate(draft_config: DraftConfig, recipe: Recipe, params: Params, fixed: Fixed, batches: Iterator[Batch]) -> Evaluation:
    """Runs `eval_step` over the batches and averages over slots, not over batches."""
    rule = dataclasses.replace(recipe, divide_by="slots")
    loss = slots = correct = survived = 0.0
    for batch in batches:
        metrics = jax.device_get(eval_step(draft_config, rule, params, fixed, batch))
        loss = loss + metrics.loss * metrics.slots.clip(1)
        slots, correct, survived = slots + metrics.slots, correct + metrics.correct, survived + metrics.survived
    count = jnp.maximum(jnp.asarray(slots), 1)
    return Evaluation(*([float(x) for x in jnp.atleast_1d(jnp.asarray(total) / count)] for total in (loss, correct, survived)))
