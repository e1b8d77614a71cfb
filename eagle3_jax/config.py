"""Shapes of the models, read from and written to Hugging Face `config.json` files.

Everything here is frozen and hashable, so that a configuration can be a static argument of a jitted program.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3_jax.families import FAMILIES, block_windows

MOST_BLOCKS = 10_000
"""A target that says it has more is damaged; said before a table of a billion rows is made of it."""


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the file and the key."""


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: `theta` is the base; `kind` is "default", "linear", "dynamic" or "llama3".

    `factor` stretches positions (linear), the base of contexts longer than `original_max_position` (dynamic) or low frequencies
    (llama3); the two frequency factors are llama3's alone.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], where: str = "config", max_position: int = 2048) -> RopeConfig:
        """Reads both spellings: transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`).

        max_position: the context that `dynamic` scaling starts from, where the config has no `max_position_embeddings`.
        Raises ConfigError for a rope type that is not supported, naming it, and for a missing or contradictory key.
        """
        scaling: dict[str, Any] = {}
        for name in ("rope_scaling", "rope_parameters"):
            given = config.get(name) or {}
            if not isinstance(given, Mapping):
                raise ConfigError(f"{where}: {name} must be an object or null, found {given!r}")
            if any(isinstance(value, Mapping) for value in given.values()):
                raise ConfigError(f"{where}: {name} by layer type is not supported (supported: one set for all layers)")
            scaling |= given
        theta = number(scaling if scaling.get("rope_theta") is not None else config, "rope_theta", where, 10000.0)
        kind = scaling.get("rope_type", scaling.get("type", "default")) or "default"
        if kind == "default":
            return cls(theta=theta)
        if kind not in ("linear", "dynamic", "llama3"):
            raise ConfigError(f"{where}: rope type {kind!r} is not supported (supported: default, linear, dynamic, llama3)")

        def need(key: str) -> float:
            if scaling.get(key) is None:
                raise ConfigError(f"{where}: rope type {kind!r} needs the key {key!r}")
            return number(scaling, key, where)

        factor = need("factor")
        if kind == "linear":
            return cls(theta=theta, kind=kind, factor=factor)
        if kind == "dynamic":
            # Hugging Face scales from max_position_embeddings on, whatever else a file may say.
            original = int(number(config, "max_position_embeddings", where, max_position))
            if number(scaling, "original_max_position_embeddings", where, original) != original:
                raise ConfigError(
                    f"{where}: original_max_position_embeddings {scaling['original_max_position_embeddings']} differs from "
                    f"max_position_embeddings {original}, from which rope type 'dynamic' scales"
                )
            return cls(theta=theta, kind=kind, factor=factor, original_max_position=original)
        return cls(
            theta=theta,
            kind=kind,
            factor=factor,
            low_freq_factor=need("low_freq_factor"),
            high_freq_factor=need("high_freq_factor"),
            original_max_position=int(need("original_max_position_embeddings")),
        )

    def to_hf(self) -> dict[str, Any]:
        """The keys of both spellings, so that old and new readers find the same rotary embedding.

        `dynamic` scales from the `max_position_embeddings` that stand beside these keys: they must be `original_max_position`.
        """
        parameters: dict[str, Any] = {"rope_theta": self.theta, "rope_type": self.kind}
        if self.kind != "default":
            parameters["factor"] = self.factor
        if self.kind == "llama3":
            parameters.update(
                low_freq_factor=self.low_freq_factor,
                high_freq_factor=self.high_freq_factor,
                original_max_position_embeddings=self.original_max_position,
            )
        scaling = {k: v for k, v in parameters.items() if k != "rope_theta"} if self.kind != "default" else None
        return {"rope_theta": self.theta, "rope_scaling": scaling, "rope_parameters": parameters}


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """The frozen target. Letters as in the package docstring: V, D, F, N, K, H, L.

    model_type: its row of `families.FAMILIES`; qkv_bias, o_bias, mlp_bias, qk_norm and windows are what that row came to here.
    windows: per block the number of last positions that a query reads, its own included (None: all); () when no block has a window.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    model_type: str = "llama"

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim {self.head_dim} is odd: rotary embedding needs pairs")
        if self.windows and len(self.windows) != self.num_layers:
            raise ConfigError(f"windows {self.windows}: one per block is needed, {self.num_layers} in all")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], where: str = "config") -> TargetConfig:
        """Reads the `config.json` of a causal language model of FAMILIES. Raises ConfigError naming a missing or unsupported key."""
        kind = config.get("model_type", "llama")
        if kind not in FAMILIES:
            raise ConfigError(f"{where}: model_type {kind!r} is not supported (supported: {', '.join(FAMILIES)})")
        family = FAMILIES[kind]
        activation = config.get("hidden_act", "silu")
        if activation != "silu":
            raise ConfigError(f"{where}: hidden_act {activation!r} is not supported (supported: silu)")
        missing = {"num_key_value_heads": family.num_kv_heads, "head_dim": family.head_dim}
        config = {**{key: value for key, value in missing.items() if value}, **config}
        num_layers = _positive(config, "num_hidden_layers", where)
        if num_layers > MOST_BLOCKS:
            raise ConfigError(f"{where}: num_hidden_layers {num_layers} is no depth of a model")
        trained = int(number(config, "max_position_embeddings", where, family.max_position))
        rope = RopeConfig.from_hf(config, where, family.max_position)
        max_position = _context(config, rope, trained, where)

        def settle(bias: bool | str) -> bool:
            return _flag(config, bias, where) if isinstance(bias, str) else bias

        try:
            windows = block_windows(family, config, num_layers, max_position)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
        return cls(
            rope=rope,
            max_position=max_position,
            tie_embeddings=_flag(config, "tie_word_embeddings", where),
            qkv_bias=settle(family.qkv_bias),
            o_bias=settle(family.o_bias),
            mlp_bias=settle(family.mlp_bias),
            qk_norm=family.qk_norm,
            windows=windows,
            bos_token_id=next(iter(token_ids(config.get("bos_token_id"), where)), None),
            eos_token_ids=token_ids(config.get("eos_token_id"), where),
            num_layers=num_layers,
            model_type=kind,
            **_widths(config, where),
        )

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` of this target. Raises ConfigError for one that its model type's file cannot say."""
        family, window = FAMILIES[self.model_type], next((w for w in self.windows if w is not None), None)
        eos = list(self.eos_token_ids)
        raw: dict[str, Any] = {
            "architectures": [f"{self.model_type.capitalize()}ForCausalLM"],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.rope.original_max_position if self.rope.kind == "dynamic" else self.max_position,
            "rms_norm_eps": self.rms_norm_eps,
            "hidden_act": "silu",
            "tie_word_embeddings": self.tie_embeddings,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
            **self.rope.to_hf(),
        }
        for rule, value in ((family.qkv_bias, self.qkv_bias), (family.o_bias, self.o_bias), (family.mlp_bias, self.mlp_bias)):
            raw |= {rule: value} if isinstance(rule, str) else {}
        if family.windows != "never":
            raw["sliding_window"] = window
        if family.windows == "switched":
            kinds = ["full_attention" if w is None else "sliding_attention" for w in self.windows or (None,) * self.num_layers]
            raw |= {"use_sliding_window": window is not None, "layer_types": kinds}
        back = TargetConfig.from_hf(raw)
        lost = [field.name for field in dataclasses.fields(self) if getattr(back, field.name) != getattr(self, field.name)]
        if lost:
            raise ConfigError(f"a {self.model_type} config.json cannot say this target's {', '.join(lost)}")
        return raw


