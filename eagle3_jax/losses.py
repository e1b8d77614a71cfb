"""Losses between the target's distribution and the draft's over the draft vocabulary, by name, and their evaluation in chunks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from eagle3_jax.layers import linear


def cross_entropy(teacher: jax.Array, draft: jax.Array) -> jax.Array:
    """Soft cross-entropy -sum_u p log q per row, p = softmax(teacher) and q = softmax(draft); float32 logits [..., U] that broadcast."""
    return -jnp.sum(jax.nn.softmax(teacher, axis=-1) * jax.nn.log_softmax(draft, axis=-1), axis=-1)


def kl(teacher: jax.Array, draft: jax.Array) -> jax.Array:
    """KL(p || q) per row: the cross-entropy less the teacher's entropy; the same gradient."""
    log_p = jax.nn.log_softmax(teacher, axis=-1)
    return jnp.sum(jnp.exp(log_p) * (log_p - jax.nn.log_softmax(draft, axis=-1)), axis=-1)


ROW_LOSSES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {"cross_entropy": cross_entropy, "kl": kl}


class RowResults(NamedTuple):
    """Per row and step, float32 [J, R] losses (not weighted) and bool [J, R]: the draft's argmax is the teacher's. No gradient."""

    loss: jax.Array
    correct: jax.Array


def head_loss(
    name: str,
    normed_JRD: jax.Array,
    head_DU: jax.Array,
    teacher_RE: jax.Array,
    teacher_head_EU: jax.Array,
    weight_JR: jax.Array,
    label_R: jax.Array,
    chunk: int = 256,
) -> tuple[jax.Array, RowResults]:
    """(sum of weight times loss, per-row results) with at most `chunk` rows of logits alive, forward and backward.

    Row r has one teacher, `teacher[r] @ teacher_head` (frozen), and J drafts, `normed[s, r] @ head`.
    label: the teacher's argmax as a draft id, -1 when it is outside the draft vocabulary (never correct).
    """
    R = label_R.shape[0]
    chunk = min(chunk, R)
    pad = -R % chunk
    total, results = _head_loss(  # pyright: ignore[reportGeneralTypeIssues]  # custom_vjp hides the type
        name,
        chunk,
        jnp.pad(normed_JRD, ((0, 0), (0, pad), (0, 0))),
        head_DU,
        jnp.pad(teacher_RE, ((0, pad), (0, 0))),
        teacher_head_EU,
        jnp.pad(weight_JR, ((0, 0), (0, pad))),
        jnp.pad(label_R, (0, pad), constant_values=-1),
    )
    return total, RowResults(results.loss[:, :R], results.correct[:, :R])


def _chunk_loss(
    name: str,
    normed_JrD: jax.Array,
    head_DU: jax.Array,
    teacher_rE: jax.Array,
    teacher_head_EU: jax.Array,
    weight_Jr: jax.Array,
    label_r: jax.Array,
) -> tuple[jax.Array, RowResults]:
    """One chunk: (weighted sum, RowResults of [J, r])."""
    J, r, D = normed_JrD.shape
    draft = linear(normed_JrD.reshape(J * r, D), head_DU).astype(jnp.float32).reshape(J, r, -1)
    teacher = jax.lax.stop_gradient(linear(teacher_rE.astype(head_DU.dtype), teacher_head_EU).astype(jnp.float32))
    loss = ROW_LOSSES[name](teacher[None], draft)
    ids = jax.lax.broadcasted_iota(jnp.int32, draft.shape, 2)
    still = jax.lax.stop_gradient(draft)
    best = jnp.min(jnp.where(still == jnp.max(still, axis=-1, keepdims=True), ids, draft.shape[-1]), axis=-1)
    correct = (best == label_r[None]) & (label_r >= 0)[None]
    # A weight of zero must silence a row whatever its loss is.
    return jnp.sum(jnp.where(weight_Jr > 0, weight_Jr * loss, 0.0)), RowResults(jax.lax.stop_gradient(loss), correct)


def _rows_first(x_JR: jax.Array, chunk: int) -> jax.Array:
    """[J, R, ...] -> [R / chunk, J, chunk, ...]."""
    J, R = x_JR.shape[:2]
    return jnp.moveaxis(x_JR.reshape(J, R // chunk, chunk, *x_JR.shape[2:]), 1, 0)


def _steps_first(x: jax.Array) -> jax.Array:
    """The inverse of `_rows_first`."""
    chunks, J, r = x.shape[:3]
    return jnp.moveaxis(x, 0, 1).reshape(J, chunks * r, *x.shape[3:])


def _operands(chunk, normed, teacher, weight, label):
    R = label.shape[0]
    return (
        _rows_first(normed, chunk),
        teacher.reshape(R // chunk, chunk, -1),
        _rows_first(weight, chunk),
        label.reshape(R // chunk, chunk),
    )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _head_loss(name, chunk, normed, head, teacher, teacher_head, weight, label):
    def body(total, xs):
        n, t, w, y = xs
        part, results = _chunk_loss(name, n, head, t, teacher_head, w, y)
        return total + part, results

    total, results = jax.lax.scan(body, jnp.zeros((), jnp.float32), _operands(chunk, normed, teacher, weight, label))
    return total, RowResults(*map(_steps_first, results))


def _head_loss_forward(name, chunk, normed, head, teacher, teacher_head, weight, label):
    # The gradients are taken here, chunk by chunk while its logits are at hand: nothing is recomputed and no logits are kept.
    def body(carry, xs):
        total, d_head = carry
        n, t, w, y = xs
        grad = jax.value_and_grad(lambda n, h: _chunk_loss(name, n, h, t, teacher_head, w, y), argnums=(0, 1), has_aux=True)
        (part, results), (d_n, d_h) = grad(n, head)
        return (total + part, d_head + d_h.astype(jnp.float32)), (results, d_n)

    carry = (jnp.zeros((), jnp.float32), jnp.zeros(head.shape, jnp.float32))
    (total, d_head), (results, d_n) = jax.lax.scan(body, carry, _operands(chunk, normed, teacher, weight, label))
    return (total, RowResults(*map(_steps_first, results))), (_steps_first(d_n), d_head.astype(head.dtype))


def _head_loss_backward(name, chunk, saved, cotangent):
    d_normed, d_head = saved
    scale = cotangent[0]
    return (d_normed * scale.astype(d_normed.dtype), d_head * scale.astype(d_head.dtype), None, None, None, None)


_head_loss.defvjp(_head_loss_forward, _head_loss_backward)
