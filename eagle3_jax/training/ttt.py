"""Training-time test: the draft is unrolled J steps over known text, as decoding will unroll it, and every step is scored.

Slot i starts from the target's feature of token i and reads the embeddings of tokens i+1, i+2, ...; step s predicts token i+2+s.
Source: paper section 3.2 and figure 6; official code `eagle/traineagle3/cnets.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax import bfloat
from eagle3_jax import draft as draft_model
from eagle3_jax.attention import ttt_attend
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.flash import Sight
from eagle3_jax.layers import rotary
from eagle3_jax.sharding import platform
from eagle3_jax.training.losses import feature_distance, head_loss

KV = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Which slots are scored, how, and by what the sum is divided.

    slots: "mask_at_slot": the mask of token i+s; "mask_at_token": of token i+1+s, the one read at step s;
        "one_response": tokens i+1 ... i+2+s all belong to one response, the only states a decode can be in.
    divide_by: "positions": all B*T, padding included; "mask": the scored slots of the step + 1e-5; "slots": max(1, those).
    in_vocabulary: slots whose target argmax is outside the draft vocabulary have no loss (they stay in the divisor).
    clear_last: the mask of every document's last token is cleared first.
    train_head: False freezes the output head, which then holds the target's rows; train_fusion: False freezes fc.
    feature_weight: of EAGLE's regression, smooth L1 between the state that is fed back and the target's final normed state of the same
    token, over every scored slot; logit_weight: of the loss over the vocabulary beside it (EAGLE: 1 and 0.1; EAGLE-3: 0 and 1).
    """

    name: str
    slots: str
    divide_by: str
    steps: int = 7
    decay: float = 0.8
    loss: str = "cross_entropy"
    in_vocabulary: bool = True
    clear_last: bool = False
    train_head: bool = True
    train_fusion: bool = True
    feature_weight: float = 0.0
    logit_weight: float = 1.0

    def weights(self) -> np.ndarray:
        """float32 [J]: decay to the power of the step."""
        return np.power(np.float32(self.decay), np.arange(self.steps, dtype=np.float32)).astype(np.float32)


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("aligned", slots="one_response", divide_by="slots"),
        Recipe("official", slots="mask_at_slot", divide_by="positions"),
        Recipe("specforge", slots="mask_at_slot", divide_by="positions", clear_last=True),
        Recipe(
            "speculators", slots="mask_at_token", divide_by="mask", steps=3, decay=1.0, loss="kl", in_vocabulary=False, train_head=False
        ),
    )
}


