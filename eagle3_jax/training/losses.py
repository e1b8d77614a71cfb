"""Losses between the target's distribution and the draft's over the draft vocabulary, by name, and their evaluation in chunks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from eagle3_jax import bfloat
from eagle3_jax.layers import linear
from eagle3_jax.sharding import platform
from eagle3_jax.training import fused_loss

LANES = 128
"""How many sums of a row a CPU makes side by side."""


def _sum(x: jax.Array) -> jax.Array:
    """Over the last axis. XLA's CPU backend adds the numbers of a fused row one after the other; columns it adds side by side."""
    if platform() != "cpu" or x.shape[-1] % LANES:
        return jnp.sum(x, axis=-1)
    return jnp.sum(jnp.sum(x.reshape(*x.shape[:-1], -1, LANES), axis=-2), axis=-1)


def cross_entropy(teacher: jax.Array, draft: jax.Array) -> jax.Array:
    """Soft cross-entropy -sum_u p log q per row, p = softmax(teacher) and q = softmax(draft); float32 logits [..., U] that broadcast."""
    return -_sum(jax.nn.softmax(teacher, axis=-1) * jax.nn.log_softmax(draft, axis=-1))


def kl(teacher: jax.Array, draft: jax.Array) -> jax.Array:
    """KL(p || q) per row: the cross-entropy less the teacher's entropy; the same gradient."""
    log_p = jax.nn.log_softmax(teacher, axis=-1)
    return _sum(jnp.exp(log_p) * (log_p - jax.nn.log_softmax(draft, axis=-1)))


def total_variation(teacher: jax.Array, draft: jax.Array) -> jax.Array:
    """Half the L1 distance of p and q per row: one minus the chance that a token sampled from q is accepted."""
    return 0.5 * _sum(jnp.abs(jax.nn.softmax(teacher, axis=-1) - jax.nn.softmax(draft, axis=-1)))


def lk_alpha(teacher: jax.Array, draft: jax.Array) -> jax.Array:
    """-log of the acceptance sum_u min(p, q) per row (LK losses, arXiv:2602.23881; "nla" in speculators).

    Computed from log-probabilities, so that a row of hardly any overlap keeps its gradient.
    """
    return -jax.nn.logsumexp(jnp.minimum(jax.nn.log_softmax(teacher, axis=-1), jax.nn.log_softmax(draft, axis=-1)), axis=-1)


LK_ETA = 3.0
"""How fast `lk_lambda` moves from the divergence to the total variation; the best value of its paper."""


def lk_lambda(teacher: jax.Array, draft: jax.Array) -> jax.Array:
    """w KL + (1 - w) TV per row, w = exp(-LK_ETA times the row's acceptance), a constant for the gradient (arXiv:2602.23881).

    Per row, as speculators' `lk_hybrid` has it; the paper averages the acceptance over the batch, which would make a row's loss depend
    on which others stand beside it.
    """
    distance = total_variation(teacher, draft)
    weight = jnp.exp(-LK_ETA * jax.lax.stop_gradient(1.0 - distance))
    return weight * kl(teacher, draft) + (1.0 - weight) * distance


def feature_distance(state: jax.Array, feature: jax.Array) -> jax.Array:
    """EAGLE's regression loss per row, float32 [...]: smooth L1 of [..., D] states against the target's features, mean over D.

    Source: EAGLE (arXiv:2401.15077) section 4.2. Raises ValueError when the draft is narrower than its target.
    """
    if state.shape[-1] != feature.shape[-1]:
        raise ValueError(f"a feature loss needs a draft as wide as its target: {state.shape[-1]} against {feature.shape[-1]}")
    apart = jnp.abs(state.astype(jnp.float32) - feature.astype(jnp.float32))
    return jnp.mean(jnp.where(apart < 1.0, 0.5 * jnp.square(apart), apart - 0.5), axis=-1)


ROW_LOSSES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "cross_entropy": cross_entropy,
    "kl": kl,
    "total_variation": total_variation,
    "lk_alpha": lk_alpha,
    "lk_lambda": lk_lambda,
}


class RowResults(NamedTuple):
    """Per step and row, float32 [J, B, C] losses (not weighted) and bool [J, B, C]: the draft's argmax is the teacher's. No gradient."""

    loss: jax.Array
    correct: jax.Array


