"""The dialects of EAGLE-3 heads: how each names a head's tensors and its configuration, one description for both directions.

official: safetensors or a .bin file, `midlayer.*`; the config of a LLaMA of one block. specforge: the same tensors, and the switches of
later EAGLE-3 variants. In both, tap ids at the top level are vLLM's (entering-block) and those inside `eagle_config` SGLang's
(output-of-block): each reader finds its own. speculators (vLLM): `layers.0.*`, the layer's configuration inside
`transformer_layer_config`, entering-block ids.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

from eagle3_jax.config import HEAD_VARIANTS, TAP_IDS, ConfigError, DraftConfig
from eagle3_jax.weights.table import Row, WeightsError

LAYER = (
    ("input_layernorm", "input_norm", False),
    ("hidden_norm", "hidden_norm", False),
    ("self_attn.q_proj", "q", True),
    ("self_attn.k_proj", "k", True),
    ("self_attn.v_proj", "v", True),
    ("self_attn.o_proj", "o", True),
    ("post_attention_layernorm", "mlp_norm", False),
    ("mlp.gate_proj", "gate", True),
    ("mlp.up_proj", "up", True),
    ("mlp.down_proj", "down", True),
)
"""(name in the file behind the layer's prefix, path in `Eagle3Draft`, transposed)."""

PREFIXES = ("midlayer.", "layers.0.")
EMBEDDING = "embed_tokens.weight"
ALIASES = {f"aux_norm_{name}.weight": f"fc_norm.{i}.weight" for i, name in enumerate(("low", "mid", "high"))}
"""Names of older files for tensors of the tables."""

UNSUPPORTED = {
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "bias": (None, False),
    "qkv_bias": (None, False),
    "quantization_config": (None,),
    "hidden_act": (None, "silu"),
    "num_hidden_layers": (None, 1),
    "model_type": (None, "llama"),
    "logit_scale": (None, 1, 1.0),
    "partial_rotary_factor": (None, 1, 1.0),
    "sliding_window": (None,),
    "pard_token": (None,),
    "mask_token_id": (None,),
    "target_layer_ids": (None,),
    "target_hidden_layer_ids": (None,),
}
"""Config keys that would change what a head computes, and the values that do not. Anything else is refused, never ignored."""

OUTER = ("draft_vocab_size", "target_hidden_size", TAP_IDS, *HEAD_VARIANTS)
"""Keys that the speculators dialect keeps beside `transformer_layer_config`, not inside."""


@dataclasses.dataclass(frozen=True)
class Dialect:
    """layer: the prefix of the decoder layer's tensors. convention: what stored tap ids mean (None: files differ, see `stored_taps`).
    absent: what a config says that does not say it. refuse: the reasons why a head cannot be written. write: the config file's content.
    """

    name: str
    layer: str
    convention: str | None
    absent: Mapping[str, Any]
    refuse: Callable[[DraftConfig], list[str]]
    write: Callable[[DraftConfig, str, str | None], dict[str, Any]]

    def reasons(self, config: DraftConfig) -> list[str]:
        """Why a head cannot be written in this dialect; nothing where it can."""
        falling = [f"taps {config.taps} (vLLM and SGLang hand the states over in ascending order)"]
        return self.refuse(config) + (falling if list(config.taps) != sorted(config.taps) else [])

    def check(self, config: DraftConfig) -> None:
        """Raises WeightsError naming what this dialect cannot carry."""
        reasons = self.reasons(config)
        if reasons:
            raise WeightsError(f"the {self.name} dialect cannot carry {'; nor '.join(reasons)}")


def head_rows(config: DraftConfig, layer: str) -> list[Row]:
    """The table of a head whose decoder layer's tensors start with `layer`; the vocabulary maps are apart (`vocab_maps`)."""
    rows = [Row("fc.weight", "fc", transpose=True)]
    rows += [Row(f"{layer}{key}.weight", path, transpose) for key, path, transpose in LAYER]
    rows += [Row("norm.weight", "norm"), Row("lm_head.weight", "head", transpose=True)]
    if config.norm_before_fc:
        rows.append(Row("input_norm.weight", "fused_norm"))
    if config.fc_norm:
        shape = (config.target_hidden_size,)
        rows += [Row(f"fc_norm.{i}.weight", "fc_norm", index=(i,), shape=shape) for i in range(len(config.taps))]
    if config.own_embedding:
        rows.append(Row(EMBEDDING, "embed"))
    return rows


def layer_prefix(keys: Collection[str], where: str) -> str:
    """The prefix that the decoder layer's tensors have; WeightsError unless it is one of the known ones."""
    found = [prefix for prefix in PREFIXES if any(key.startswith(prefix) for key in keys)]
    if len(found) != 1:
        some = ", ".join(sorted(keys)[:3])
        problem = "no decoder layer of an EAGLE-3 head" if not found else "the decoder layer twice"
        raise WeightsError(f"{where}: {problem}: tensors starting with {' or '.join(PREFIXES)} are expected; found {some}")
    return found[0]


def detect(raw: Mapping[str, Any]) -> str:
    """The name of the dialect that a config.json is written in, by its content."""
    if any(key.startswith("speculators_") for key in raw) or "transformer_layer_config" in raw:
        return "speculators"
    theirs = raw.get("eagle_config") is not None or raw.get("architectures") == ["LlamaForCausalLMEagle3"]
    if any(key in raw for key in HEAD_VARIANTS) or (theirs and not raw.get("eagle_taps")):
        return "specforge"
    return "official"


def flat_config(dialect: Dialect, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """config.json as flat keys with what the dialect means by absent ones filled in. Raises ConfigError for what is not supported."""
    flat = dict(raw)
    if dialect.name == "speculators":
        kind, layer = raw.get("speculators_model_type"), raw.get("transformer_layer_config")
        if kind != "eagle3":
            raise ConfigError(f"{where}: speculators_model_type {kind!r} is not supported (supported: eagle3)")
        if not isinstance(layer, Mapping):
            raise ConfigError(f"{where}: transformer_layer_config must be an object")
        # What belongs outside is not taken from inside, and vice versa.
        flat = {key: value for key, value in layer.items() if key not in OUTER} | {key: raw[key] for key in OUTER if key in raw}
        flat |= {key: raw[key] for key in ("eagle_taps", "target_num_hidden_layers") if key in raw}
    nested = flat.get("eagle_config")
    if nested is not None and not isinstance(nested, Mapping):
        raise ConfigError(f"{where}: eagle_config must be an object")
    nested = nested or {}
    if nested.get("use_aux_hidden_state", True) is not True:
        raise ConfigError(f"{where}: eagle_config.use_aux_hidden_state is false: not an EAGLE-3 head")
    if nested.get("norm_before_fc") is not None:
        flat["norm_before_fc"] = nested["norm_before_fc"]
    if flat.get("use_aux_norm"):
        flat["fc_norm"] = True
    for key, harmless in UNSUPPORTED.items():
        for name, values in ((key, flat), (f"eagle_config.{key}", nested)):
            if values.get(key) not in harmless and not _harmless(key, values):
                raise ConfigError(f"{where}: {name} {values[key]!r} is not supported")
    return {**dialect.absent, **{key: value for key, value in flat.items() if value is not None}}


def _harmless(key: str, values: Mapping[str, Any]) -> bool:
    """A window that no layer uses."""
    kinds = values.get("layer_types")
    unused = values.get("use_sliding_window") is False or (bool(kinds) and "sliding_attention" not in kinds)
    return key == "sliding_window" and unused


def by_tensors(flat: Mapping[str, Any], keys: Collection[str], where: str) -> dict[str, Any]:
    """`flat` with the norms before fc that the file holds but the config does not mention; ConfigError where it denies them."""
    found = {"fc_norm": "fc_norm.0.weight" in keys, "norm_before_fc": "input_norm.weight" in keys}
    known = dict(flat)
    for key, present in found.items():
        if present and known.setdefault(key, True) is False:
            raise ConfigError(f"{where}: {key} is false, but the file holds its tensors")
    return known


def _layer_config(config: DraftConfig, dtype: str) -> dict[str, Any]:
    """What every dialect's config says of the decoder layer, in the spellings of transformers 4 and 5."""
    return {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "max_position_embeddings": config.rope.original_max_position if config.rope.kind == "dynamic" else config.max_position,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        **config.rope.to_hf(),
    }


def _flat(config: DraftConfig, dtype: str) -> dict[str, Any]:
    outputs = {TAP_IDS: [k - 1 for k in config.taps], "use_aux_hidden_state": True}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layer_config(config, dtype),
        "draft_vocab_size": config.draft_vocab_size,
        "target_num_hidden_layers": config.target_num_layers,
        "eagle_taps": list(config.taps),
        **({} if _final(config) else {TAP_IDS: list(config.taps)}),
        # The embedding (tap 0) is no block's output.
        **({} if _final(config) or 0 in config.taps else {"eagle_config": outputs}),
    }


def _final(config: DraftConfig) -> bool:
    """Whether a tap is the target's final normed state, which ids of other readers cannot name (their L is not normed)."""
    return config.target_num_layers in config.taps


def _official(config: DraftConfig, dtype: str, target_name: str | None) -> dict[str, Any]:
    """With `target_hidden_size` the official code takes the embedding from the head's file, not from the target: said only then."""
    narrow = {"target_hidden_size": config.target_hidden_size} if config.own_embedding else {}
    return {**_flat(config, dtype), **narrow}


def _official_refuses(config: DraftConfig) -> list[str]:
    reasons = [f"{key} (specforge and speculators can)" for key in HEAD_VARIANTS if getattr(config, key)]
    reasons += [f"tap {config.target_num_layers}, the final normed state"] if _final(config) else []
    return reasons + ([f"{len(config.taps)} taps (its code reads 3)"] if len(config.taps) != 3 else [])


def _specforge(config: DraftConfig, dtype: str, target_name: str | None) -> dict[str, Any]:
    return {
        **_flat(config, dtype),
        "target_hidden_size": config.target_hidden_size,
        **({} if len(config.taps) == 3 else {"num_aux_hidden_states": len(config.taps)}),
        **{key: getattr(config, key) for key in HEAD_VARIANTS},
    }


def _specforge_refuses(config: DraftConfig) -> list[str]:
    return ["tap 0 (its ids name a block's output, and the embedding is none's)"] if 0 in config.taps else []


def _speculators(config: DraftConfig, dtype: str, target_name: str | None) -> dict[str, Any]:
    method = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [method],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target_name, "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": {
            **_layer_config(config, dtype),
            **({} if len(config.taps) == 3 else {"num_aux_hidden_states": len(config.taps)}),
        },
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "target_num_hidden_layers": config.target_num_layers,
        TAP_IDS: list(config.taps),
        **{key: getattr(config, key) for key in HEAD_VARIANTS},
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }


