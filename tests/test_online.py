"""The target within the training step against features computed beforehand."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_set import TAPS, TARGET, conversations, selection, tiny_draft, tiny_frozen, tiny_target

from eagle3_jax import target as target_model
from eagle3_jax.params import initialize
from eagle3_jax.target import Target
from eagle3_jax.training import online
from eagle3_jax.training.batches import BatchSource, Cursor, TokenExamples
from eagle3_jax.training.features import CachedExample
from eagle3_jax.training.online import observe
from eagle3_jax.training.trainer import Fixed, TrainConfig, new_state, split, train_step
from eagle3_jax.training.ttt import Batch, recipe

CONFIG = TrainConfig(recipe=recipe("aligned", steps=3), steps=10, rows=2, row_tokens=48, row_slots=40, warmup=2, peak_lr=1e-2)


@partial(jax.jit, static_argnums=1)
def forward(target, taps, tokens):
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    out = target_model.forward(target, tokens, positions, None, taps=taps)
    return out.hidden[0], out.features[0], target_model.best_token(target, out.hidden[0])


class Known:
    """The examples with float32 features, each computed alone."""

    def __init__(self, target):
        self.examples = []
        for ids, response in selection().examples:
            padded = np.zeros((1, 32), np.int32)
            padded[0, : len(ids)] = ids
            hidden, features, argmax = (np.asarray(x)[: len(ids)] for x in forward(target, TAPS, padded))
            self.examples.append(CachedExample(ids, response, argmax, features, hidden))

    def __len__(self):
        return len(self.examples)

    total = property(__len__)

    def __getitem__(self, index):
        return self.examples[index]


def source(examples) -> BatchSource:
    return BatchSource(lambda: examples, CONFIG.recipe, seed=0, rows=CONFIG.rows, width=CONFIG.row_tokens, slots=CONFIG.row_slots)


def test_prompt_lengths_of_a_packed_row() -> None:
    """What `dynamic` rotary embedding asks for: a document of 2 + 2 tokens and another turn, one without a response, padding."""
    segments, response = [[1, 1, 1, 1, 1, 1, 2, 2, 0, 0]], [[0, 0, 1, 1, 0, 2, 0, 0, 0, 0]]
    positions = [[0, 1, 2, 3, 4, 5, 0, 1, 0, 0]]
    arrays = {"segments": segments, "response": response, "positions": positions, "tokens": segments}
    shared = {name: jnp.asarray(value, jnp.int32) for name, value in arrays.items()}
    batch = Batch(features=None, hidden=None, argmax=None, valid=shared["segments"] > 0, slots=shared["segments"], **shared)
    assert online._prompts(batch).tolist() == [[2, 2, 2, 2, 2, 2, 0, 0, 0, 0]]


@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_online_equals_offline(accumulate: int) -> None:
    """Ten updates from token ids alone and from cached float32 features, packed rows and all."""
    target = tiny_target()
    within = dataclasses.replace(CONFIG, online=True, accumulate=accumulate)
    offline = dataclasses.replace(CONFIG, accumulate=accumulate)
    results = []
    for config, examples, inside in ((offline, Known(target), None), (within, TokenExamples(selection()), target)):
        params, variables = split(tiny_draft(), config.recipe)
        state, fixed = new_state(params, config), Fixed(tiny_frozen(target), variables, inside)
        batches = source(examples)
        stream, losses = batches.plan(Cursor()), []
        for _ in range(10):
            parts = [batches.build(next(stream)[0]) for _ in range(accumulate)]
            state, metrics = train_step(tiny_draft().config, config, state, fixed, jax.tree.map(lambda *x: np.stack(x), *parts))
            losses.append((float(metrics.total), *map(int, metrics.per_step.correct)))
        results.append((losses, jax.device_get(state.params)))
    (losses, params), (other_losses, other_params) = results
    assert sum(correct for _, *steps in losses for correct in steps) > 0
    np.testing.assert_allclose(losses, other_losses, rtol=1e-5)
    for name, value in params.items():
        np.testing.assert_allclose(other_params[name], value, rtol=1e-4, atol=2e-5, err_msg=name)


def test_observed_argmax_is_known_exactly_where_a_slot_asks() -> None:
    target, known = tiny_target(), Known(tiny_target())
    batch = source(TokenExamples(selection())).build([[0, 3], [5]])
    seen = observe(target, TAPS, batch, chunk=7)
    want = source(known).build([[0, 3], [5]])
    asked = np.zeros(batch.tokens.shape, bool)
    for b, slots in enumerate(batch.slots):
        asked[b, slots[slots >= 0] + 1] = True
    np.testing.assert_array_equal(np.asarray(seen.argmax), np.where(asked, want.argmax, -1))
    np.testing.assert_allclose(np.asarray(seen.hidden)[batch.valid], want.hidden[batch.valid], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_argmax_by_parts_of_the_vocabulary(tied: bool) -> None:
    """Of a vocabulary that no number of parts divides: small whole numbers, so that there are ties, within a part and across two."""
    config = dataclasses.replace(TARGET, vocab_size=2 * target_model.PART + 100, tie_embeddings=tied, num_layers=1)
    target = initialize(Target(config), jax.random.key(0))
    rng = np.random.default_rng(0)
    table, hidden = (rng.integers(-1, 2, (rows, config.hidden_size)).astype(np.float32) for rows in (config.vocab_size, 40))
    table[-1], table[[5, 9]] = hidden[0], hidden[1]
    (target.embed if tied else target.head).set_value(jnp.asarray(table if tied else table.T))
    scores = hidden @ table.T
    assert np.sum((scores == scores.max(-1, keepdims=True)).sum(-1) > 1) > 5
    assert np.argmax(scores[:2], -1).tolist() == [config.vocab_size - 1, 5]
    best = jax.jit(target_model.best_token)(target, jnp.asarray(hidden.reshape(8, 5, -1)))
    np.testing.assert_array_equal(np.asarray(best).reshape(-1), np.argmax(scores, -1))


def test_a_batch_without_features_needs_the_target() -> None:
    params, variables = split(tiny_draft(), CONFIG.recipe)
    batch = source(TokenExamples(selection(conversations(4)))).build([[0], [1]])
    fixed = Fixed(tiny_frozen(tiny_target()), variables)
    with pytest.raises(ValueError, match="holds no features"):
        train_step(tiny_draft().config, CONFIG, new_state(params, CONFIG), fixed, jax.tree.map(lambda x: x[None], batch))
