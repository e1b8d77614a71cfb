"""Target and draft against the numbers of the official PyTorch code, position by position."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax import draft as draft_model
from eagle3_jax import target as target_model
from eagle3_jax.attention import causal_mask
from eagle3_jax.config import DraftConfig, RopeConfig
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.params import fill, named_variables
from eagle3_jax.target import Target
from eagle3_jax.weights import load_draft, load_target

WIDTH = 40
"""Every prompt is padded to this, so that each model compiles once."""
TAPS = (2, 4, 5)
PROMPTS = ("p0", "p1", "p2")
target_forward = jax.jit(target_model.forward, static_argnames="taps")
draft_forward = jax.jit(draft_model.forward)


@pytest.fixture(scope="module")
def numbers(golden: Path) -> dict[str, np.ndarray]:
    return dict(np.load(golden / "forward.npz"))


def padded(ids: np.ndarray) -> jax.Array:
    return jnp.asarray(np.pad(ids, (0, WIDTH - len(ids)), constant_values=3)[None], jnp.int32)


def positions() -> jax.Array:
    return jnp.arange(WIDTH, dtype=jnp.int32)[None]


def run_draft(draft: Eagle3Draft, target: Target, numbers: dict[str, np.ndarray], prompt: str):
    """The draft on the official taps: (g, a, logits, k, v), each without the padding."""
    ids = numbers[f"{prompt}_draft_input_ids"]
    T = len(ids)
    taps = np.concatenate([numbers[f"{prompt}_tap_{name}"] for name in ("low", "mid", "high")], axis=-1)
    g = draft_model.fuse(draft, jnp.asarray(np.pad(taps, ((0, WIDTH - T), (0, 0))))[None])
    a, (k, v) = draft_forward(draft, target.embed[...], padded(ids), g, positions(), causal_mask(WIDTH))
    return g[0, :T], a[0, :T], draft_model.logits(draft, a)[0, :T], k[0, :T], v[0, :T]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_target(golden_target: Target, numbers: dict[str, np.ndarray], prompt: str):
    ids = numbers[f"{prompt}_input_ids"]
    T = len(ids)
    out = target_forward(golden_target, padded(ids), positions(), causal_mask(WIDTH), taps=TAPS)
    features = np.split(out.features[0, :T], 3, axis=-1)
    for got, name in zip(features, ("low", "mid", "high"), strict=True):
        np.testing.assert_allclose(got, numbers[f"{prompt}_tap_{name}"], atol=1e-4)
    np.testing.assert_allclose(out.hidden[0, :T], numbers[f"{prompt}_target_final_normed"], atol=1e-4)
    logits = target_model.logits(golden_target, out.hidden)[0, :T]
    np.testing.assert_allclose(logits, numbers[f"{prompt}_target_logits"], atol=1e-4)
    assert int(jnp.argmax(logits[-1])) == int(numbers[f"{prompt}_next_token"])


def test_default_taps_are_the_official_ones(golden_draft: Eagle3Draft):
    """The head's config names no taps: those of an 8-block target are 2, 4 and 5."""
    assert golden_draft.config.taps == TAPS


@pytest.mark.parametrize("prompt", PROMPTS)
def test_draft(golden_target: Target, golden_draft: Eagle3Draft, numbers: dict[str, np.ndarray], prompt: str):
    g, a, logits, k, v = run_draft(golden_draft, golden_target, numbers, prompt)
    np.testing.assert_allclose(g, numbers[f"{prompt}_g"], atol=5e-5)
    np.testing.assert_allclose(a, numbers[f"{prompt}_a"], atol=5e-5)
    np.testing.assert_allclose(logits, numbers[f"{prompt}_draft_logits"], atol=5e-5)
    np.testing.assert_allclose(jnp.transpose(k, (1, 0, 2)), numbers[f"{prompt}_draft_k"], atol=5e-5)
    np.testing.assert_allclose(jnp.transpose(v, (1, 0, 2)), numbers[f"{prompt}_draft_v"], atol=5e-5)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_draft_with_its_own_rotary_base(
    golden: Path, golden_target: Target, golden_draft: Eagle3Draft, numbers: dict[str, np.ndarray], prompt: str
):
    """A base named in the head's config is the one used, whatever the target's; it moves the logits far beyond the tolerance."""
    other = np.load(golden / "forward_head_theta.npz")
    theta = float(other["rope_theta"])
    assert theta != golden_target.config.rope.theta
    config = dataclasses.replace(golden_draft.config, rope=RopeConfig(theta=theta))
    draft = with_config(golden_draft, config)
    _, a, logits, _, _ = run_draft(draft, golden_target, numbers, prompt)
    np.testing.assert_allclose(a, other[f"{prompt}_a"], atol=5e-5)
    np.testing.assert_allclose(logits, other[f"{prompt}_draft_logits"], atol=5e-5)
    assert np.max(np.abs(logits - numbers[f"{prompt}_draft_logits"])) > 1e-2


def with_config(draft: Eagle3Draft, config: DraftConfig) -> Eagle3Draft:
    """The same parameters under another configuration."""
    return fill(Eagle3Draft(config), {name: variable[...] for name, variable in named_variables(draft)})


def test_draft_alone_on_our_own_features(golden_target: Target, golden_draft: Eagle3Draft, numbers: dict[str, np.ndarray]):
    """Nothing official in between: ids in, draft logits out."""
    ids, following = numbers["p2_input_ids"], numbers["p2_draft_input_ids"]
    out = target_forward(golden_target, padded(ids), positions(), causal_mask(WIDTH), taps=golden_draft.config.taps)
    g = draft_model.fuse(golden_draft, out.features)
    a, _ = draft_forward(golden_draft, golden_target.embed[...], padded(following), g, positions(), causal_mask(WIDTH))
    np.testing.assert_allclose(draft_model.logits(golden_draft, a)[0], numbers["p2_draft_logits"], atol=1e-4)


def test_target_whose_head_width_is_not_d_over_n(golden: Path):
    target = load_target(golden / "extra_headdim_target")
    c = target.config
    assert c.head_dim * c.num_heads != c.hidden_size
    want = np.load(golden / "extra_headdim_forward.npz")
    ids = jnp.asarray(want["input_ids"], jnp.int32)
    T = ids.shape[1]
    at = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), ids.shape)
    out = target_forward(target, ids, at, causal_mask(T), taps=(2, 3, 4))
    np.testing.assert_allclose(target_model.logits(target, out.hidden), want["logits"], atol=1e-4)
    for got, name in zip(jnp.split(out.features, 3, axis=-1), ("low", "mid", "high"), strict=True):
        np.testing.assert_allclose(got, want[f"tap_{name}"], atol=1e-4)


def test_head_file_names_its_rotary_base(golden: Path, golden_target: Target, tmp_path: Path):
    """The same through files: a base added to config.json reaches the head."""
    shutil.copytree(golden / "head", tmp_path / "head")
    path = tmp_path / "head" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_theta": 123.0}))
    assert load_draft(tmp_path / "head", golden_target).config.rope == RopeConfig(theta=123.0)
