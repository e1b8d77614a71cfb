"""Configurations: what is read, what is refused and in which words, and which taps a target gets."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from eagle3_jax.config import ConfigError, DraftConfig, RopeConfig, TargetConfig, check_taps, default_taps, read_json, token_ids

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 99,
    "rms_norm_eps": 1e-5,
    "eos_token_id": [2, 7],
    "bos_token_id": 1,
}


def test_target_fields():
    c = TargetConfig.from_hf(LLAMA)
    assert (c.vocab_size, c.hidden_size, c.intermediate_size, c.num_layers, c.num_heads, c.num_kv_heads) == (100, 48, 64, 7, 4, 2)
    assert (c.head_dim, c.max_position, c.rms_norm_eps, c.bos_token_id, c.eos_token_ids) == (12, 99, 1e-5, 1, (2, 7))
    assert not (c.tie_embeddings or c.qkv_bias or c.o_bias or c.mlp_bias or c.qk_norm or c.windows)
    assert TargetConfig.from_hf({**LLAMA, "head_dim": 20}).head_dim == 20
    assert TargetConfig.from_hf({**LLAMA, "head_dim": None}).head_dim == 12
    without_groups = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert TargetConfig.from_hf(without_groups).num_kv_heads == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim 15"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "head_dim"),
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"num_hidden_layers": "7"}, "num_hidden_layers"),
        ({"intermediate_size": True}, "intermediate_size"),
    ],
)
def test_target_refuses(change: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        TargetConfig.from_hf({**LLAMA, **change}, "folder/config.json")


def test_configurations_are_static_arguments():
    """Equal ones hash alike, and nothing can be changed under a compiled program."""
    a, b = TargetConfig.from_hf(LLAMA), TargetConfig.from_hf(dict(LLAMA))
    assert a == b
    assert hash(a) == hash(b)
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.vocab_size = 5  # type: ignore[misc]


@pytest.mark.parametrize("layers", range(3, 40))
def test_default_taps(layers: int):
    """The official (2, L // 2, L - 3) wherever its three are distinct and in range; three distinct ones in order everywhere."""
    taps = default_taps(layers)
    assert len(set(taps)) == 3
    assert list(taps) == sorted(taps)
    assert taps[0] >= 0
    assert taps[-1] < layers
    if layers >= 7:
        assert taps == (2, layers // 2, layers - 3)


@pytest.mark.parametrize("layers", [1, 2])
def test_too_shallow_for_three_taps(layers: int):
    with pytest.raises(ConfigError, match="name taps"):
        default_taps(layers)


def test_taps_of_published_targets():
    assert default_taps(32) == (2, 16, 29)
    assert default_taps(30) == (2, 15, 27)


def test_check_taps():
    target = TargetConfig.from_hf(LLAMA)
    assert check_taps((0, 3, 6), target) == (0, 3, 6)
    assert check_taps((7,), target) == (7,)  # the final normed state
    for bad in ((0, 8), (-1, 2), ()):
        with pytest.raises(ConfigError, match="taps"):
            check_taps(bad, target)


def test_draft_for_target():
    target = TargetConfig.from_hf(LLAMA)
    c = DraftConfig.for_target(target, draft_vocab_size=40, num_heads=6, num_kv_heads=3, head_dim=8)
    assert (c.vocab_size, c.draft_vocab_size, c.hidden_size, c.target_hidden_size) == (100, 40, 48, 48)
    assert (c.num_heads, c.num_kv_heads, c.head_dim, c.taps) == (6, 3, 8, (2, 3, 4))
    for change, words in (
        ({"draft_vocab_size": 101}, "draft_vocab_size 101"),
        ({"draft_vocab_size": 0}, "draft_vocab_size 0"),
        ({"draft_vocab_size": 9, "taps": (1, 1, 2)}, "distinct"),
        ({"draft_vocab_size": 9, "taps": (1, 2, 8)}, "0..6"),
        ({"draft_vocab_size": 9, "num_kv_heads": 3}, "num_key_value_heads 3"),
    ):
        with pytest.raises(ConfigError, match=words):
            DraftConfig.for_target(target, **change)


def test_a_head_has_its_own_rotary_base():
    """10000 without scaling where its file names none, whatever the target has; its own where it names one."""
    scaled = {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    target = TargetConfig.from_hf({**LLAMA, **scaled})
    head = {**LLAMA, "num_hidden_layers": 1, "draft_vocab_size": 40}
    assert target.rope == RopeConfig(theta=5e5, kind="linear", factor=2.0)
    assert DraftConfig.from_hf(head, target).rope == RopeConfig(theta=10000.0)
    assert DraftConfig.from_hf({**head, "rope_theta": 7.0}, target).rope == RopeConfig(theta=7.0)


def test_token_ids():
    assert token_ids(None) == ()
    assert token_ids(5) == (5,)
    assert token_ids([3, 4]) == (3, 4)


def test_read_json(tmp_path: Path):
    path = tmp_path / "config.json"
    for content, words in ((None, "no such file"), ("{", "not valid JSON"), ("[1]", "JSON object"), (b"\xff\xfe{", "not valid JSON")):
        if content is not None:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ConfigError, match=words) as error:
            read_json(path)
        assert str(path) in str(error.value)
    path.write_text(json.dumps({"a": 1}))
    assert read_json(path) == {"a": 1}
