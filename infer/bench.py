#!python
"""eagle3-bench: plain and speculative decoding of sets of prompts, in turns in one process; and which tree pays on this machine."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from eagle3_jax.bench.plan_run import tune
from eagle3_jax.bench.prompt_sets import PAPER_SETS, read_sets
from eagle3_jax.bench.run import Plan, run_plan
from eagle3_jax.commands import (
    TREE_HELP,
    Formatter,
    Parser,
    add_model_options,
    add_sampling_options,
    check_writable,
    encode_prompts,
    load_models,
    positive,
    run_command,
    sampling_options,
    temperature,
    tree_argument,
    use_compilation_cache,
)
from eagle3_jax.config import DraftConfig
from eagle3_jax.pods.topology import topology_devices
from eagle3_jax.shapes import SHAPES, target_shape
from eagle3_jax.sharding import named_mesh, parse_mesh
from eagle3_jax.tree import Chain, Tree
from eagle3_jax.tree_names import tree_name

PROG = "eagle3-bench"
HERE = "this machine"
EXAMPLES = """examples:
  eagle3-bench mt_bench.jsonl --limit 20 --trees chain:2 chain:3 tree:8,3,3
  eagle3-bench prompts/ --limit 20 --temperature 0 1 --trees chain:8 tree:60,8,10 --figures figures --out bench.json
  eagle3-bench --plan --plot tuning.png
  eagle3-bench --plan mt_bench.jsonl --limit 16 --batch 8
  eagle3-bench mt_bench.jsonl --limit 8 --phases --bursts 2 --batches 1 2 4 8 16 32 64 --figures figures
  eagle3-bench --plan v5e:4x4 --target llama-3.1-8b --trees chain:3 tree:60,8,10 --batch 8 --context 8192 --libtpu ./libtpu

figures (compilation is in none of them but its own):
  acceptance length   tokens kept per target pass (tau), with a 95 % interval over prompts
  tokens/s            of whole calls, the prompt's pass included; a stop token counts, nothing after it does
  speed-up            that over plain decoding's; "after 1st token": without the prompt's pass
  cycle, cost         time of one draft-and-verify cycle; the same in steps of plain decoding
  n-alpha             acceptance rate of draft n+1 given the first n, for chains; in parentheses for trees, by depth
  per token           seconds per token after the first, over prompts; gap: between the bursts of a decode that hands over every cycle
  memory              of the compiled program, weights included; added: over plain decoding's

An interrupted run goes on with --resume.

--plan times the passes that cycles are made of, weighs them with the draft's acceptance (counted on SETs where given, else what came
with the head or was counted before), prints what every size of tree would bring, and keeps the choice for --tree auto and unset.
"""
HERE_ONLY = ("out", "figures", "resume", "traceback", "no_compilation_cache", "plan", "plot")
"""Options that may differ between an interrupted run and the one that goes on."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog=PROG, description=__doc__, epilog=EXAMPLES, formatter_class=Formatter)
    parser.add_argument(
        "sets",
        nargs="*",
        metavar="SET",
        help="prompts: a file (JSONL, JSON or Parquet with prompt, turns (the first), messages or prompt_ids), a folder of files, "
        f"hf:OWNER/NAME, one of the paper's sets ({', '.join(PAPER_SETS)}) from the hub, or paper for all five",
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="prompts per set, spread evenly over it; unset: all")
    parser.add_argument("--batch", type=positive, default=1, metavar="N", help="prompts decoded together")
    parser.add_argument("--repeats", type=positive, default=1, metavar="N", help="times each call is timed; the median counts")
    parser.add_argument("--trees", type=tree_argument, nargs="+", default=[None], metavar="TREE", help=f"one or more; {TREE_HELP}")
    parser.add_argument("--plot", metavar="FILE.png", type=Path, help="with --plan: the tuning table over depth, width and nodes")
    parser.add_argument(
        "--temperature", type=temperature, nargs="+", default=[0.0], metavar="T", help="one or more; 0: the likeliest token, always"
    )
    parser.add_argument("--phases", action="store_true", help="where the time of a cycle goes: draft, verify, commit, rest")
    parser.add_argument("--bursts", type=positive, metavar="N", help="time every cycle of N prompts per set, as a stream would show them")
    parser.add_argument(
        "--batches",
        type=positive,
        nargs="+",
        metavar="N",
        help="throughput at these batch sizes over the first set's prompts, plainly and, where there is a draft, with chains of 2 and 3",
    )
    parser.add_argument("--out", metavar="FILE.json", default="bench.json", help="all figures and all answers; written anew after each set")
    parser.add_argument("--figures", metavar="FOLDER", type=Path, help="PNGs of the figures; needs matplotlib")
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted run that had the same arguments and --out")
    parser.add_argument(
        "--plan",
        nargs="?",
        const=HERE,
        metavar="TOPOLOGY",
        help="find the tree that pays on this machine at this batch size, and keep it. With a topology, which need not be there, such as "
        "v5e:4x4 or v5p:4x4x4: compile one cycle of each tree for these TPUs and show its memory and traffic; --target is then "
        f"{', '.join(SHAPES)}, or a folder with a config.json; bfloat16; no SET; --mesh unset: "
        "tensor as far as the key/value heads go, then data",
    )
    sizing = parser.add_argument_group("--plan TOPOLOGY")
    sizing.add_argument("--context", type=positive, default=8192, metavar="N", help="cache slots per row")
    sizing.add_argument("--draft-vocab", type=positive, default=32000, metavar="N", help="tokens the head can propose")
    sizing.add_argument("--libtpu", metavar="FOLDER", help="where pip install --target FOLDER libtpu put it; unset: installed beside JAX")
    add_model_options(parser)
    add_sampling_options(parser, max_new_tokens=64)
    args = parser.parse_args(argv)
    if args.plan not in (None, HERE) and is_set(args.plan):
        # `--plan SET`: argparse cannot know that the value is the next argument.
        args.sets, args.plan = [args.plan, *args.sets], HERE
    return args


