#!python
"""eagle3-bench: plain and speculative decoding of a file of prompts, in turns in one process."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from eagle3_jax import tables
from eagle3_jax.benchmark import Benchmark, Programs, Sample, benchmark, modes_of
from eagle3_jax.commands import (
    TREE_HELP,
    Formatter,
    Models,
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
    write_json,
)
from eagle3_jax.prompts import Prompt, read_prompts

PROG = "eagle3-bench"
EXAMPLES = """examples:
  eagle3-bench mt_bench.jsonl --limit 20 --trees chain:2 chain:3 tree:8,3,3
  eagle3-bench mt_bench.jsonl gsm8k.jsonl --temperature 0 1 --max-new-tokens 128 --out bench.json

figures (compilation is in none of them but its own):
  acceptance length   tokens kept per target pass, with a 95 % interval over prompts
  tokens/s            of whole calls, the prompt's pass included; a stop token counts, nothing after it does
  speed-up            that over plain decoding's; "after 1st token": without the prompt's pass
  cycle, cost         time of one draft-and-verify cycle; the same in steps of plain decoding
  n-alpha             acceptance rate of draft n+1 given the first n, for chains; in parentheses for trees, by depth
"""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog=PROG, description=__doc__, epilog=EXAMPLES, formatter_class=Formatter)
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="prompts: JSONL, JSON or Parquet with prompt, turns (the first), messages or prompt_ids"
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="prompts per file, spread evenly over it; unset: all")
    parser.add_argument("--batch", type=positive, default=1, metavar="N", help="prompts decoded together")
    parser.add_argument("--repeats", type=positive, default=1, metavar="N", help="times each call is timed; the median counts")
    parser.add_argument("--trees", type=tree_argument, nargs="+", default=["auto"], metavar="TREE", help=f"one or more; {TREE_HELP}")
    parser.add_argument(
        "--temperature", type=temperature, nargs="+", default=[0.0], metavar="T", help="one or more; 0: the likeliest token, always"
    )
    parser.add_argument("--out", metavar="FILE.json", default="bench.json", help="all figures and all answers; written anew after each set")
    add_model_options(parser)
    add_sampling_options(parser, max_new_tokens=64)
    args = parser.parse_args(argv)
    args.trees = [tree_argument(tree) if isinstance(tree, str) else tree for tree in args.trees]
    return args


def main(args: argparse.Namespace) -> None:
    check_writable(args.out, ".json")
    sets = {Path(file).name.split(".")[0]: spread(read_prompts(file), args.limit) for file in args.files}
    if len(sets) < len(args.files):
        raise ValueError("two files have the same name; their figures could not be told apart")
    if not args.no_compilation_cache:
        use_compilation_cache()
    models = load_models(args, need_tokenizer=any(prompt.ids is None for prompts in sets.values() for prompt in prompts))
    rows = {name: encode_prompts(prompts, models, args) for name, prompts in sets.items()}
    options = sampling_options(args, models)
    programs = Programs(models.target, models.draft)
    results: list[dict[str, Any]] = []
    benchmarks: dict[tuple[float, str], Benchmark] = {}
    for heat in dict.fromkeys(args.temperature):
        for name, prompts in sets.items():
            result = measure(args, models, rows[name], {**options, "temperature": heat}, programs, f"{name}, T={heat:g}")
            benchmarks[heat, name] = result
            results.append({"set": name, "prompts": [prompt.name for prompt in prompts], **result.to_dict()})
            write_json(args.out, {"arguments": arguments(args), "results": results})
            print(f"\n{name}: {len(prompts)} prompts, T = {heat:g}, batch {args.batch}\n")
            print(tables.benchmark_table(result.modes), flush=True)
    if len(sets) > 1:
        for heat in dict.fromkeys(args.temperature):
            print(f"\nmean of the {len(sets)} sets, T = {heat:g}\n")
            print(tables.mean_table([benchmarks[heat, name].modes for name in sets]))
    print(f"\nwritten to {args.out}")


def measure(
    args: argparse.Namespace, models: Models, rows: list[list[int]], options: dict[str, Any], programs: Programs, title: str
) -> Benchmark:
    """The benchmark of one set at one temperature, under a progress bar."""
    answers = len(rows) * len(modes_of(models.draft, args.trees))
    with tqdm(total=answers, desc=title, unit="answer", dynamic_ncols=True, disable=None) as bar:

        def progress(sample: Sample) -> None:
            bar.update(len(sample.prompts))
            bar.set_postfix_str(f"{sample.mode} tau {sample.output.tau:.2f}")

        return benchmark(
            models.target,
            models.draft,
            rows,
            args.trees,
            batch=args.batch,
            seed=args.seed,
            repeats=args.repeats,
            progress=progress,
            programs=programs,
            **options,
        )


def spread(prompts: list[Prompt], limit: int | None) -> list[Prompt]:
    """`limit` prompts at even distances: sets are often sorted by category."""
    if limit is None or limit >= len(prompts):
        return prompts
    return [prompts[i * len(prompts) // limit] for i in range(limit)]


def arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The command line as JSON."""
    values = dict(vars(args))
    values["trees"] = [dataclasses.asdict(tree) if tree is not None else "auto" for tree in args.trees]
    return values


if __name__ == "__main__":
    sys.exit(run_command(PROG, main, parse()))