def head_loss(
    name: str,
    normed_JBCD: jax.Array,
    head_DU: jax.Array,
    teacher_BCE: jax.Array,
    teacher_head_EU: jax.Array,
    weight_JBC: jax.Array,
    label_BC: jax.Array,
    chunk: int | None = None,
) -> tuple[jax.Array, RowResults]:
    """(sum of weight times loss, per-row results) with the logits of `chunk` entries of each row alive, forward and backward.

    Entry (b, c) has one teacher, `teacher[b, c] @ teacher_head` (frozen), and J drafts, `normed[s, b, c] @ head`.
    label: the teacher's argmax as a draft id, -1 when it is outside the draft vocabulary (never correct).
    chunk: None is 256 entries over all B rows (on a CPU 64: their logits are to stay in its caches). Chunks run along C: rows that lie
    on different devices stay there.
    """
    B, C = label_BC.shape
    chunk = min(max(1, (64 if platform() == "cpu" else 256) // B) if chunk is None else chunk, C)
    pad = -C % chunk
    total, results = _head_loss(  # pyright: ignore[reportGeneralTypeIssues]  # custom_vjp hides the type
        name,
        chunk,
        jnp.pad(normed_JBCD, ((0, 0), (0, 0), (0, pad), (0, 0))),
        head_DU,
        jnp.pad(teacher_BCE, ((0, 0), (0, pad), (0, 0))),
        teacher_head_EU,
        jnp.pad(weight_JBC, ((0, 0), (0, 0), (0, pad))),
        jnp.pad(label_BC, ((0, 0), (0, pad)), constant_values=-1),
    )
    return total, RowResults(results.loss[:, :, :C], results.correct[:, :, :C])


def _chunk_loss(
    name: str,
    normed_JBcD: jax.Array,
    head_DU: jax.Array,
    teacher_BcE: jax.Array,
    teacher_head_EU: jax.Array,
    weight_JBc: jax.Array,
    label_Bc: jax.Array,
) -> tuple[jax.Array, RowResults]:
    """One chunk: (weighted sum, RowResults of [J, B, c])."""
    draft = linear(normed_JBcD, head_DU, result=jnp.float32)
    teacher = jax.lax.stop_gradient(linear(teacher_BcE.astype(head_DU.dtype), teacher_head_EU.astype(head_DU.dtype), result=jnp.float32))
    loss = ROW_LOSSES[name](teacher[None], draft)
    # The label is the draft's first best when every entry stands below it: one pass, where an argmax takes several.
    ids = jax.lax.broadcasted_iota(jnp.int32, draft.shape, 3)
    still, label = jax.lax.stop_gradient(draft), label_Bc[None, :, :, None]
    own = jnp.take_along_axis(still, jnp.broadcast_to(jnp.maximum(label, 0), (*draft.shape[:3], 1)), axis=3)
    below = (still < own) | ((still == own) & (ids >= label))
    correct = (_sum(jnp.where(below, 0.0, 1.0)) == 0) & (label_Bc >= 0)[None]
    # A weight of zero must silence a row whatever its loss is.
    return jnp.sum(jnp.where(weight_JBc > 0, weight_JBc * loss, 0.0)), RowResults(jax.lax.stop_gradient(loss), correct)


def _cut(x: jax.Array, axis: int, chunk: int) -> jax.Array:
    """Axis C as (chunks, chunk), the chunks in front: what a scan walks over."""
    return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, chunk, *x.shape[axis + 1 :]), axis, 0)


def _join(x: jax.Array, axis: int) -> jax.Array:
    """The inverse of `_cut`."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _operands(chunk, normed, teacher, weight, label):
    return _cut(normed, 2, chunk), _cut(teacher, 1, chunk), _cut(weight, 2, chunk), _cut(label, 1, chunk)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _head_loss(name, chunk, normed, head, teacher, teacher_head, weight, label):
    def body(total, xs):
        n, t, w, y = xs
        part, results = _chunk_loss(name, n, head, t, teacher_head, w, y)
        return total + part, results

    total, results = jax.lax.scan(body, jnp.zeros((), jnp.float32), _operands(chunk, normed, teacher, weight, label))
    return total, RowResults(*(_join(x, 2) for x in results))


def _head_loss_forward(name, chunk, normed, head, teacher, teacher_head, weight, label):
    # The gradients are taken here, chunk by chunk while its logits are at hand: nothing is recomputed and no logits are kept.
    def body(carry, xs):
        total, d_head = carry
        n, t, w, y = xs
        grad = _fused if name == "cross_entropy" and fused_loss.is_native() else partial(_by_autodiff, name)
        (part, results), (d_n, d_h) = grad(n, head, t, teacher_head, w, y)
        return (total + part, d_head + d_h.astype(jnp.float32)), (results, d_n)

    carry = (jnp.zeros((), jnp.float32), jnp.zeros(head.shape, jnp.float32))
    (total, d_head), (results, d_n) = jax.lax.scan(body, carry, _operands(chunk, normed, teacher, weight, label))
    return (total, RowResults(*(_join(x, 2) for x in results))), (_join(d_n, 2), d_head.astype(head.dtype))


def _by_autodiff(name, normed, head, *others):
    """((weighted sum, RowResults), the gradients of normed and head) of one chunk."""
    loss = lambda normed, head: _chunk_loss(name, normed, head, *others)  # noqa: E731
    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(normed, head)


def _fused(normed, head, teacher, teacher_head, weight, label):
    """The same of the cross-entropy."""
    J, B, c, D = normed.shape
    U = head.shape[1]
    draft, back = jax.vjp(lambda normed, head: linear(normed, head, result=jnp.float32), normed, head)
    scores = linear(teacher.astype(head.dtype), teacher_head.astype(head.dtype), result=jnp.float32).reshape(B * c, U)
    silent = jnp.where(weight > 0, weight, 0.0)
    short = bfloat.is_native(normed, head)
    loss, correct, gradient = fused_loss.cross_entropy(
        draft.reshape(J, B * c, U), scores, silent.reshape(J, B * c), label.reshape(-1), normed.dtype if short else jnp.float32
    )
    loss, correct = loss.reshape(J, B, c), correct.reshape(J, B, c)
    if short:
        d_normed, d_head = bfloat.gradients(normed.reshape(-1, D), head, gradient.reshape(-1, U))
        d_normed = d_normed.reshape(normed.shape)
    else:
        d_normed, d_head = back(gradient.reshape(draft.shape))
    return (jnp.sum(jnp.where(weight > 0, weight * loss, 0.0)), RowResults(loss, correct)), (d_normed, d_head)


def _head_loss_backward(name, chunk, saved, cotangent):
    d_normed, d_head = saved
    scale = cotangent[0]
    return (d_normed * scale.astype(d_normed.dtype), d_head * scale.astype(d_head.dtype), None, None, None, None)


_head_loss.defvjp(_head_loss_forward, _head_loss_backward)
