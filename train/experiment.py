#!python
"""eagle3-experiment: the paper's experiments, and a user's choices, on any target."""

from __future__ import annotations

import argparse
import dataclasses
import sys

from eagle3_jax.commands import Formatter, Parser, positive, run_command, use_compilation_cache
from eagle3_jax.experiments import EXPERIMENTS, Material, Setting, run_experiment

PROG = "eagle3-experiment"
EXAMPLES = """experiments:
  n-alpha      the paper's figures 4 and 7: EAGLE, no feature loss and no training-time test, EAGLE-3
  ablation     Table 2: EAGLE, then training-time test instead of the feature loss, then fused features
  scaling      Figure 1: 1/8, 1/4, 1/2 and all of the text, for EAGLE and for EAGLE-3
  overview     the three above in one picture
  recipes      which tokens are scored and how: every recipe
  rates        a quarter, half and double --peak-lr
  losses       every loss over the vocabulary
  ttt-steps    steps of the unrolling in training
  draft-vocab  an eighth, a quarter, a half and all of the draft vocabulary
  drafting     coupled, greedy and sampled candidates at T > 0

Each writes NAME.json and NAME.png into --out. Heads that an earlier run with the same sizes trained there are taken over.

examples:
  eagle3-experiment n-alpha ablation --target stories260k --out figures
  eagle3-experiment all --target smollm2-135m --data chats.jsonl.gz --draft-vocab 8192 --steps 2000 \\
      --row-tokens 832 --row-slots 640 --rows 3 --peak-lr 2e-3 --out figures
  eagle3-experiment rates recipes losses --target smollm2-135m --data chats.jsonl.gz --start smollm2-135m --ttt-steps 3 --steps 60 \\
      --row-tokens 832 --row-slots 640 --rows 3 --peak-lr 6e-4 --chain 3 --out sweep
"""
HELP = {
    "stories": "texts that the target writes itself where there is no --data",
    "story_tokens": "tokens of each of those texts",
    "story_heat": "their temperature",
    "hold_out": "examples at the end that are never trained on; prompts are their beginnings",
    "max_tokens": "tokens per example of --data; longer ones are cut",
    "start": "random; target-head: output head and last norm begin as the target's; or an existing head (folder, hub id, or built-in "
    "name), which keeps its taps and draft vocabulary: for recipes, rates, losses, ttt-steps and drafting",
    "draft_vocab": "tokens the head can propose; unset: all, or --start's",
    "ttt_steps": "steps EAGLE-3 is unrolled in training",
    "steps": "optimizer updates of every head",
    "rows": "packed rows per update",
    "row_tokens": "tokens per packed row",
    "row_slots": "scored tokens per packed row",
    "peak_lr": "learning rate after the warm-up",
    "warmup": "updates of rising learning rate",
    "seed": "of text, weights and order",
    "prompts": "prompts decoded per measurement",
    "prompt_tokens": "tokens of the answer that each prompt holds already",
    "new_tokens": "tokens decoded per prompt",
    "batch": "prompts decoded together",
    "chain": "drafts per cycle in measurements",
}
KINDS = {"start": str, "story_heat": float, "peak_lr": float, "warmup": int, "seed": int, "prompt_tokens": int}
"""Of options that are not whole numbers from 1 on."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog=PROG, description=__doc__, epilog=EXAMPLES, formatter_class=Formatter)
    parser.add_argument("names", nargs="+", metavar="NAME", choices=(*EXPERIMENTS, "all"), help="experiments; all: every one")
    parser.add_argument("--target", required=True, help="folder, hub id, .gguf file, or built-in name")
    parser.add_argument("--data", help="conversations, or a folder written by eagle3-data prepare; unset: text the target writes itself")
    parser.add_argument("--out", required=True, help="folder of results, heads and features")
    sizes = parser.add_argument_group("sizes")
    for field in dataclasses.fields(Setting):
        if field.name in HELP:
            kind = KINDS.get(field.name, positive)
            sizes.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default, help=HELP[field.name])
    parser.add_argument("--no-compilation-cache", action="store_true", help="compile anew instead of keeping programs on disk")
    parser.add_argument("--traceback", action="store_true", help="show where in the code an error arose")
    return parser.parse_args(argv)


def main(args: argparse.Namespace) -> None:
    if not args.no_compilation_cache:
        use_compilation_cache()
    names = list(EXPERIMENTS) if "all" in args.names else list(dict.fromkeys(args.names))
    material = Material(Setting(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Setting)}), args.out)
    for name in names:
        run_experiment(name, material)
    print(f"written to {args.out}")


if __name__ == "__main__":
    sys.exit(run_command(PROG, main, parse()))
