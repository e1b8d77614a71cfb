#!python
"""eagle3-lossless: is speculative text plain text? Every way of decoding against plain decoding, position by position."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import jax

from eagle3_jax.bench.lossless import TIE, Case, Report, sweep
from eagle3_jax.commands import (
    BROKEN,
    Formatter,
    Parser,
    add_model_options,
    check_writable,
    encode_prompts,
    load_models,
    positive,
    run_command,
    temperature,
    tree_argument,
    use_compilation_cache,
)
from eagle3_jax.prompts import read_prompts
from eagle3_jax.sharding import named_mesh, parse_mesh
from eagle3_jax.tree_names import SYNTAX

PROG = "eagle3-lossless"
EXAMPLES = f"""examples:
  eagle3-lossless mt_bench.jsonl --limit 20 --trees plain chain:3 tree:16,4,4 auto --temperatures 0 0.8 --batches 1 8
  eagle3-lossless alpaca.jsonl --target ./stories --draft-model ./stories --int8 draft --no-chat-template --prompt-tokens 16

Every row of every case is compared with the same prompt decoded plainly and alone. Two passes of different width round differently,
so a first difference counts as a fault unless the plain run's two best scores, or the token's distance to the edge of its top-k or
top-p set, were within {TIE:g}. Every difference is printed with that gap. Cases go to --out, one JSON line each; a case that is in
the file already is not run again, so an interrupted run goes on where it stopped. Exit code 1: there was a fault.
"""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog=PROG, description=__doc__, epilog=EXAMPLES, formatter_class=Formatter)
    parser.add_argument("files", nargs="+", metavar="FILE", help="prompts: JSONL, JSON or Parquet")
    parser.add_argument("--limit", type=positive, metavar="N", help="prompts per file; unset: all")
    parser.add_argument("--prompt-tokens", type=positive, metavar="N", help="cut longer prompts to their first N tokens")
    parser.add_argument("--max-new-tokens", type=positive, default=64, metavar="N", help="tokens per answer at most")
    cases = parser.add_argument_group("cases: all combinations")
    cases.add_argument(
        "--trees", type=way, nargs="+", default=["chain:3", "tree:16,4,4"], metavar="TREE", help=f'"plain", {SYNTAX}; one or more'
    )
    cases.add_argument("--temperatures", type=temperature, nargs="+", default=[0.0, 0.8], metavar="T")
    cases.add_argument(
        "--filters", type=sampling_filter, nargs="*", default=[], metavar="K,P", help="top-k,top-p at temperatures above 0, beside none"
    )
    cases.add_argument(
        "--meshes", type=mesh_argument, nargs="+", default=[""], metavar="AXES", help='"none", or such as data=2,tensor=4; one or more'
    )
    cases.add_argument("--streams", choices=("no", "yes"), nargs="+", default=["no"], help="in one call, or as a stream; one or both")
    cases.add_argument("--batches", type=positive, nargs="+", default=[1, 8], metavar="N")
    parser.add_argument("--seed", type=int, default=1000, help="of the first prompt; the next ones count up")
    parser.add_argument("--out", metavar="FILE.jsonl", default="lossless.jsonl", help="a line per finished case")
    add_model_options(parser)
    args = parser.parse_args(argv)
    if args.mesh:
        parser.error("--mesh: the plain text that all is compared with comes from one device; name meshes to compare with --meshes")
    args.trees = [way(tree) if isinstance(tree, str) and tree != "auto" else tree for tree in args.trees]
    return args


def way(text: str) -> Any:
    return text if text == "plain" else tree_argument(text)


def mesh_argument(text: str) -> str:
    if text == "none":
        return ""
    try:
        parse_mesh(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def sampling_filter(text: str) -> tuple[int, float]:
    try:
        top_k, top_p = text.split(",")
        values = int(top_k), float(top_p)
    except ValueError:
        values = (-1, 0.0)
    if values[0] < 0 or not 0 < values[1] <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be TOP_K,TOP_P, for example 40,1 or 0,0.9")
    return values


def all_cases(args: argparse.Namespace) -> list[Case]:
    """Greedy without filters; every other temperature with none and with each filter."""
    cases = []
    for heat, (top_k, top_p) in itertools.product(args.temperatures, [(0, 1.0), *args.filters]):
        if heat > 0 or (top_k, top_p) == (0, 1.0):
            for mesh, stream, tree, batch in itertools.product(args.meshes, args.streams, args.trees, args.batches):
                cases.append(Case(tree, batch, heat, top_k, top_p, args.seed, mesh, stream == "yes"))
    return list(dict.fromkeys(cases))


def main(args: argparse.Namespace) -> None:
    check_writable(args.out, ".jsonl")
    prompts = [prompt for file in args.files for prompt in read_prompts(file, args.limit)]
    if not args.no_compilation_cache:
        use_compilation_cache()
    sizes = {mesh: parse_mesh(mesh) for mesh in args.meshes if mesh}
    if sizes:
        # Takes effect on a CPU alone, and only before the first array.
        wanted = max(math.prod(axes.values()) for axes in sizes.values())
        jax.config.update("jax_num_cpu_devices", max(jax.config.values["jax_num_cpu_devices"], wanted))
    models = load_models(args, need_tokenizer=any(prompt.ids is None for prompt in prompts))
    on_mesh = {}
    for name, axes in sizes.items():
        placed = load_models(args, False, named_mesh(axes, jax.devices()[: math.prod(axes.values())]))
        on_mesh[name] = placed.target, placed.draft
    rows = encode_prompts(prompts, models, args, args.prompt_tokens)
    run = {
        "target": args.target,
        "draft": args.draft_model or args.draft,
        "int8": args.int8,
        "dtype": args.dtype,
        "prompts": rows,
        "max_new_tokens": args.max_new_tokens,
    }
    done = finished(Path(args.out), run)
    cases = [case for case in all_cases(args) if case.name not in done]
    if models.draft is None:
        cases = [case for case in cases if case.tree == "plain"]
    start = time.perf_counter()
    for case, report, tau in sweep(models.target, models.draft, rows, cases, args.max_new_tokens, on_mesh):
        line = {
            "case": case.name,
            "positions": report.positions,
            "divergences": [
                {k: v if v is None or math.isfinite(v) else None for k, v in dataclasses.asdict(d).items()} for d in report.divergences
            ],
            "faults": len(report.faults),
            "acceptance_length": round(tau, 4),
            "seconds": round(time.perf_counter() - start, 1),
        }
        append_line(Path(args.out), line)
        done[case.name] = line
        show(case, report, tau)
        # No case needs another's programs, and a process can hold the code of some sixty cases at most: Linux limits its mappings.
        jax.clear_caches()
    positions, faults = (sum(line[key] for line in done.values()) for key in ("positions", "faults"))
    ties = sum(len(line["divergences"]) for line in done.values()) - faults
    print(f"{len(done)} cases, {positions} positions: {ties} near-ties, {faults} faults; written to {args.out}")
    if faults:
        raise SystemExit(BROKEN)


def show(case: Case, report: Report, tau: float) -> None:
    print(
        f"{case.name}: {report.positions} positions, {len(report.divergences)} divergences, {len(report.faults)} faults, tau {tau:.3f}",
        flush=True,
    )
    for d in report.divergences:
        kind = "near-tie" if d.near_tie else "FAULT"
        where = f"prompt {d.row} position {d.position}: {d.plain} / {d.speculative}"
        print(f"    {kind}: {where}, gap {d.gap:.2e}, edge {d.edge:.2e}", flush=True)


def finished(path: Path, run: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The finished cases of a file that this very run began, by name; a new file begins with what is run.

    Raises ValueError when the file belongs to another run. A last line that was cut off is run again.
    """
    if not path.exists():
        append_line(path, run)
        return {}
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            lines.append(json.loads(text))
        except ValueError:
            print(f"{PROG}: warning: {path}, line {number} is not complete and counts for nothing", file=sys.stderr)
    if not lines or lines[0] != json.loads(json.dumps(run)):
        raise ValueError(f"{path} holds another run (other models, prompts or lengths); name another file with --out, or delete it")
    return {line["case"]: line for line in lines[1:]}


def append_line(path: Path, value: dict[str, Any]) -> None:
    """Adds a line, behind a line break where the last one was cut off."""
    with path.open("a+b") as file:
        end = file.seek(0, 2)
        if end:
            file.seek(end - 1)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(value).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(run_command(PROG, main, parse()))
