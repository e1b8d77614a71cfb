"""Parameters: one definition each, filled by name, with every mismatch named."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from eagle3_jax import target as target_model
from eagle3_jax.attention import causal_mask
from eagle3_jax.config import DraftConfig, TargetConfig
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.params import VocabMap, count_parameters, fill, initialize, named_variables
from eagle3_jax.target import Target

CONFIG = TargetConfig(
    vocab_size=24,
    hidden_size=8,
    intermediate_size=16,
    num_layers=4,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    max_position=32,
    mlp_bias=True,
)


def zeros(module: nnx.Module) -> dict[str, np.ndarray]:
    return {name: np.zeros(v.get_value().shape, v.get_value().dtype) for name, v in named_variables(module)}


def test_fill_names_what_is_wrong():
    module = Target(CONFIG)
    values = zeros(module)
    filled = fill(module, values)
    assert filled.blocks[3].down[...].shape == (16, 8)
    assert isinstance(module.embed.get_value(), jax.ShapeDtypeStruct), "the abstract module itself stays abstract"
    missing = {name: value for name, value in values.items() if name != "blocks.2.qkv"}
    with pytest.raises(ValueError, match=r"missing \['blocks\.2\.qkv'\]"):
        fill(module, missing)
    with pytest.raises(ValueError, match=r"unexpected \['blocks\.9\.qkv'\]"):
        fill(module, {**values, "blocks.9.qkv": np.zeros(1)})
    with pytest.raises(ValueError, match=r"norm: shape \(9,\), expected \(8,\)"):
        fill(module, {**values, "norm": np.zeros(9)})


def test_initialize_follows_the_definitions():
    config = DraftConfig.for_target(CONFIG, draft_vocab_size=12, hidden_size=256, target_hidden_size=256, intermediate_size=512)
    make = jax.jit(lambda key: initialize(Eagle3Draft(config), key))
    draft = make(jax.random.key(0))
    for name, variable in named_variables(draft):
        value = np.asarray(variable[...])
        if isinstance(variable, VocabMap):
            assert value.dtype == np.int32
        elif variable.get_metadata()["init"] == "ones":
            np.testing.assert_array_equal(value, 1)
        else:
            assert np.std(value) == pytest.approx(value.shape[0] ** -0.5, rel=0.1), name
    assert not np.array_equal(draft.gate[...], draft.up[...])
    np.testing.assert_array_equal(make(jax.random.key(0)).q[...], draft.q[...])
    assert not np.array_equal(make(jax.random.key(1)).q[...], draft.q[...])


def test_the_vocabulary_map_is_not_counted_or_trained():
    config = DraftConfig.for_target(CONFIG, draft_vocab_size=12)
    names = {name for name, variable in named_variables(Eagle3Draft(config)) if isinstance(variable, nnx.Param)}
    assert "d2t" not in names
    D, F, A, U = 8, 16, 24, 12
    by_hand = A * D + 4 * D + 2 * D * (8 + 4 + 4) + 8 * D + 3 * D * F + D * U
    assert count_parameters(Eagle3Draft(config)) == by_hand


def test_a_tap_is_what_enters_its_block():
    """Block k adds 10^k to the residual stream and nothing else, so a feature spells out which blocks lie before it."""
    values = zeros(Target(CONFIG))
    for k in range(4):
        values[f"blocks.{k}.down_bias"] += 10.0**k
    target = fill(Target(CONFIG), {name: jnp.asarray(value) for name, value in values.items()})
    tokens = jnp.zeros((1, 2), jnp.int32)
    forward = jax.jit(target_model.forward, static_argnames="taps")
    out = forward(target, tokens, jnp.asarray([[0, 1]], jnp.int32), causal_mask(2), taps=(0, 1, 3))
    np.testing.assert_allclose(np.asarray(out.features[0, 1]).reshape(3, 8)[:, 0], [0, 1, 111])
    reordered = forward(target, tokens, jnp.asarray([[0, 1]], jnp.int32), causal_mask(2), taps=(3, 2))
    np.testing.assert_allclose(np.asarray(reordered.features[0, 0]).reshape(2, 8)[:, 0], [111, 11])