@dataclasses.dataclass(frozen=True)
class DraftConfig:
    """The EAGLE-3 head. `hidden_size` is the draft's own width, `target_hidden_size` sizes the fusion (A = taps · that).

    `taps` are entering-block ids: tap k is the residual stream that ENTERS target block k.
    `target_num_layers` is the depth L of the target that the head was made for, where it is known.

    Variants, with the meaning that vLLM's `llama_eagle3.py` gives them; a plain EAGLE-3 head has none:
    norm_before_residual: the residual starts from hidden_norm(x) instead of x. norm_before_fc: one norm over the fused features [A]
    before fc. fc_norm: one norm per tap before fc (after the former). norm_output: the state that is fed back is the normed one.
    own_embedding: the head reads an embedding table of its own [V, draft's D] instead of the target's.
    """

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    taps: tuple[int, ...]
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    max_position: int = 2048
    target_num_layers: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_embedding: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}")
        if self.hidden_size != self.target_hidden_size and not self.own_embedding:
            raise ConfigError(
                f"hidden_size {self.hidden_size} differs from the target's {self.target_hidden_size}: "
                "such a head needs an embedding of its own (embed_tokens.weight)"
            )
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ConfigError(f"draft_vocab_size {self.draft_vocab_size} must lie in 1..vocab_size ({self.vocab_size})")
        if len(set(self.taps)) != len(self.taps):
            raise ConfigError(f"taps {self.taps} must be distinct")

    @classmethod
    def for_target(cls, target: TargetConfig, draft_vocab_size: int, taps: tuple[int, ...] | None = None, **changes: Any) -> DraftConfig:
        """A head shaped like one block of the target: its heads, widths and rotary embedding, unless `changes` says otherwise."""
        return cls(
            **{
                "vocab_size": target.vocab_size,
                "draft_vocab_size": draft_vocab_size,
                "hidden_size": target.hidden_size,
                "target_hidden_size": target.hidden_size,
                "intermediate_size": target.intermediate_size,
                "num_heads": target.num_heads,
                "num_kv_heads": target.num_kv_heads,
                "head_dim": target.head_dim,
                "taps": check_taps(taps, target) if taps is not None else default_taps(target.num_layers),
                "rms_norm_eps": target.rms_norm_eps,
                "rope": target.rope,
                "max_position": target.max_position,
                "target_num_layers": target.num_layers,
                **changes,
            }
        )

    @classmethod
    def from_hf(
        cls,
        config: Mapping[str, Any],
        target: TargetConfig,
        where: str = "config",
        taps: tuple[int, ...] | None = None,
        convention: str | None = None,
        own_embedding: bool = False,
    ) -> DraftConfig:
        """Reads a head's flat `config.json` (official, SpecForge; `weights.dialects` flattens the others).

        The rotary base is the config's own, and 10000 without scaling where it names none (official inference).
        Taps: those the config stores, else `taps`, else the official default for this target; see `stored_taps` for `convention`.
        """
        widths = _widths(config, where)
        stored = stored_taps(config, target, where, taps, convention)
        if stored is not None and taps is not None and stored != tuple(taps):
            raise ConfigError(f"{where}: the head was made with taps {stored}, asked for {tuple(taps)}")
        chosen = stored or taps or default_taps(target.num_layers)
        rope, trained = RopeConfig.from_hf(config, where), int(number(config, "max_position_embeddings", where, 2048))
        return cls(
            draft_vocab_size=int(config.get("draft_vocab_size") or widths["vocab_size"]),
            target_hidden_size=int(config.get("target_hidden_size") or widths["hidden_size"]),
            taps=check_taps(tuple(chosen), target),
            rope=rope,
            max_position=_context(config, rope, trained, where),
            target_num_layers=int(config.get("target_num_hidden_layers") or target.num_layers),
            own_embedding=own_embedding,
            **{key: _flag(config, key, where) for key in HEAD_VARIANTS},
            **widths,
        )