def recipe(name: str, **changes: Any) -> Recipe:
    """A recipe by name, with `changes` (steps, decay, loss, ...) applied; ValueError lists the names."""
    if name not in RECIPES:
        raise ValueError(f"recipe {name!r} is unknown (known: {', '.join(RECIPES)})")
    return dataclasses.replace(RECIPES[name], **changes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """B packed rows of T tokens.

    tokens, positions: int32 [B, T]; positions restart in each segment.
    features: [B, T, A] tapped states; hidden: [B, T, D] final normed states; argmax: int32 [B, T], the target's choice (-1: not known).
    These three are None where the target itself runs within the step (`online.observe` fills them in).
    response: int32 [B, T], 0 outside responses, r in the r-th of its document. segments: int32 [B, T], the document of each token.
    valid: bool [B, T], False for padding, which no token reads.
    slots: int32 [B, C], the slots that are scored at some step, ascending, with -1 (none) in front. Every other slot only lends its K/V.
    """

    tokens: jax.Array
    positions: jax.Array
    features: jax.Array | None
    hidden: jax.Array | None
    argmax: jax.Array | None
    response: jax.Array
    segments: jax.Array
    valid: jax.Array
    slots: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Frozen:
    """What training reads and never changes: embed [V, D], the table that the draft reads (`draft.table`);
    teacher_head [D, U], the kept columns of the target's head."""

    embed: jax.Array
    teacher_head: jax.Array


class Metrics(NamedTuple):
    """Per step, each [J]: loss (divided as the recipe says), slots scored, of them correct, of them correct at every step so far."""

    loss: jax.Array
    slots: jax.Array
    correct: jax.Array
    survived: jax.Array


def shift(x_BT: Any, by: int, segments_BT: Any, fill: int = 0) -> Any:
    """x[i + by] where that lies in the same segment of the row, else `fill`. numpy in, numpy out; jax in, jax out."""
    xp = np if isinstance(x_BT, np.ndarray) else jnp
    if by == 0:
        return x_BT
    moved, other = (_advance(xp, a, by) for a in (x_BT, segments_BT))
    inside = xp.arange(x_BT.shape[1]) < x_BT.shape[1] - by
    return xp.where(inside[None] & (other == segments_BT), moved, xp.asarray(fill, x_BT.dtype))


def _advance(xp: Any, x_BT: Any, by: int) -> Any:
    by = min(by, x_BT.shape[1])
    return xp.concatenate([x_BT[:, by:], xp.zeros_like(x_BT[:, :by])], axis=1)


def scored(recipe: Recipe, response_BT: Any, segments_BT: Any, valid_BT: Any) -> Any:
    """bool [J, B, T]: the slots scored at each step, from the masks alone (numpy or jax).

    Wherever slot i is scored at step s, slot i+k is scored at step s-k for every k <= s: scored slots come in runs.
    """
    xp = np if isinstance(response_BT, np.ndarray) else jnp
    response = xp.where(valid_BT, response_BT, 0)
    if recipe.clear_last:
        last = valid_BT & ~shift(valid_BT, 1, segments_BT)
        response = xp.where(last, 0, response)
    if recipe.slots == "mask_at_slot":
        return xp.stack([shift(response, s, segments_BT) > 0 for s in range(recipe.steps)])
    if recipe.slots == "mask_at_token":
        return xp.stack([shift(response, s + 1, segments_BT) > 0 for s in range(recipe.steps)])
    if recipe.slots != "one_response":
        raise ValueError(f"recipe {recipe.name!r}: unknown slot rule {recipe.slots!r}")
    first = shift(response, 1, segments_BT)
    masks, so_far = [], (first > 0) & valid_BT
    for s in range(recipe.steps):
        so_far = so_far & (shift(response, s + 2, segments_BT) == first)
        masks.append(so_far)
    return xp.stack(masks)


def divisors(recipe: Recipe, scored_JBT: jax.Array) -> jax.Array:
    """float32 [J], what the sum of each step's losses is divided by. Slots of one global batch add up, so it can be known in advance."""
    J, B, T = scored_JBT.shape
    count = jnp.sum(scored_JBT, axis=(1, 2), dtype=jnp.float32)
    if recipe.divide_by == "positions":
        return jnp.full((J,), B * T, jnp.float32)
    if recipe.divide_by == "mask":
        return count + 1e-5
    if recipe.divide_by == "slots":
        return jnp.maximum(count, 1.0)
    raise ValueError(f"recipe {recipe.name!r}: unknown divisor {recipe.divide_by!r}")


def ttt_loss(
    draft: Eagle3Draft,
    frozen: Frozen,
    batch: Batch,
    recipe: Recipe,
    divisors_J: jax.Array | None = None,
    *,
    remat: bool = False,
) -> tuple[jax.Array, Metrics]:
    """(sum over steps of decay^s times L_s, metrics) of one batch; the gradient flows through all steps.

    divisors_J: those of the whole global batch when this is a part of it; None: this batch's own.
    remat: the backward pass recomputes each step's layer instead of keeping its products: less memory, a third more work.
    """
    J = recipe.steps
    if batch.features is None or batch.hidden is None or batch.argmax is None:
        raise ValueError("the batch holds no features: let `observe` compute them first")
    masks_JBT = scored(recipe, batch.response, batch.segments, batch.valid)
    if divisors_J is None:
        divisors_J = divisors(recipe, masks_JBT)
    present_BC = batch.slots >= 0
    at_BC = jnp.maximum(batch.slots, 0)

    def pick(x: jax.Array) -> jax.Array:
        """The scored slots' entries of x [B, T, ...]."""
        return jnp.take_along_axis(x, at_BC.reshape(*at_BC.shape, *(1,) * (x.ndim - 2)), axis=1)

    states_JBCD = unroll(draft, frozen.embed, batch, J, pick, remat)
    normed = draft_model.normed(draft, states_JBCD)

    # From here on row c stands for the token PREDICTED after position slots[c] + 1: its teacher is one, its drafts are those of step s
    # at slot slots[c] - s, which is entry c - s because scored slots come in runs.
    drafts = jnp.stack([_delay(a, s) for s, a in enumerate(jnp.unstack(normed))])
    masks_JBC = jnp.stack([pick(masks_JBT[s]) & present_BC for s in range(J)])
    segment_BC = pick(batch.segments)
    neighbour = lambda s: (_delay(batch.slots + 1, s) == batch.slots + 1 - s) & (_delay(segment_BC, s) == segment_BC)  # noqa: E731
    rows_JBC = jnp.stack([_delay(masks_JBC[s], s) & neighbour(s) & present_BC for s in range(J)])
    teacher = pick(_follow(batch.hidden, batch.segments))
    argmax = pick(shift(batch.argmax, 1, batch.segments))
    kept = draft.d2t[...]
    to_draft = jnp.full((draft.config.vocab_size,), -1, jnp.int32).at[kept].set(jnp.arange(len(kept), dtype=jnp.int32))
    label = jnp.where(argmax >= 0, to_draft[jnp.maximum(argmax, 0)], -1)
    trained = rows_JBC & (label >= 0)[None] if recipe.in_vocabulary else rows_JBC
    per_row = jnp.asarray(recipe.weights()) / divisors_J
    weight = jnp.where(trained, recipe.logit_weight * per_row[:, None, None], 0.0)
    head = draft.head[...] if recipe.train_head else jax.lax.stop_gradient(draft.head[...])
    total, results = head_loss(recipe.loss, drafts, head, teacher, frozen.teacher_head, weight, label)
    if recipe.feature_weight:
        states = jnp.stack([_delay(a, s) for s, a in enumerate(jnp.unstack(states_JBCD))])
        apart = jnp.where(rows_JBC, feature_distance(states, teacher[None]), 0.0)
        total = total + recipe.feature_weight * jnp.sum(per_row[:, None, None] * apart)
    loss = jnp.sum(jnp.where(trained, results.loss, 0.0), axis=(1, 2)) / divisors_J
    correct_JBC = results.correct & rows_JBC
    # Back to slots: entry c + s of step s is slot c's own.
    alive, survived = jnp.ones(batch.slots.shape, bool), []
    for s in range(J):
        alive = alive & _hasten(correct_JBC[s], s) & masks_JBC[s]
        survived.append(jnp.sum(alive, dtype=jnp.int32))
    count = lambda x: jnp.sum(x, axis=(1, 2), dtype=jnp.int32)  # noqa: E731
    return total, Metrics(loss, count(masks_JBC), count(correct_JBC), jnp.stack(survived))


def unroll(draft: Eagle3Draft, embed_VD: jax.Array, batch: Batch, steps: int, pick: Any, remat: bool = False) -> jax.Array:
    """The draft's states a [J, B, C, D] of `steps` = J steps at the scored slots.

    pick: takes [B, T, ...] to the scored slots [B, C, ...]. remat: the layer is computed again in the backward pass. Keys of step 0 are
    needed at every slot; all else only where a slot is scored, because a later key is read by its own slot alone.
    """
    segments, dtype = batch.segments, draft.dtype
    # Products are kept for the backward pass, or nothing; what lies between them costs little to compute again.
    products = jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_saveable, jax.checkpoint_policies.save_only_these_names(bfloat.NAME)
    )
    kept = None if remat else products
    # A CPU attends in float32: of the many gradients that meet in a key it would round each before it adds them, one number at a time.
    wide = jnp.float32 if platform() == "cpu" else dtype

    def project(*args: Any) -> list[jax.Array]:
        return [x.astype(wide) for x in jax.checkpoint(draft_model.project_state, policy=kept)(draft, *args)]

    def finish(x: jax.Array, attended: jax.Array) -> jax.Array:
        return jax.checkpoint(draft_model.finish_layer, policy=kept)(draft, x, attended.astype(dtype))

    assert batch.features is not None
    B, T = batch.tokens.shape
    g = draft_model.fuse(draft, batch.features)
    # A token is read at up to J steps: what its embedding adds is computed once. Behind the end of a segment token 0 is read, the last row.
    embedded = embed_VD[jnp.concatenate([batch.tokens, jnp.zeros((B, 1), jnp.int32)], axis=1)].astype(dtype)
    known = draft_model.embedding_part(draft, embedded)
    index = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    read = lambda at: [jnp.take_along_axis(part, at[:, :, None], axis=1) for part in known]  # noqa: E731
    angles = lambda positions: rotary(positions, draft.config.rope, draft.config.head_dim)  # noqa: E731
    q, k0, v0 = project(read(shift(index, 1, segments, T)), g, angles(batch.positions))
    sight = Sight(jnp.maximum(batch.slots, 0), pick(segments), jnp.where(batch.valid, segments, -1))
    positions = pick(batch.positions)
    x = finish(pick(g), ttt_attend(pick(q), k0, v0, sight, ()))

    def advance(x: jax.Array, at: jax.Array, s: Any, earlier: Sequence[KV], seen: Any = None) -> tuple[jax.Array, KV]:
        """Step s from 1 on: (a, the step's own K/V), of the state before it and where the tokens read stand; `earlier`, `seen`: see
        `ttt_attend`."""
        q, k, v = project(read(at), x, angles(positions + s))
        return finish(x, ttt_attend(q, k0, v0, sight, [*earlier, (k, v)], seen=seen)), (k, v)

    reads = [pick(shift(index, 1 + s, segments, T)) for s in range(1, steps)]
    if platform() == "cpu" or steps < 3:
        # Written out, a step touches only the keys there are. Elsewhere compiling seven steps apart takes minutes: one loop's body.
        states, later = [x], []
        for s, at in enumerate(reads, 1):
            x, own = advance(x, at, s, later)
            states.append(x)
            later.append(own)
        return jnp.stack(states)

    def step(carry: tuple[jax.Array, KV], at: tuple[jax.Array, jax.Array]) -> tuple[tuple[jax.Array, KV], jax.Array]:
        x, (keys, values) = carry
        where, s = at
        x, (k, v) = advance(x, where, s, list(zip(keys[:-1], values[:-1], strict=True)), seen=s - 1)
        return (x, (keys.at[s - 1].set(k), values.at[s - 1].set(v))), x

    room = jnp.zeros((steps - 1, *positions.shape, *k0.shape[2:]), dtype)
    _, states = jax.lax.scan(step, (x, (room, room)), (jnp.stack(reads), jnp.arange(1, steps, dtype=jnp.int32)))
    return jnp.concatenate([x[None], states])


def _follow(hidden_BTD: jax.Array, segments_BT: jax.Array) -> jax.Array:
    """The next token's row within the segment, zeros behind its end."""
    moved = jnp.concatenate([hidden_BTD[:, 1:], jnp.zeros_like(hidden_BTD[:, :1])], axis=1)
    inside = shift(jnp.ones_like(segments_BT), 1, segments_BT) > 0
    return jnp.where(inside[:, :, None], moved, jnp.zeros((), moved.dtype))


def _delay(x: jax.Array, by: int) -> jax.Array:
    """Entry c becomes entry c + by along axis 1; zeros enter in front."""
    return x if by == 0 else jnp.concatenate([jnp.zeros_like(x[:, :by]), x[:, : x.shape[1] - by]], axis=1)


def _hasten(x: jax.Array, by: int) -> jax.Array:
    """Entry c + by becomes entry c along axis 1; zeros enter behind."""
    return x if by == 0 else jnp.concatenate([x[:, by:], jnp.zeros_like(x[:, :by])], axis=1)
