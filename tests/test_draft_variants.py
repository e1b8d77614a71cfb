"""The variants of the head, decoded and unrolled in training, against a plain numpy account of what vLLM computes."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_ttt import A, V, make, unroll
from training_set import KEPT, TAPS, TARGET

from eagle3_jax import draft as draft_model
from eagle3_jax.config import DraftConfig
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.layout import laid_out
from eagle3_jax.params import fill, named_variables
from eagle3_jax.quantize import quantize_int8
from eagle3_jax.training.trainer import split
from eagle3_jax.training.ttt import Batch, recipe

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "residual": {"norm_before_residual": True},
    "norms before fc": {"norm_before_fc": True, "fc_norm": True},
    "output": {"norm_output": True, "fc_norm": True},
    "all, narrower": {
        **dict.fromkeys(("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "own_embedding"), True),
        "hidden_size": 8,
    },
}
T = 6


def head(**changes: Any) -> Eagle3Draft:
    """Random weights, norms included: a norm of ones would hide where it is applied."""
    draft, random = Eagle3Draft(DraftConfig.for_target(TARGET, len(KEPT), TAPS, **changes)), np.random.default_rng(7)
    shapes = {name: variable.get_value().shape for name, variable in named_variables(draft)}
    values = {name: random.normal(size=shape).astype(np.float32) / np.sqrt(shape[0]) for name, shape in shapes.items()}
    values |= {name: 1.0 + 0.5 * random.normal(size=shape).astype(np.float32) for name, shape in shapes.items() if "norm" in name}
    return fill(draft, {name: jnp.asarray(value) for name, value in values.items()} | {"d2t": jnp.asarray(KEPT)})


class Account:
    """One head in numpy: the pairs seen so far, and what the next one gives."""

    def __init__(self, draft: Eagle3Draft, embed: np.ndarray):
        self.c, self.keys, self.values = draft.config, [], []
        self.w = {name: np.asarray(variable.get_value(), np.float64) for name, variable in named_variables(draft)}
        self.embed = self.w.get("embed", embed)

    def norm(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x**2) + self.c.rms_norm_eps) * weight

    def fuse(self, x: np.ndarray) -> np.ndarray:
        if self.c.norm_before_fc:
            x = self.norm(x, self.w["fused_norm"])
        if self.c.fc_norm:
            x = np.concatenate([self.norm(part, weight) for part, weight in zip(np.split(x, 3), self.w["fc_norm"], strict=True)])
        return x @ self.w["fc"]

    def rotate(self, x: np.ndarray, position: int) -> np.ndarray:
        half = self.c.head_dim // 2
        angle = position / 10000.0 ** (np.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1)

    def step(self, token: int, x: np.ndarray, position: int) -> tuple[np.ndarray, np.ndarray]:
        """(what is fed back, logits) of one more pair."""
        c, w = self.c, self.w
        embedded, hidden = self.norm(self.embed[token], w["input_norm"]), self.norm(x, w["hidden_norm"])
        u = np.concatenate([embedded, hidden])
        q = self.rotate((u @ w["q"]).reshape(c.num_heads, c.head_dim), position)
        self.keys.append(self.rotate((u @ w["k"]).reshape(c.num_kv_heads, c.head_dim), position))
        self.values.append((u @ w["v"]).reshape(c.num_kv_heads, c.head_dim))
        group, parts = c.num_heads // c.num_kv_heads, []
        for n in range(c.num_heads):
            scores = np.array([key[n // group] for key in self.keys]) @ q[n] / np.sqrt(c.head_dim)
            weight = np.exp(scores - scores.max())
            parts.append(weight / weight.sum() @ np.array([value[n // group] for value in self.values]))
        x = (hidden if c.norm_before_residual else x) + np.concatenate(parts) @ w["o"]
        v = self.norm(x, w["mlp_norm"])
        gate = v @ w["gate"]
        a = x + (gate / (1 + np.exp(-gate)) * (v @ w["up"])) @ w["down"]
        normed = self.norm(a, w["norm"])
        return (normed if c.norm_output else a), normed @ w["head"]


@jax.jit
def decode(draft: Eagle3Draft, embed: jax.Array, features: jax.Array, tokens: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    """(a, logits) after T - 1 real pairs, and after each of two drafted steps that read the next tokens."""
    count = jnp.full((1,), T - 1, jnp.int32)
    cache, logits, a = draft.extend(embed, draft.new_cache(1, 16), features[:, : T - 1], tokens[:, 1:T], count)
    out, carry, kv = [(a, logits)], a[:, None], None
    for step in range(1, 3):
        mask = jnp.ones((1, 1, step), bool)
        raw, carry, kv = draft.expand(embed, cache, tokens[:, T - 1 + step : T + step], carry, mask, kv)
        out.append((carry[:, 0], raw[:, 0]))
    return out


@pytest.mark.parametrize("variant", VARIANTS)
def test_decoding_and_training_compute_the_variant(variant: str) -> None:
    draft, batch = head(**VARIANTS[variant]), make([[0, 1, 1, 1, 1, 1, 1, 1, 1]], count=1)
    embed = np.random.default_rng(8).normal(size=(V, TARGET.hidden_size)).astype(np.float32)
    assert batch.features.shape[-1] == A
    tokens = np.asarray(batch.tokens)
    account, wanted = Account(draft, embed.astype(np.float64)), []
    for i in range(T - 1):
        wanted = [account.step(int(tokens[0, i + 1]), account.fuse(np.asarray(batch.features[0, i], np.float64)), i)]
    for step in range(1, 3):
        wanted.append(account.step(int(tokens[0, T - 1 + step]), wanted[-1][0], T - 2 + step))
    decoded = decode(draft, jnp.asarray(embed), jnp.asarray(batch.features), jnp.asarray(tokens))
    states = jax.jit(partial(_steps, pick=lambda x: x))(draft, jnp.asarray(embed), jax.tree.map(jnp.asarray, batch))
    for step, (a, logits) in enumerate(wanted):
        np.testing.assert_allclose(decoded[step][0][0], a, rtol=1e-4, atol=1e-5, err_msg=f"decoding, step {step}")
        np.testing.assert_allclose(decoded[step][1][0], logits, rtol=1e-4, atol=1e-5, err_msg=f"decoding, step {step}")
        np.testing.assert_allclose(states[step, 0, T - 2], a, rtol=1e-4, atol=1e-5, err_msg=f"training, step {step}")
        trained = draft_model.logits(draft, states[step, 0, T - 2])
        np.testing.assert_allclose(trained, logits, rtol=1e-4, atol=1e-5, err_msg=f"training, step {step}")


def _steps(draft: Eagle3Draft, embed: jax.Array, batch: Batch, pick: Any) -> jax.Array:
    return unroll(draft, draft_model.table(draft, embed), batch, 3, pick)


@pytest.mark.parametrize("variant", ["plain", "all, narrower"])
def test_unrolling_reads_a_head_as_it_lies(variant: str) -> None:
    """In whatever layout it was loaded, in int8 too: whoever looks at training's states need not load the head anew."""
    batch = jax.tree.map(jnp.asarray, make([[0, 1, 1, 1, 1, 1, 1, 1, 1]], count=1))
    embed = jnp.asarray(np.random.default_rng(8).normal(size=(V, TARGET.hidden_size)), jnp.float32)
    states = jax.jit(partial(_steps, pick=lambda x: x))
    for given in (head(**VARIANTS[variant]), quantize_int8(head(**VARIANTS[variant]))):
        for layout in ("plain", "auto"):
            np.testing.assert_allclose(states(laid_out(given, layout), embed, batch), states(given, embed, batch), rtol=1e-4, atol=1e-5)


def test_an_embedding_of_its_own_is_never_trained() -> None:
    trained, fixed = split(head(**VARIANTS["all, narrower"]), recipe("aligned"))
    assert {"embed", "d2t"} == fixed.keys()
    assert {"fused_norm", "fc_norm"} <= trained.keys()