HEAD_VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""The switches of `DraftConfig`, by the names that config files use."""

TAP_CONVENTIONS = ("entering", "output")
"""What an id k of `eagle_aux_hidden_state_layer_ids` means: the state entering block k (vLLM), or block k's output (SGLang)."""

TAP_IDS = "eagle_aux_hidden_state_layer_ids"


def stored_taps(
    config: Mapping[str, Any],
    target: TargetConfig,
    where: str,
    expected: tuple[int, ...] | None = None,
    convention: str | None = None,
) -> tuple[int, ...] | None:
    """The entering-block ids that a head's config stores, or None.

    `eagle_taps` means what it says. `eagle_aux_hidden_state_layer_ids` (top level or inside `eagle_config`) is written by some trainers
    as entering-block ids and by others as output-of-block ids, one lower; `convention` says which. Unsaid, it is taken only where both
    readings are settled: by `eagle_taps` or `expected`, because the top level's ids are those inside `eagle_config` plus one (each
    reader gets its own), or because the ids are the default of either convention. Raises ConfigError otherwise, rather than guess.
    """
    if convention is not None and convention not in TAP_CONVENTIONS:
        raise ConfigError(f"tap convention {convention!r} is unknown (known: {', '.join(TAP_CONVENTIONS)})")
    own, top = _blocks(config, "eagle_taps", where), _blocks(config, TAP_IDS, where)
    nested = _blocks(config.get("eagle_config") or {}, TAP_IDS, where)
    if top and nested and top == tuple(k + 1 for k in nested):
        found = [top]
    elif convention is None:
        found = [_settle(ids, own or expected or default_taps(target.num_layers), where) for ids in (top, nested) if ids]
    else:
        found = [tuple(k + (convention == "output") for k in ids) for ids in (top, nested) if ids]
    found += [own] if own else []
    if any(taps != found[0] for taps in found):
        raise ConfigError(f"{where}: the stored taps contradict each other: {' and '.join(map(str, dict.fromkeys(found)))}")
    return found[0] if found else None


