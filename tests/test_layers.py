"""Norm, rotary embedding and linear against formulas written out in float64 numpy."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.config import ConfigError, RopeConfig
from eagle3_jax.layers import _rotate, _rotate_halves, inverse_frequencies, linear, rms_norm, rotary, rotate, swiglu

LLAMA31 = RopeConfig(theta=500000.0, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
ROPES = {
    "default": RopeConfig(theta=10000.0),
    "linear": RopeConfig(theta=10000.0, kind="linear", factor=4.0),
    "llama3": LLAMA31,
    "llama3 with a short original context": RopeConfig(
        theta=100000.0, kind="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
    ),
}


def frequencies_one_by_one(rope: RopeConfig, head_dim: int) -> list[float]:
    """Hugging Face's definition, one frequency at a time in Python floats."""
    result = []
    for i in range(head_dim // 2):
        f = rope.theta ** (-2 * i / head_dim)
        if rope.kind == "linear":
            f /= rope.factor
        elif rope.kind == "llama3":
            wavelength = 2 * math.pi / f
            if wavelength > rope.original_max_position / rope.low_freq_factor:
                f /= rope.factor
            elif wavelength >= rope.original_max_position / rope.high_freq_factor:
                turns = rope.original_max_position / wavelength
                smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
                f = (1 - smooth) * f / rope.factor + smooth * f
        result.append(f)
    return result


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("head_dim", [2, 20, 64, 128])
def test_inverse_frequencies(name: str, head_dim: int):
    got = inverse_frequencies(ROPES[name], head_dim)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, frequencies_one_by_one(ROPES[name], head_dim), rtol=1e-6)


def test_llama3_uses_all_three_bands():
    """Otherwise the test above says little: high frequencies stay, low ones are divided, some lie between."""
    plain = inverse_frequencies(RopeConfig(theta=LLAMA31.theta), 128)
    ratio = plain / inverse_frequencies(LLAMA31, 128)
    between = (ratio > 1.001) & (ratio < 7.999)
    assert np.sum(ratio < 1.001) > 10
    assert np.sum(ratio > 7.999) > 10
    assert np.sum(between) > 2


def test_dynamic_scaling_follows_its_formula_for_each_token_alone():
    """Up to the original context exactly the plain angles; beyond, a larger base by the context of each token alone."""
    plain, H = RopeConfig(theta=10000.0), 16
    rope = RopeConfig(theta=10000.0, kind="dynamic", factor=4.0, original_max_position=32)
    positions = jnp.arange(96, dtype=jnp.int32)[None]
    cos, sin = rotary(positions, rope, H)
    np.testing.assert_array_equal(cos[:, :32], rotary(positions, plain, H)[0][:, :32])
    alone = rotary(positions[:, 70:71], rope, H)
    np.testing.assert_allclose(alone[1], sin[:, 70:71], atol=1e-6)
    for position, context in ((70, 71), (3, 96), (40, 96)):
        base = 10000.0 * (4.0 * context / 32 - 3.0) ** (H / (H - 2))
        angle = position * base ** (-np.arange(0, H, 2) / H)
        got = rotary(jnp.int32([[position]]), rope, H, jnp.int32([[context]]))
        np.testing.assert_allclose(got[0][0, 0, 0], np.cos(angle), atol=1e-5)
        np.testing.assert_allclose(got[1][0, 0, 0], np.sin(angle), atol=1e-5)


@pytest.mark.parametrize("name", ROPES)
def test_rotation_is_half_split(name: str):
    """Pair (x[i], x[i + H/2]) turns by position * frequency[i]; large positions keep their accuracy."""
    rope, H = ROPES[name], 20
    rng = np.random.default_rng(0)
    positions = np.array([[0, 1, 2, 17], [40, 511, 8191, 100_000]], np.int32)
    x = rng.normal(size=(2, 4, 3, H)).astype(np.float32)
    got = rotate(jnp.asarray(x), rotary(jnp.asarray(positions), rope, H))
    # The angle is defined as the float32 product, as in Hugging Face; only its sine and cosine are exact here.
    angle = (positions[..., None].astype(np.float32) * inverse_frequencies(rope, H)).astype(np.float64)[:, :, None, :]
    a, b = x[..., : H // 2].astype(np.float64), x[..., H // 2 :].astype(np.float64)
    want = np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1)
    np.testing.assert_allclose(got, want, atol=2e-6)


