"""Which drafted tokens stand: a walk from the root of each row's tree, one decision per visited node.

The distribution is evaluated only at the nodes the walk visits. Three rules, all leaving the target's law untouched:

- "coupled" (the default): draw ONE token x of p with the noise of its position; go to the child that equals x, else emit x and
  stop. The text equals plain sampling with the same seed, token for token, whatever was drafted.
- "siblings": the official code's rule for deterministic candidates (`eagle/model/utils.py`, `evaluate_posterior`): children in
  order, accept x with probability p(x), else zero p(x), renormalise, next child; sample from what is left.
- "rejection": the paper's rule (section 2.1) for chains SAMPLED from q: accept with min(1, p/q), else sample norm(max(0, p - q)).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from eagle3_jax.sampling import Sampling, argmax, choose, log_distribution
from eagle3_jax.tree import DraftTree

Rule = Literal["coupled", "siblings", "rejection"]
RULES: tuple[Rule, ...] = ("coupled", "siblings", "rejection")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Walk:
    """path: int32 [B, C], visited nodes (padded with the last one); tokens: int32 [B, C], the token emitted at each;
    count: int32 [B], visited nodes = emitted tokens; bad: int32 [B], the first step whose logits were not finite, else -1.
    """

    path: jax.Array
    tokens: jax.Array
    count: jax.Array
    bad: jax.Array


Decide = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
"""(step, node [B], logits [B, V]) -> (token [B], child node [B] or -1 when the walk ends)."""


def walk(tree: DraftTree, logits_BMV: jax.Array, decide: Decide, steps: int) -> Walk:
    """At most `steps` = depth + 1 decisions per row, as many as the longest row needs."""
    B = tree.tokens.shape[0]
    shape = (B, steps)

    def running(state: tuple) -> jax.Array:
        step, _, alive, _ = state
        return (step < steps) & jnp.any(alive)

    def body(state: tuple) -> tuple:
        step, node, alive, so_far = state
        row = jnp.take_along_axis(logits_BMV, node[:, None, None], axis=1)[:, 0]
        finite = jnp.isfinite(jnp.max(row, axis=-1))
        token, child = decide(step, node, row)
        here = (jnp.arange(steps, dtype=jnp.int32) == step)[None, :] & alive[:, None]
        later = (jnp.arange(steps, dtype=jnp.int32) >= step)[None, :] & alive[:, None]
        so_far = Walk(
            path=jnp.where(later, node[:, None], so_far.path),
            tokens=jnp.where(here, token[:, None], so_far.tokens),
            count=so_far.count + alive.astype(jnp.int32),
            bad=jnp.where(alive & ~finite & (so_far.bad < 0), step, so_far.bad),
        )
        alive = alive & (child >= 0) & finite
        return step + 1, jnp.where(alive, child, node), alive, so_far

    empty = Walk(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.int32), jnp.zeros((B,), jnp.int32), jnp.full((B,), -1, jnp.int32))
    start = (jnp.int32(0), jnp.zeros((B,), jnp.int32), jnp.ones((B,), bool), empty)
    if steps == 1:
        return body(start)[3]
    return jax.lax.while_loop(running, body, start)[3]


def coupled(tree: DraftTree, sampling: Sampling, noise_BCV: jax.Array | None) -> Decide:
    """Sample with the position's noise, then look the token up among the children."""

    def decide(step: jax.Array, node: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        token = choose(row, None if noise_BCV is None else _at_step(noise_BCV, step), sampling)
        return token, _first(_children(tree, node) & (tree.tokens == token[:, None]))

    return decide


def siblings(tree: DraftTree, sampling: Sampling, noise_BCV: jax.Array, uniforms_BCW: jax.Array) -> Decide:
    """Children in order against one uniform each; the noise of the position draws from what is left."""

    def decide(step: jax.Array, node: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        children = _children(tree, node)
        rank = jnp.cumsum(children, axis=-1, dtype=jnp.int32) - 1
        uniforms = _at_step(uniforms_BCW, step)
        probs = jnp.exp(log_distribution(row, sampling))
        accepted = jnp.full(node.shape, -1, jnp.int32)
        for r in range(uniforms.shape[-1]):
            child = _first(children & (rank == r))
            token = jnp.take_along_axis(tree.tokens, jnp.maximum(child, 0)[:, None], axis=1)[:, 0]
            tested = (child >= 0) & (accepted < 0)
            stands, left = accept_one(probs, token, uniforms[:, r])
            accepted = jnp.where(tested & stands, child, accepted)
            probs = jnp.where((tested & ~stands)[:, None], left, probs)
        drawn = argmax(jnp.log(probs) + _at_step(noise_BCV, step))
        kept = jnp.take_along_axis(tree.tokens, jnp.maximum(accepted, 0)[:, None], axis=1)[:, 0]
        return jnp.where(accepted >= 0, kept, drawn), accepted

    return decide


def accept_one(probs_BV: jax.Array, token_B: jax.Array, uniform_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(accepted [B], the distribution after a refusal [B, V]): p(token) zeroed and renormalised. Refusing needs mass elsewhere."""
    chosen = jax.lax.broadcasted_iota(jnp.int32, probs_BV.shape, 1) == token_B[:, None]
    left = jnp.where(chosen, 0.0, probs_BV)
    total = jnp.sum(left, axis=-1, keepdims=True)
    accepted = (uniform_B < jnp.sum(jnp.where(chosen, probs_BV, 0.0), axis=-1)) | (total[:, 0] <= 0)
    return accepted, left / jnp.where(total > 0, total, 1.0)


def rejection(tree: DraftTree, sampling: Sampling, noise_BCV: jax.Array, uniforms_BC: jax.Array, drafted_BCV: jax.Array) -> Decide:
    """min(1, p/q) for the one drafted child; `drafted` [B, depth, V] holds q at every level (rows beyond are never read)."""

    def decide(step: jax.Array, node: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        child = _first(_children(tree, node))
        token = jnp.take_along_axis(tree.tokens, jnp.maximum(child, 0)[:, None], axis=1)
        p = jnp.exp(log_distribution(row, sampling))
        q = _at_step(drafted_BCV, jnp.minimum(step, drafted_BCV.shape[1] - 1))
        p_token = jnp.take_along_axis(p, token, axis=1)[:, 0]
        q_token = jnp.take_along_axis(q, token, axis=1)[:, 0]
        stands = (child >= 0) & (_at_step(uniforms_BC, step) * q_token < p_token)
        residual = jnp.maximum(p - q, 0.0)
        # A leaf draws from p itself; a refusal from the residual, which has mass unless rounding left p == q everywhere.
        usable = (child >= 0) & (jnp.sum(residual, axis=-1) > 0)
        drawn = argmax(jnp.log(jnp.where(usable[:, None], residual, p)) + _at_step(noise_BCV, step))
        return jnp.where(stands, token[:, 0], drawn), jnp.where(stands, child, -1)

    return decide


def _children(tree: DraftTree, node_B: jax.Array) -> jax.Array:
    """bool [B, M]: the root is nobody's child, though its parent entry points at itself."""
    ids = jnp.arange(tree.parents.shape[1], dtype=jnp.int32)
    return (tree.parents == node_B[:, None]) & (ids > 0)[None, :]


def _first(mask_BM: jax.Array) -> jax.Array:
    """int32 [B]: the first True, or -1."""
    M = mask_BM.shape[1]
    ids = jnp.arange(M, dtype=jnp.int32)[None, :]
    first = jnp.min(jnp.where(mask_BM, ids, M), axis=-1)
    return jnp.where(first < M, first, -1)


def _at_step(x: jax.Array, step: jax.Array) -> jax.Array:
    """x[:, step]."""
    return jax.lax.dynamic_index_in_dim(x, step, axis=1, keepdims=False)
