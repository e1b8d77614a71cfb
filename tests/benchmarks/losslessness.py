"""Speculative text against plain text, position by position; every divergence printed with how close the choice was.

    python tests/benchmarks/losslessness.py mt_bench.jsonl --trees chain:3 --temperatures 0 0.8 --batches 1 4 --max-new-tokens 48
    python tests/benchmarks/losslessness.py stories.jsonl --target stories260k --draft my_head --trees tree:60,8,10 --no-chat-template

Each row of a batch is compared with the same prompt decoded plainly and alone, in float32. Temperatures above 0 are run
without filters, and with each of --filters (top_k,top_p). One JSON line per case goes to --out; a case that is in the file
already is not run again. The exit code is 1 when a divergence is no near-tie (eagle3_jax/lossless.py says what that is).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import time
from pathlib import Path

import eagle3_jax as e3
from eagle3_jax.commands import use_compilation_cache
from eagle3_jax.lossless import Case, sweep
from eagle3_jax.prompts import encode_prompt, read_prompts
from eagle3_jax.tree_names import parse_tree


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", help="JSONL with prompt, turns (the first), messages or prompt_ids")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--draft", default="smollm2-135m")
    parser.add_argument("--trees", nargs="+", default=["chain:3"])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.8])
    parser.add_argument("--filters", nargs="*", default=[], metavar="TOP_K,TOP_P", help="e.g. 40,1 0,0.9 (default: none)")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--limit", type=int, help="prompts (default: all)")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--no-chat-template", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("losslessness.jsonl"))
    args = parser.parse_args()

    use_compilation_cache()
    target = e3.load_target(args.target)
    draft = e3.load_draft(args.draft, target)
    tokenizer = e3.load_tokenizer(args.target)
    prompts = [encode_prompt(p, tokenizer, chat=False if args.no_chat_template else None) for p in read_prompts(args.prompts, args.limit)]
    done = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    cases = [case for case in all_cases(args) if case.name not in {line["case"] for line in done}]
    start = time.perf_counter()
    for case, report, tau in sweep(target, draft, prompts, cases, args.max_new_tokens):
        line = {
            "case": case.name,
            "positions": report.positions,
            "divergences": [dataclasses.asdict(d) for d in report.divergences],
            "faults": len(report.faults),
            "acceptance_length": round(tau, 4),
            "seconds": round(time.perf_counter() - start, 1),
        }
        with args.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        done.append(line)
        print(
            f"{case.name}: {report.positions} positions, {len(report.divergences)} divergences, {line['faults']} faults, tau {tau:.3f}",
            flush=True,
        )
        for d in report.divergences:
            print(f"    prompt {d.row} position {d.position}: {d.plain} / {d.speculative}, gap {d.gap:.2e}, edge {d.edge:.2e}", flush=True)
    positions, faults = sum(line["positions"] for line in done), sum(line["faults"] for line in done)
    ties = sum(len(line["divergences"]) for line in done) - faults
    print(f"{len(done)} cases, {positions} positions: {ties} near-ties, {faults} faults")
    return 1 if faults else 0


def all_cases(args: argparse.Namespace) -> list[Case]:
    """Greedy without filters; every other temperature with none and with each filter."""
    filters = [(0, 1.0)] + [(int(k), float(p)) for k, p in (f.split(",") for f in args.filters)]
    cases = []
    for temperature, (top_k, top_p) in itertools.product(args.temperatures, filters):
        if temperature == 0 and (top_k, top_p) != (0, 1.0):
            continue
        for tree, batch in itertools.product(args.trees, args.batches):
            cases.append(Case(parse_tree(tree), batch, temperature, top_k, top_p, seed=1000))
    return cases


if __name__ == "__main__":
    sys.exit(main())
