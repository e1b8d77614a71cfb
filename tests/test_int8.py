"""Int8 weights: the rounding, products and rows against numpy, decoding that is plain decoding of the same int8 target, and memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import tiny_draft, tiny_target

import eagle3_jax as e3
from eagle3_jax import int8
from eagle3_jax import target as target_model
from eagle3_jax.attention import causal_mask
from eagle3_jax.decoding.generate import generate
from eagle3_jax.int8 import Int8, to_int8
from eagle3_jax.layers import linear
from eagle3_jax.lm_draft import LanguageModelDraft
from eagle3_jax.params import fill, named_variables
from eagle3_jax.quantize import quantize_int8, weight_bytes
from eagle3_jax.sharding import make_mesh, place
from eagle3_jax.tree import Chain, Tree
from eagle3_jax.weights import WeightsError
from eagle3_jax.weights.heads import save_head

PROMPTS = [[5, 9, 2, 31, 17, 40, 8], [11], [7, 7, 7]]
MIXED = {"max_new_tokens": 17, "temperature": [0.0, 0.9, 0.9], "top_p": [1.0, 1.0, 0.8], "seed": 4, "eos_token_ids": []}


def floats(weight: Int8) -> np.ndarray:
    return np.asarray(weight.values, np.float64) * np.asarray(weight.scale, np.float64)


def test_rounding():
    w = np.random.default_rng(0).standard_normal((24, 3, 5)).astype(np.float32)
    w[:, 1, 2] = 0
    got = to_int8(jnp.asarray(w))
    assert got.values.dtype == jnp.int8
    assert got.scale.shape == (1, 3, 5)
    largest = np.abs(w).max(0)
    assert np.all(np.abs(floats(got) - w) <= largest / 127 / 2 * 1.0001)
    peaks = np.abs(np.asarray(got.values)).max(0)
    assert np.all((peaks == 127) == (largest > 0))
    assert np.all(floats(got)[:, 1, 2] == 0)
    # Its own values come back exactly.
    again = to_int8(jnp.asarray(floats(got).astype(np.float32)))
    assert np.array_equal(again.values, got.values)


@pytest.mark.parametrize("block", [300, 480, int8.BLOCK])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_products_and_rows(dtype, block, monkeypatch):
    """Also in blocks of a few inputs or rows, which leave a rest or none."""
    monkeypatch.setattr(int8, "BLOCK", block)
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((2, 4, 23)), dtype)
    w = to_int8(jnp.asarray(rng.standard_normal((23, 3, 5)), dtype))
    want = np.tensordot(np.asarray(x, np.float64), floats(w), axes=1)
    got = linear(x, w)
    assert got.dtype == dtype
    np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=1e-5 if dtype == jnp.float32 else 0.1)
    table = to_int8(jnp.asarray(rng.standard_normal((11, 23)), dtype), input_axis=1)
    rows = table[jnp.asarray([[3, 0], [8, 3]])]
    assert rows.dtype == dtype
    np.testing.assert_allclose(np.asarray(rows, np.float64), floats(table)[[[3, 0], [8, 3]]], rtol=1e-2)
    np.testing.assert_allclose(
        np.asarray(linear(x, table.T), np.float64), np.asarray(x, np.float64) @ floats(table).T, atol=1e-5 if dtype == jnp.float32 else 0.3
    )


@pytest.mark.parametrize("tied", [False, True])
def test_target_is_the_float_target_of_its_weights(tied):
    target = tiny_target(num_layers=1, tie_embeddings=tied, mlp_bias=True)
    small = quantize_int8(target)
    kinds = {name: isinstance(v.get_value(), Int8) for name, v in named_variables(small)}
    matrices = {"embed", "blocks.0.qkv", "blocks.0.o", "blocks.0.gate_up", "blocks.0.down"} | (set() if tied else {"head"})
    assert {name for name, rounded in kinds.items() if rounded} == matrices
    assert small.dtype == jnp.float32
    exact = {n: jnp.asarray(floats(v.get_value()), jnp.float32) if kinds[n] else v.get_value() for n, v in named_variables(small)}
    tokens = jnp.asarray([PROMPTS[0]], jnp.int32)
    positions = jnp.arange(7, dtype=jnp.int32)[None]

    @jax.jit
    def logits(model):
        return target_model.logits(model, target_model.forward(model, tokens, positions, causal_mask(7)).hidden)

    np.testing.assert_allclose(logits(small), logits(fill(target, exact)), atol=1e-4)
    assert np.abs(np.asarray(logits(small) - logits(target))).max() > 1e-3
    assert np.array_equal(quantize_int8(small).embed[...].values, small.embed[...].values)


def test_decoding_is_plain_decoding_of_the_int8_target():
    target = quantize_int8(tiny_target())
    plain = generate(target, None, PROMPTS, **MIXED)
    fast = generate(target, quantize_int8(tiny_draft(target)), PROMPTS, tree=Tree(8, 3, 3), **MIXED)
    assert fast.tokens == plain.tokens


def test_on_a_mesh():
    """The vocabulary, heads and feed-forward split over two devices, rows over two: the same tokens as on one device."""
    target = tiny_target(vocab_size=56, num_layers=1)
    small = quantize_int8(target)
    placed = quantize_int8(place(target, make_mesh(data=2, tensor=2, devices=jax.devices()[:4])))
    rows = [[5, 9, 2], [11], [7, 7, 7], [1, 2]]
    plain = generate(small, None, rows, 10, eos_token_ids=[])
    fast = generate(placed, LanguageModelDraft.of(placed, placed), rows, 10, tree=Chain(2), eos_token_ids=[])
    assert fast.tokens == plain.tokens
    assert fast.accept_lengths == [[3, 3, 3]] * 4  # its own draft


def test_memory_and_loading(golden, golden_target, tmp_path):
    small = e3.load_target(golden / "target", weights="int8")
    head = e3.load_draft(golden / "head", small, weights="int8")
    assert weight_bytes(small) < 0.4 * weight_bytes(golden_target)
    with pytest.raises(WeightsError, match="int8 weights are not saved"):
        save_head(head, tmp_path / "head")
    assert not (tmp_path / "head" / "model.safetensors").exists()
    with pytest.raises(WeightsError, match="'int4' is unknown; one of float, int8"):
        e3.load_target(golden / "target", weights="int4")