def _speculators_refuses(config: DraftConfig) -> list[str]:
    reasons = ["norm_before_fc together with fc_norm"] if config.norm_before_fc and config.fc_norm else []
    return reasons + ([f"tap {config.target_num_layers}, the final normed state"] if _final(config) else [])


DIALECTS: dict[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        Dialect("official", "midlayer.", None, {}, _official_refuses, _official),
        Dialect("specforge", "midlayer.", None, {}, _specforge_refuses, _specforge),
        Dialect("speculators", "layers.0.", "entering", {"norm_before_residual": True}, _speculators_refuses, _speculators),
    )
}


def suited(config: DraftConfig) -> Dialect:
    """The first dialect that can carry a head, official before the others. WeightsError says why none can."""
    refused = {name: dialect.reasons(config) for name, dialect in DIALECTS.items()}
    able = next((name for name, reasons in refused.items() if not reasons), None)
    if able is None:
        texts = (f"{name} not {' nor '.join(reasons)}" for name, reasons in refused.items())
        raise WeightsError(f"no dialect can carry this head: {'; '.join(texts)}")
    return DIALECTS[able]


def dialect_named(name: str) -> Dialect:
    """A dialect by name; WeightsError lists the names."""
    if name not in DIALECTS:
        raise WeightsError(f"dialect {name!r} is unknown (known: {', '.join(DIALECTS)})")
    return DIALECTS[name]