@pytest.mark.parametrize("size", [2, 6, 64])
def test_both_forms_of_the_rotation_are_one(size: int):
    random = np.random.default_rng(size)
    x, weight = (jnp.asarray(random.standard_normal((2, 5, 3, size)), jnp.float32) for _ in range(2))
    cos_sin = rotary(jnp.asarray(random.integers(0, 4000, (2, 5)), jnp.int32), RopeConfig(), size)
    both = [jax.jit(form) for form in (_rotate, _rotate_halves)]
    assert np.allclose(*(form(x, *cos_sin) for form in both), atol=1e-6)
    assert np.allclose(*(jax.grad(lambda x, form=form: jnp.sum(weight * form(x, *cos_sin) ** 2))(x) for form in both), atol=1e-5)


def test_rotated_products_depend_on_distance_alone():
    rng = np.random.default_rng(1)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 1, 16)), jnp.float32) for _ in range(2))
    rope = RopeConfig()

    def score(i: int, j: int) -> float:
        at = [rotate(x, rotary(jnp.full((1, 1), p, jnp.int32), rope, 16)) for x, p in ((q, i), (k, j))]
        return float(jnp.sum(at[0] * at[1]))

    assert score(3, 1) == pytest.approx(score(50, 48), abs=1e-5)
    assert abs(score(3, 1) - score(3, 2)) > 1e-3


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rms_norm(dtype: jnp.dtype):
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.normal(size=(2, 3, 64)) * 5, dtype)
    weight = jnp.asarray(rng.normal(size=64), dtype)
    got = rms_norm(x, weight, 1e-5)
    assert got.dtype == dtype
    x64, w64 = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    want = x64 / np.sqrt(np.mean(x64**2, axis=-1, keepdims=True) + 1e-5) * w64
    # bfloat16: one rounding of the result, so half a unit in the last of 8 bits. Computing in bfloat16 would miss this several times over.
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=1e-6 if dtype == jnp.float32 else 2**-8, atol=1e-6)


def test_rms_norm_epsilon_counts():
    """A tiny input shows epsilon's place, inside the root."""
    x = jnp.full((1, 4), 1e-3, jnp.float32)
    np.testing.assert_allclose(rms_norm(x, jnp.ones(4), 1e-5), np.full((1, 4), 1e-3 / math.sqrt(1e-6 + 1e-5)), rtol=1e-6)


def test_linear_bias_and_precision():
    rng = np.random.default_rng(3)
    x, w, b = rng.normal(size=(2, 3, 512)), rng.normal(size=(512, 8)), rng.normal(size=8)
    got = linear(jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32), jnp.asarray(b, jnp.float32))
    np.testing.assert_allclose(got, x @ w + b, atol=1e-4)
    text = jax.jit(linear).lower(jnp.zeros((2, 4)), jnp.zeros((4, 4))).as_text()
    assert "HIGHEST" in text, "a float32 product must ask for float32, or accelerators round its inputs"


def test_swiglu():
    gate, up = jnp.asarray([-2.0, 0.0, 3.0]), jnp.asarray([1.0, 5.0, -1.0])
    np.testing.assert_allclose(swiglu(gate, up), [-2 / (1 + math.exp(2)), 0.0, -3 / (1 + math.exp(-3))], rtol=1e-6)


def test_rope_config_reads_both_spellings():
    """Old files put the base beside the scaling, new ones put both in one object."""
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    old = RopeConfig.from_hf({"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **scaling}})
    older = RopeConfig.from_hf({"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **scaling}})
    new = RopeConfig.from_hf({"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **scaling}})
    assert old == older == new == LLAMA31
    assert RopeConfig.from_hf(new.to_hf()) == new
    assert RopeConfig.from_hf({}).theta == 10000.0
    assert RopeConfig.from_hf({"rope_theta": 77.0, "rope_scaling": None}) == RopeConfig(theta=77.0)
    linear = RopeConfig.from_hf({"rope_theta": 5.0, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert linear == RopeConfig(theta=5.0, kind="linear", factor=2.0) == RopeConfig.from_hf(linear.to_hf())
    dynamic = RopeConfig.from_hf({"rope_theta": 5.0, "rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 99})
    assert dynamic == RopeConfig(theta=5.0, kind="dynamic", factor=2.0, original_max_position=99)
    assert RopeConfig.from_hf({**dynamic.to_hf(), "max_position_embeddings": 99}) == dynamic


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "dynamic"}}, "factor"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 9}, "max_position_embeddings": 99},
            "original_max_position_embeddings 9 differs",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "by layer type"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
            "original_max_position",
        ),
    ],
)
def test_rope_config_refuses(config: dict, words: str):
    with pytest.raises(ConfigError, match=words) as error:
        RopeConfig.from_hf(config, "somewhere/config.json")
    assert "somewhere/config.json" in str(error.value)
