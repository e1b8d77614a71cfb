"""The table of a target's tensors, for any kind of file: its parameters in order, under the names that kind gives them."""

from __future__ import annotations

from collections.abc import Mapping

from eagle3_jax.config import TargetConfig
from eagle3_jax.target import parts
from eagle3_jax.weights.table import Row, projection_rows


def target_rows(config: TargetConfig, names: Mapping[str, str]) -> list[Row]:
    """Every tensor of a target with this configuration.

    names: our parameter -> the file's module ("embed", "norm", "head", and those of a block); "block" is the prefix of a block's
    modules, with the block's number for {}.
    """
    rows = [Row(f"{names['embed']}.weight", "embed"), Row(f"{names['norm']}.weight", "norm")]
    if not config.tie_embeddings:
        rows.append(Row(f"{names['head']}.weight", "head", transpose=True))
    norms = ["attention_norm", "mlp_norm", *(("q_norm", "k_norm") if config.qk_norm else ())]
    biased = dict.fromkeys("qkv", config.qkv_bias) | {"o": config.o_bias} | dict.fromkeys(("gate", "up", "down"), config.mlp_bias)
    for i in range(config.num_layers):
        prefix = names["block"].format(i)
        rows += [Row(f"{prefix}.{names[name]}.weight", f"blocks.{i}.{name}") for name in norms]
        for name, bias in biased.items():
            rows += projection_rows(f"{prefix}.{names[name]}", name, f"blocks.{i}", parts(config), bias)
    return rows
