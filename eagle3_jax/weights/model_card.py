"""The README.md that goes with an exported head: what it is for, how it was made, what it accepts, how to load it where."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from eagle3_jax.config import DraftConfig
from eagle3_jax.weights.builtin import BUILTIN_MODELS
from eagle3_jax.weights.source import HUB_ID

UNMEASURED = "Not measured by whoever wrote this card; `eagle3-convert verify` measures it."


def model_card(
    config: DraftConfig,
    dialect: str,
    *,
    target_name: str | None = None,
    dtype: str = "bfloat16",
    data: str | None = None,
    recipe: str | None = None,
    acceptance: Sequence[str] = (),
    origin: str | None = None,
    earlier: str | None = None,
) -> str:
    """Markdown with the hub's front matter.

    data, recipe: sentences, or None for what is not recorded. acceptance: measured figures, a line each, with how they were measured.
    origin: what the head was converted from. earlier: the card that came with that, which is kept at the end.
    """
    target = target_name or "TARGET"
    front = ["---", "library_name: eagle3_jax", "tags: [eagle3, speculative-decoding]"]
    # A hub id is what the hub links to; a folder on somebody's disk is not.
    if target_name and HUB_ID.fullmatch(target_name) and not Path(target_name).exists():
        front.append(f"base_model: {target_name}")
    variants = [key for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output") if getattr(config, key)]
    rope = {key: value for key, value in config.rope.to_hf()["rope_parameters"].items() if key != "rope_theta"}
    scaling = "" if rope["rope_type"] == "default" else f", scaled ({json.dumps(rope)})"
    facts = [
        ("Target", f"{target_name or 'not recorded'}: hidden size {config.target_hidden_size}, {config.target_num_layers} blocks"),
        ("Vocabulary", f"{config.draft_vocab_size:,} of {config.vocab_size:,} tokens"),
        ("Features", f"the states entering blocks {', '.join(map(str, config.taps))}, counted from 0"),
        (
            "Layer",
            f"width {config.hidden_size}, {config.num_heads} heads ({config.num_kv_heads} key/value), MLP {config.intermediate_size}",
        ),
        ("Rotary base", f"{config.rope.theta:g}{scaling}"),
        ("Variants", ", ".join(variants) or "none: plain EAGLE-3"),
        ("Embedding", "the head's own" if config.own_embedding else "the target's"),
        ("Files", f"{dialect} dialect, safetensors, {dtype}"),
    ]
    lines = [*front, "---", "", f"# An EAGLE-3 head for {target_name or 'a target that is not recorded'}", ""]
    lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts)]
    if origin:
        lines += ["", f"Converted by `eagle3-convert` from {origin}; the weights are those of the source."]
    lines += ["", "## How it was made", "", f"Data: {data or 'not recorded.'}", "", f"Recipe: {recipe or 'not recorded.'}"]
    lines += [
        "",
        "## Measured acceptance",
        "",
        *(acceptance or ["Not measured by whoever wrote this card. `eagle3-convert verify` measures it."]),
    ]
    lines += ["", "## How to load it", "", "HEAD stands for this folder or its id on the hub.", ""]
    lines += ["eagle3_jax:", "", "```python", "import eagle3_jax as e3", ""]
    lines += [f'target = e3.load_target("{target}")', 'draft = e3.load_draft("HEAD", target)', "```", ""]
    if target in BUILTIN_MODELS or target.endswith(".gguf"):
        lines += [f"vLLM and SGLang want the target as a folder: `eagle3-convert target {target} TARGET` writes one.", ""]
        target = "TARGET"
    settings = json.dumps({"method": "eagle3", "model": "HEAD", "num_speculative_tokens": 3})
    lines += [
        "vLLM:",
        "",
        "```bash",
        f"vllm serve {target} --speculative-config '{settings}'",
        "```",
        "",
        *_sglang(config, dialect, target),
    ]
    if earlier:
        lines += ["", "## The card of the source", "", _without_front(earlier)]
    return "\n".join(lines).rstrip() + "\n"


def _sglang(config: DraftConfig, dialect: str, target: str) -> list[str]:
    """The command, or why there is none: SGLang passes over what it does not know without a word."""
    ignored = [key for key in ("norm_before_residual", "norm_before_fc") if getattr(config, key)]
    if ignored:
        return [f"SGLang: not this head. It ignores {' and '.join(ignored)} without a word and would accept next to nothing."]
    if dialect == "speculators":
        return ["SGLang does not read this dialect: `eagle3-convert head HEAD OUT --to specforge` writes one that it reads."]
    command = (
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm EAGLE3 \\\n"
        "    --speculative-draft-model-path HEAD --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
    )
    lines = ["SGLang:", "", "```bash", command, "```"]
    if config.own_embedding and config.hidden_size == config.target_hidden_size:
        lines += ["", "SGLang puts the target's embedding in the place of this head's own, which differs: expect less from it there."]
    return lines


def _without_front(card: str) -> str:
    """The card without its YAML, its headings one level down."""
    if card.startswith("---\n") and "\n---" in card[4:]:
        card = card[4:].split("\n---", 1)[1].partition("\n")[2]
    return "\n".join(f"##{line}" if line.startswith("#") else line for line in card.strip().splitlines())
