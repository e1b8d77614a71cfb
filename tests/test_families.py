"""Every family of targets: Hugging Face's logits and text, windows and rotary scaling included, and the same text with a draft."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_checkpoints import FAMILY_CASES, KEPT, NEW, PASS, config_of, prompts_of, tensors_of, tokens_of, write_folder
from tiny_models import tiny_target

from eagle3_jax import target as target_module
from eagle3_jax.attention import causal_mask
from eagle3_jax.cache import append
from eagle3_jax.config import ConfigError, DraftConfig, RopeConfig, TargetConfig
from eagle3_jax.decoding.generate import generate
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.families import FAMILIES
from eagle3_jax.params import initialize
from eagle3_jax.scripted import ScriptedDraft
from eagle3_jax.target import Target
from eagle3_jax.tree import Tree, ancestor_mask
from eagle3_jax.weights import WeightsError, load_target

REFERENCE = np.load(Path(__file__).parent / "reference" / "hf_families.npz")


def load(case: str, tmp_path: Path) -> Target:
    config = config_of(case)
    return load_target(write_folder(tmp_path / case, config, tensors_of(config)))


@jax.jit
def both_ways(target: Target, tokens_1T: jax.Array, prompt_1: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logits [T, V] of a pass with a causal mask, and of one without a mask."""
    positions = jnp.arange(tokens_1T.shape[1], dtype=jnp.int32)[None]
    masks = (causal_mask(tokens_1T.shape[1]), None)
    first, second = (target_module.forward(target, tokens_1T, positions, mask, prompt_B=prompt_1).hidden[0] for mask in masks)
    return target_module.logits(target, first), target_module.logits(target, second)


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_logits_are_hugging_faces(case: str, tmp_path: Path):
    tokens = jnp.asarray(tokens_of(config_of(case), PASS), jnp.int32)[None]
    want = REFERENCE[f"{case}.logits"]
    assert np.abs(want).max() > 1, "a reference of zeros would prove nothing"
    for got in both_ways(load(case, tmp_path), tokens, jnp.int32([PASS])):
        np.testing.assert_allclose(np.asarray(got)[KEPT], want, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("case", FAMILY_CASES)
def test_text_is_hugging_faces_plainly_and_with_a_tree(case: str, tmp_path: Path):
    """A ragged batch: each row's text is the one that it gets alone. The scripted draft is right three times of four, so trees are
    accepted in part, at every place relative to windows and to the context that rotary scaling starts from."""
    target, prompts = load(case, tmp_path), prompts_of(config_of(case))
    want = [REFERENCE[f"{case}.text{i}"].tolist() for i in range(2)]
    assert min(float(REFERENCE[f"{case}.gap{i}"]) for i in range(2)) > 1e-3, "a near-tie may fall either way"
    plain = generate(target, None, prompts, NEW, eos_token_ids=[])
    assert plain.tokens == want
    config = DraftConfig.for_target(target.config, target.config.vocab_size, taps=(0, 1))
    draft = ScriptedDraft.of(initialize(Eagle3Draft(config), jax.random.key(1)), [p + t for p, t in zip(prompts, want, strict=True)], 0.75)
    got = generate(target, draft, prompts, NEW, tree=Tree(nodes=8, depth=4, width=2), eos_token_ids=[])
    assert got.tokens == want
    assert got.tau > 1.5, "too few accepted drafts to prove anything"


def test_a_tree_wider_than_the_window_sees_what_each_path_alone_sees():
    """Behind 5 cached tokens, a tree of depth 4 in one pass, and one grown level by level: every node's hidden state equals that of a
    plain pass over the prefix and its own path."""
    target = tiny_target(num_layers=3, windows=(3, None, 1))
    prefix, nodes, parents = [5, 9, 2, 31, 17], [40, 8, 11, 23, 7, 30, 12], [0, 0, 0, 1, 3, 2, 4]
    depths = [0, 1, 1, 2, 3, 2, 4]

    @jax.jit
    def tree_pass(target: Target) -> jax.Array:
        first = target_module.forward(target, jnp.int32([prefix]), jnp.arange(5, dtype=jnp.int32)[None], causal_mask(5))
        cache = append(target.new_cache(1, 16), first.kv, None, jnp.int32([5]))
        mask = ancestor_mask(jnp.int32([parents]), 4)
        return target_module.forward(target, jnp.int32([nodes]), 5 + jnp.int32([depths]), mask, cache).hidden[0]

    @jax.jit
    def level_passes(target: Target) -> jax.Array:
        """A comb of two nodes a level, three levels, each on top of the K/V of those before it."""
        first = target_module.forward(target, jnp.int32([prefix]), jnp.arange(5, dtype=jnp.int32)[None], causal_mask(5))
        cache = append(target.new_cache(1, 16), first.kv, None, jnp.int32([5]))
        mask, kv, hidden = jnp.zeros((1, 2, 0), bool), None, []
        for level, tokens in enumerate(levels):
            mask = jnp.concatenate([mask, jnp.eye(2, dtype=bool)[None]], axis=-1)
            out = target_module.forward(target, jnp.int32([tokens]), jnp.full((1, 2), 5 + level, jnp.int32), mask, cache, earlier=kv)
            kv = out.kv
            hidden.append(out.hidden[0])
        return jnp.stack(hidden)

    @jax.jit
    def plain_pass(target: Target, tokens: jax.Array) -> jax.Array:
        return target_module.forward(target, tokens, jnp.broadcast_to(jnp.arange(10, dtype=jnp.int32), tokens.shape), None).hidden

    levels = [[40, 8], [11, 23], [7, 30]]
    paths = [[*prefix, *(tokens[branch] for tokens in levels[: level + 1])] for level in range(3) for branch in range(2)]
    for node in range(7):
        path = [node]
        while path[0]:
            path.insert(0, parents[path[0]])
        paths.append([*prefix, *(nodes[n] for n in path)])
    padded = jnp.asarray([path + [0] * (10 - len(path)) for path in paths], jnp.int32)
    hidden, alone = np.concatenate([level_passes(target).reshape(6, -1), tree_pass(target)]), plain_pass(target, padded)
    for node, path in enumerate(paths):
        np.testing.assert_allclose(hidden[node], alone[node, len(path) - 1], atol=2e-5, err_msg=str(path))


def test_a_window_reads_exactly_its_tokens():
    """One block: a change of the token at distance `window` is not seen, one nearer is."""
    target = tiny_target(num_layers=1, windows=(4,))
    tokens = np.arange(1, 13, dtype=np.int32)[None]
    changed = np.concatenate([tokens, tokens, tokens])
    changed[1, 7], changed[2, 8] = 40, 40
    logits = [np.asarray(both_ways(target, jnp.asarray(row[None]), jnp.int32([12]))) for row in changed]
    np.testing.assert_array_equal(logits[0][:, 11], logits[1][:, 11])
    assert np.abs(logits[0][:, 11] - logits[2][:, 11]).min(axis=0).max() > 1e-3


LEAST: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
}


CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 99, "rope_theta": 7.0},
    {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 29},
    {"sliding_window": None, "attention_bias": True},
)
# LLaMA has no windows: a configuration that asks for one is refused, which a test below sees to.
ASKED = [(kind, changes) for changes in CHANGES for kind in FAMILIES if kind != "llama" or not changes.get("sliding_window")]


@pytest.mark.parametrize(("kind", "changes"), ASKED)
def test_missing_keys_mean_what_transformers_takes_them_for(kind: str, changes: dict[str, Any]):
    from transformers import AutoConfig

    theirs: Any = AutoConfig.for_model(kind, **LEAST, **changes)
    ours = TargetConfig.from_hf({"model_type": kind, **LEAST, **changes})
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 64 // 32)
    assert (ours.max_position, ours.tie_embeddings) == (theirs.max_position_embeddings, theirs.tie_word_embeddings)
    assert ours.rope == RopeConfig(theta=theirs.rope_parameters["rope_theta"])
    window, layers = getattr(theirs, "sliding_window", None), getattr(theirs, "layer_types", None)
    sliding = [kind == "sliding_attention" for kind in layers] if layers else [True] * 30
    expected = tuple(window if on else None for on in sliding) if window and any(sliding) else ()
    assert ours.windows == (() if window and window >= ours.max_position else expected)


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_a_configuration_is_written_as_it_was_read(case: str):
    from transformers import AutoConfig

    config = TargetConfig.from_hf(config_of(case))
    raw = config.to_hf()
    assert TargetConfig.from_hf(raw) == config
    theirs: Any = AutoConfig.for_model(**raw)
    original: Any = AutoConfig.for_model(**config_of(case))
    for name in ("sliding_window", "layer_types", "attention_bias", "num_key_value_heads"):
        assert (getattr(theirs, name, None) or None) == (getattr(original, name, None) or None), name
    assert theirs.head_dim == config.head_dim
    assert theirs.rope_parameters["rope_type"] == original.rope_parameters["rope_type"]


