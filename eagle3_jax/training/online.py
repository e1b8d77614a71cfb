"""What the frozen target knows about a packed batch, computed within the training program instead of beforehand."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from eagle3_jax import target as target_model
from eagle3_jax.sharding import constrain
from eagle3_jax.target import Target
from eagle3_jax.training.ttt import Batch


def observe(target: Target, taps: tuple[int, ...], batch: Batch, attention: str = "xla", chunk: int = 128) -> Batch:
    """The batch with features [B, T, A], hidden [B, T, D] (the target's dtype) and argmax int32 [B, T] filled in.

    Segments gate the target's attention as they gate the draft's. The argmax over the full vocabulary is taken where a scored slot asks
    for it, -1 elsewhere, with the logits of `chunk` tokens of each row alive at a time.
    """
    B, T = batch.tokens.shape
    sight = jnp.where(batch.valid, batch.segments, -1)
    prompts = _prompts(batch) if target.config.rope.kind == "dynamic" else None
    out = target_model.forward(
        target, batch.tokens, batch.positions, None, taps=taps, segments_BT=sight, attention=attention, prompt_B=prompts
    )
    # The teacher of the token predicted from slot i stands at i + 1; behind the row's end there is none.
    at_BC = jnp.where((batch.slots >= 0) & (batch.slots + 1 < T), batch.slots + 1, T)
    C = at_BC.shape[1]
    chunk = min(chunk, C)
    padded_BC = jnp.pad(at_BC, ((0, 0), (0, -C % chunk)), constant_values=T)

    # On a mesh the loop is to find the head whole but for its vocabulary, not to gather it in every round.
    head = constrain(target_model.output_head(target), None, "vocab")
    if not jax.sharding.get_abstract_mesh().empty:
        head = jax.lax.optimization_barrier(head)  # or XLA for TPU7x moves the gathering back into the loop

    def best(at_Bc: jax.Array) -> jax.Array:
        rows = jnp.take_along_axis(out.hidden, jnp.minimum(at_Bc, T - 1)[:, :, None], axis=1)
        return target_model.best_token(target, rows, head)

    chosen = jax.lax.map(best, padded_BC.reshape(B, -1, chunk).transpose(1, 0, 2)).transpose(1, 0, 2).reshape(B, -1)
    row = jnp.broadcast_to(jnp.arange(B, dtype=jnp.int32)[:, None], padded_BC.shape)
    argmax = jnp.full((B, T), -1, jnp.int32).at[row, padded_BC].set(chosen, mode="drop")
    return dataclasses.replace(batch, features=out.features, hidden=out.hidden, argmax=argmax)


def _prompts(batch: Batch) -> jax.Array:
    """int32 [B, T]: how many tokens stand before the first response of each token's segment, 0 where it has none."""
    B, T = batch.tokens.shape
    row = jnp.arange(B, dtype=jnp.int32)[:, None]
    place = jnp.where(batch.response > 0, batch.positions, T)
    first = jnp.full((B, T + 1), T, jnp.int32).at[row, batch.segments].min(place)[row, batch.segments]
    return jnp.where(first < T, first, 0)