def is_set(text: str) -> bool:
    """Whether what follows --plan names prompts, and not a topology."""
    return Path(text).exists() or text.startswith("hf:") or text in (*PAPER_SETS, "paper")


def main(args: argparse.Namespace) -> None:
    if args.plan not in (None, HERE):
        plan_pod(args)
        return
    if not args.sets and not args.plan:
        raise ValueError("no SET of prompts given")
    if args.plot is not None and not args.plan:
        raise ValueError("--plot draws the table of --plan")
    check_writable(args.plot or args.out, ".png" if args.plot else ".json")
    sets = read_sets(args.sets, args.limit) if args.sets else {}
    if not args.no_compilation_cache:
        use_compilation_cache()
    models = load_models(args, need_tokenizer=any(prompt.ids is None for prompts in sets.values() for prompt in prompts))
    rows = {name: encode_prompts(prompts, models, args) for name, prompts in sets.items()}
    options = sampling_options(args, models)
    if args.plan:
        if models.draft is None:
            raise ValueError("--plan weighs drafts: name one with --draft or --draft-model")
        options["temperature"] = args.temperature[0]
        tune(models.target, models.draft, rows, args.batch, options, seed=args.seed, title=args.target, plot=args.plot, say=say)
        return
    plan = Plan(
        temperatures=tuple(args.temperature),
        trees=tuple(args.trees),
        batch=args.batch,
        repeats=args.repeats,
        seed=args.seed,
        bursts=args.bursts or 0,
        batches=tuple(args.batches or ()),
        phases=args.phases,
        out=Path(args.out),
        figures=args.figures,
        resume=args.resume,
    )
    names = {name: [prompt.name for prompt in prompts] for name, prompts in sets.items()}
    run_plan(plan, models.target, models.draft, rows, names, arguments(args), options, say=say)
    print(f"\nwritten to {args.out}")


def say(text: str) -> None:
    print(text, flush=True)


def plan_pod(args: argparse.Namespace) -> None:
    """The table of every tree's cycle on the topology, a line as soon as it is known."""
    from eagle3_jax.pods.tpu_plan import decoding_plan, decoding_shape, plan_table

    target = target_shape(args.target)
    draft = None if args.draft == "none" else DraftConfig.for_target(target, args.draft_vocab)
    devices, chip = topology_devices(args.plan, args.libtpu)
    axes = parse_mesh(args.mesh) if args.mesh else decoding_shape(target, len(devices))
    mesh = named_mesh(axes, devices)
    plans = []
    for number, tree in enumerate(args.trees if draft is not None else [None]):
        if draft is not None and not isinstance(tree, (Chain, Tree)):
            raise ValueError("--trees: name the trees to plan for, such as chain:3 tree:60,8,10")
        shape = None if tree is None else tree.tree
        name = f"{'plain' if shape is None else tree_name(tree)}, batch {args.batch}, context {args.context}"
        sampled = any(heat > 0 for heat in args.temperature)
        plans.append(decoding_plan(target, draft, shape, args.batch, args.context, mesh, chip, sampled, name))
        print("\n".join(plan_table(plans).splitlines()[-1:] if number else plan_table(plans).splitlines()), flush=True)


def arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The command line as JSON, without what says only where things go."""
    values = {key: value for key, value in vars(args).items() if key not in HERE_ONLY}
    values["trees"] = [dataclasses.asdict(tree) if isinstance(tree, (Chain, Tree)) else tree for tree in args.trees]
    return values


if __name__ == "__main__":
    sys.exit(run_command(PROG, main, parse()))