def test_what_a_configuration_cannot_say():
    config = TargetConfig.from_hf(config_of("mistral_window"))
    for changes, name in (({"qk_norm": True}, "qk_norm"), ({"windows": (8, None)}, "windows"), ({"model_type": "llama"}, "windows")):
        with pytest.raises(ConfigError, match=rf"cannot say this target's .*{name}"):
            dataclasses.replace(config, **changes).to_hf()


def test_biases_and_norms_by_family():
    def flags(kind: str, **changes: Any) -> tuple[bool, ...]:
        c = TargetConfig.from_hf({"model_type": kind, **LEAST, "num_key_value_heads": 4, "head_dim": 4, **changes})
        return c.qkv_bias, c.o_bias, c.mlp_bias, c.qk_norm

    assert flags("llama") == flags("mistral") == flags("mistral", attention_bias=True) == (False, False, False, False)
    assert flags("llama", attention_bias=True, mlp_bias=True) == (True, True, True, False)
    assert flags("qwen2") == flags("qwen2", attention_bias=False) == (True, False, False, False)
    assert flags("qwen3") == (False, False, False, True)
    assert flags("qwen3", attention_bias=True) == (True, True, False, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama", "sliding_window": 8}, "sliding_window 8 is not part of"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window must be a positive integer"),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 30}, "layer_types"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"] * 3}, "layer_types"),
        ({"model_type": "qwen2", "layer_types": ["chunked_attention"] * 30}, "layer_types"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 30}, "no sliding_window is in use"),
        ({"model_type": "qwen3_moe"}, "model_type 'qwen3_moe'"),
        ({"model_type": "gemma3_text"}, "supported: llama, mistral, qwen2, qwen3"),
        ({"model_type": "qwen3", "rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "by layer type"),
    ],
)
def test_what_is_not_supported_says_so(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        TargetConfig.from_hf({**LEAST, **changes})


def test_tensors_of_another_family_are_refused(tmp_path: Path):
    config = config_of("qwen3")
    with pytest.raises(WeightsError, match=r"k_norm\.weight' is missing"):
        load_target(write_folder(tmp_path, config, tensors_of(config | {"model_type": "llama"})))
    with pytest.raises(WeightsError, match=r"k_norm\.weight' is not part"):
        load_target(write_folder(tmp_path, config | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, tensors_of(config)))


def test_contexts_of_stretched_ropes():
    """Twice the trained context for `dynamic` with factor 2; `linear` says its own."""

    def context(kind: str, **changes: Any) -> int:
        return TargetConfig.from_hf(
            {**LEAST, "max_position_embeddings": 4096, "rope_scaling": {"type": kind, "factor": 4.0}, **changes}
        ).max_position

    assert context("dynamic") == 16384
    assert context("linear") == 4096
    assert context("linear", max_sequence_length=16384) == 16384