def _settle(ids: tuple[int, ...], known: tuple[int, ...], where: str) -> tuple[int, ...]:
    """`known` if `ids` are those or one lower."""
    if tuple(known) not in (ids, tuple(k + 1 for k in ids)):
        raise ConfigError(
            f"{where}: {TAP_IDS} {ids} fits neither taps {tuple(known)} nor the ids one lower, and does not say whether a block's input "
            "or its output is meant; name the taps (entering-block ids) or the tap convention when loading"
        )
    return tuple(known)


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """Entering-block ids (low, mid, high): the official (2, L//2, L-3), or distinct in-range ones where those collide (L < 7)."""
    if num_layers >= 7:
        return (2, num_layers // 2, num_layers - 3)
    if num_layers < 3:
        raise ConfigError(f"a target of {num_layers} blocks has no three distinct taps; name taps explicitly")
    return (0 if num_layers == 3 else 1, num_layers // 2, num_layers - 1)


def check_taps(taps: tuple[int, ...], target: TargetConfig) -> tuple[int, ...]:
    """Returns `taps`; raises ConfigError unless every one names a block of the target, or L: its final normed state (EAGLE's feature)."""
    bad = [k for k in taps if not 0 <= k <= target.num_layers]
    if bad or not taps:
        raise ConfigError(f"taps {taps}: ids must lie in 0..{target.num_layers - 1}, the target's blocks, or be {target.num_layers}")
    return tuple(taps)


class DuplicateKeyError(ValueError):
    """The key that a JSON object holds twice."""


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.loads(object_pairs_hook=...)`: DuplicateKeyError for an object that names a key twice."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise DuplicateKeyError(key)
        found[key] = value
    return found


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ConfigError names the file when it is missing, broken, or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique_keys)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except DuplicateKeyError as error:
        raise ConfigError(f"{path}: the key {error.args[0]!r} is there twice") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def token_ids(value: Any, where: str = "config") -> tuple[int, ...]:
    """The ids of a config field that may be an int, a list or null. Raises ConfigError for anything else."""
    if value is None:
        return ()
    ids = value if isinstance(value, (list, tuple)) else (value,)
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ConfigError(f"{where}: token ids must be an int, a list of ints or null, found {value!r}")
    return tuple(ids)


def _context(config: Mapping[str, Any], rope: RopeConfig, trained: int, where: str) -> int:
    """Positions that a target may use. Stretched ropes outrun `max_position_embeddings` where that is the length before stretching:
    always for "dynamic", and for "linear" where the file says so beside it (Vicuna 16k: max_sequence_length)."""
    if rope.kind == "dynamic":
        return int(trained * rope.factor)
    return max(trained, int(number(config, "max_sequence_length", where, trained))) if rope.kind == "linear" else trained


def number(config: Mapping[str, Any], key: str, where: str, default: float | None = None) -> float:
    """A positive finite number; a missing or null key is `default`. Raises ConfigError naming the key."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ConfigError(f"{where}: {key} must be a positive number, found {value!r}")
    return float(value)


def _blocks(config: Mapping[str, Any], key: str, where: str) -> tuple[int, ...]:
    """The block ids of a field that may be absent, null or empty."""
    value = config.get(key) or []
    if not isinstance(value, list) or not all(isinstance(k, int) and not isinstance(k, bool) for k in value):
        raise ConfigError(f"{where}: {key} must be a list of block ids, found {value!r}")
    return tuple(value)


def _flag(config: Mapping[str, Any], key: str, where: str) -> bool:
    value = config.get(key)
    if value not in (None, True, False):
        raise ConfigError(f"{where}: {key} must be true or false, found {value!r}")
    return bool(value)


def _positive(config: Mapping[str, Any], key: str, where: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"{where}: {key} must be a positive integer, found {value!r}")
    return value


def _given(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without its nulls."""
    return {key: value for key, value in config.items() if value is not None}


def _widths(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields that target and draft configurations share."""
    heads = _positive(config, "num_attention_heads", where)
    hidden = _positive(config, "hidden_size", where)
    if config.get("head_dim") is None and hidden % heads:
        raise ConfigError(f"{where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}; name head_dim")
    return {
        "vocab_size": _positive(config, "vocab_size", where),
        "hidden_size": hidden,
        "intermediate_size": _positive(config, "intermediate_size", where),
        "num_heads": heads,
        "num_kv_heads": _positive({"num_key_value_heads": heads, **_given(config)}, "num_key_value_heads", where),
        "head_dim": _positive({"head_dim": hidden // heads, **_given(config)}, "head_dim", where),
        "rms_norm_eps": number(config, "rms_norm_eps", where, 1e-6),
    }
