#!python
"""eagle3-generate: answer prompts with speculative decoding, and see what it brings."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any

from eagle3_jax import terminal
from eagle3_jax.bench import show, tables
from eagle3_jax.bench.benchmark import PLAIN, Programs, benchmark
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
    status,
    temperature,
    tree_argument,
    use_compilation_cache,
)
from eagle3_jax.compile_clock import CompileClock
from eagle3_jax.decoding.auto import best_tree, observe, resolve
from eagle3_jax.decoding.generate import Output, prepare, read
from eagle3_jax.decoding.live import show as show_stream
from eagle3_jax.decoding.segments import CYCLES
from eagle3_jax.decoding.stream import stream
from eagle3_jax.prompts import Prompt, PromptError, read_prompts
from eagle3_jax.tree import TreeChoice
from eagle3_jax.tree_names import tree_name

PROG = "eagle3-generate"
EXAMPLES = """examples:
  eagle3-generate "Why is the sky blue?" --compare
  eagle3-generate "Why is the sky blue?" --tree tree:16,4,4 --show-tree
  eagle3-generate --file prompts.jsonl --temperature 0.8 --json > answers.jsonl
  eagle3-generate "Tell me a story." --stream
  echo "Once upon a time" | eagle3-generate --target ./model --draft ./head --no-chat-template

Answers go to stdout, figures about them to stderr.
"""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog=PROG, description=__doc__, epilog=EXAMPLES, formatter_class=Formatter)
    parser.add_argument("prompt", nargs="?", help="what to answer; unset: --file, --prompt-ids or stdin; -: stdin")
    parser.add_argument(
        "--file", metavar="FILE", help="prompts: JSONL, JSON or Parquet with prompt, turns, messages or prompt_ids; else one text"
    )
    parser.add_argument("--prompt-ids", metavar="IDS", help="the prompt as token ids, for example 1,2,3")
    parser.add_argument("--limit", type=positive, metavar="N", help="prompts of --file to answer; unset: all")
    parser.add_argument("--batch", type=positive, default=1, metavar="N", help="prompts decoded together")
    add_model_options(parser)
    add_sampling_options(parser, max_new_tokens=256)
    parser.add_argument("--temperature", type=temperature, default=0.0, metavar="T", help="0: the likeliest token, always")
    parser.add_argument("--tree", type=tree_argument, help=TREE_HELP)
    output = parser.add_argument_group("output")
    output.add_argument("--compare", action="store_true", help="decode plainly too, in turns: the same text? how much faster?")
    output.add_argument(
        "--repeats", type=positive, default=2, metavar="N", help="times each answer is timed with --compare; the median counts"
    )
    output.add_argument(
        "--show-tree", nargs="?", const="", metavar="FILE.png", help="draw the drafted trees and the path that was kept, as text or as PNG"
    )
    output.add_argument("--show-cycles", type=positive, default=4, metavar="N", help="trees that --show-tree draws per answer")
    output.add_argument("--stream", action="store_true", help="write the answer as it comes; prompts one by one")
    output.add_argument("--cycles", type=positive, default=CYCLES, metavar="N", help="cycles between two looks at what has come (--stream)")
    output.add_argument("--json", action="store_true", help="one JSON object per answer on stdout, for programs")
    output.add_argument("--quiet", action="store_true", help="answers only, no figures on stderr")
    args = parser.parse_args(argv)
    if args.show_tree and not args.show_tree.lower().endswith(".png") and args.prompt is args.file is args.prompt_ids is None:
        # `--show-tree "a prompt"`: argparse cannot know that the value is the next argument.
        args.prompt, args.show_tree = args.show_tree, ""
    if sum(given is not None for given in (args.prompt, args.file, args.prompt_ids)) > 1:
        parser.error("give one of: a prompt, --file, --prompt-ids")
    if args.draft == "none" and (args.compare or args.show_tree is not None):
        parser.error(f"{'--compare' if args.compare else '--show-tree'} needs a draft")
    if args.stream:
        given = {"--compare": args.compare, "--show-tree": args.show_tree is not None, "--json": args.json, "--batch": args.batch != 1}
        if (other := next((name for name, used in given.items() if used), None)) is not None:
            parser.error(f"--stream does not go with {other}")
    return args


def prompts_of(args: argparse.Namespace) -> list[Prompt]:
    if args.file is not None:
        return read_prompts(args.file, args.limit)
    if args.prompt_ids is not None:
        try:
            ids = tuple(int(part) for part in args.prompt_ids.replace(",", " ").split())
        except ValueError:
            raise PromptError(f"--prompt-ids {args.prompt_ids!r}: expected whole numbers, for example 1,2,3") from None
        if not ids:
            raise PromptError("--prompt-ids is empty: nothing to answer")
        return [Prompt("prompt", ids=ids)]
    if args.prompt not in (None, "-"):
        return [Prompt.of_text(args.prompt)]
    if args.prompt is None and sys.stdin.isatty():
        raise PromptError(f'no prompt: write {PROG} "your question", or use --file, --prompt-ids or stdin')
    return [Prompt.of_text(sys.stdin.read(), "stdin")]


def main(args: argparse.Namespace) -> None:
    if args.show_tree:
        check_writable(args.show_tree, ".png")
    prompts = prompts_of(args)
    if not args.no_compilation_cache:
        use_compilation_cache()
    models = load_models(args, need_tokenizer=any(prompt.ids is None for prompt in prompts))
    rows = encode_prompts(prompts, models, args)
    options = {**sampling_options(args, models), "temperature": args.temperature}
    programs = Programs(models.target, models.draft)
    if args.stream:
        follow(args, models, prompts, rows, options)
    elif args.compare:
        compare(args, models, prompts, rows, options, programs)
    else:
        if args.show_tree is not None:
            args.tree, _ = contestant(args, models)  # plain decoding has no tree to show
        answer(args, models, prompts, rows, options, programs)


def follow(args: argparse.Namespace, models: Models, prompts: list[Prompt], rows: list[list[int]], options: dict[str, Any]) -> None:
    """Every answer as it comes."""
    clock = CompileClock()
    for i, ids in enumerate(rows):
        answer = stream(models.target, models.draft, [ids], seed=(args.seed + i) % 2**64, tree=args.tree, cycles=args.cycles, **options)
        if len(prompts) > 1:
            print(f"--- {prompts[i].name}")
        shown = show_stream(answer, models.text, clock)
        if not args.quiet:
            print(f"[{shown.figures()}]", file=sys.stderr)
        if shown.interrupted:
            raise KeyboardInterrupt


def decode(
    args: argparse.Namespace, models: Models, rows: list[list[int]], first: int, options: dict[str, Any], programs: Programs, record: bool
) -> tuple[Output, str, float]:
    """One batch: its output, the name of the tree, and the seconds of the call."""
    request, config = prepare(
        models.target,
        models.draft,
        rows,
        seed=[args.seed + first + i for i in range(len(rows))],
        tree=args.tree,
        record_trees=record,
        **options,
    )
    mode = tree_name(config.tree)
    with status("compiling (kept for the next time)" if not args.no_compilation_cache else "compiling"):
        call = programs.get(mode, request, config, warm=False)
    with status("decoding"):
        start = time.perf_counter()
        state = call(request)
        seconds = time.perf_counter() - start
    output = read(state)
    if args.tree == "auto" and models.draft is not None:
        observe(models.target, models.draft, config.tree, output.accept_lengths)
    return output, mode, seconds


def answer(
    args: argparse.Namespace, models: Models, prompts: list[Prompt], rows: list[list[int]], options: dict[str, Any], programs: Programs
) -> None:
    drawn: list[show.CycleTree] = []
    for start in range(0, len(rows), args.batch):
        batch = rows[start : start + args.batch]
        compiled = sum(programs.compile_seconds.values())
        output, mode, seconds = decode(args, models, batch, start, options, programs, record=args.show_tree is not None)
        compiled = sum(programs.compile_seconds.values()) - compiled
        for i, tokens in enumerate(output.tokens):
            prompt, lengths = prompts[start + i], output.accept_lengths[i]
            one = dataclasses.replace(output, tokens=[tokens], accept_lengths=[lengths], trees=None)
            if args.json:
                record = {
                    "prompt": prompt.name,
                    "prompt_tokens": len(batch[i]),
                    "text": models.text(tokens),
                    "tokens": tokens,
                    "finish_reason": output.finish_reasons[i],
                    "tree": mode,
                    "accept_lengths": lengths,
                    "acceptance_length": one.tau,
                    "batch": len(batch),
                    "batch_seconds": seconds,
                    "compile_seconds": compiled,
                }
                if output.trees is not None:
                    record["trees"] = [{"tokens": nodes, "parents": parents} for nodes, parents in output.trees[i]]
                print(json.dumps(record, ensure_ascii=False), flush=True)
            else:
                if len(prompts) > 1:
                    print(f"--- {prompt.name}")
                print(models.text(tokens), flush=True)
            if output.trees is not None:
                drawn += draw(args, models, output, i)
        if not args.quiet:
            print(summary(output, mode, seconds, compiled), file=sys.stderr)
    save(args, models, drawn)


def summary(output: Output, mode: str, seconds: float, compiled: float) -> str:
    count = sum(map(len, output.tokens))
    ends = {"stop": "a stop token", "length": "the limit"}
    ended = " and ".join(ends[reason] for reason in dict.fromkeys(output.finish_reasons))
    tau = "" if mode == PLAIN else f", acceptance length {output.tau:.2f}"
    return (
        f"[{mode}: {count} tokens in {terminal.duration(seconds)} ({count / seconds:.1f} tokens/s){tau}; "
        f"ended at {ended}; compiling took {terminal.duration(compiled)} more]"
    )


def compare(
    args: argparse.Namespace, models: Models, prompts: list[Prompt], rows: list[list[int]], options: dict[str, Any], programs: Programs
) -> None:
    args.tree, note = contestant(args, models)
    with status("compiling and decoding, plainly and speculatively in turns"):
        result = benchmark(
            models.target,
            models.draft,
            rows,
            [args.tree],
            batch=args.batch,
            seed=args.seed,
            repeats=args.repeats,
            programs=programs,
            **options,
        )
    plain, fast = result.modes
    texts = {
        mode: [tokens for sample in result.samples if sample.mode == mode for tokens in sample.tokens] for mode in (plain.mode, fast.mode)
    }
    pairs = list(zip(prompts, texts[plain.mode], texts[fast.mode], strict=True))
    if args.json:
        answers = [
            {"prompt": prompt.name, "plain": models.text(a), "speculative": models.text(b), "same_tokens": a == b} for prompt, a, b in pairs
        ]
        print(json.dumps({"answers": answers, **result.to_dict()}, ensure_ascii=False))
    else:
        for prompt, a, b in pairs:
            if len(pairs) > 1:
                print(f"--- {prompt.name}")
            print(both_texts(models, a, b, fast.mode), end="\n\n")
        print(tables.comparison_table(plain, fast), end="\n\n")
        print(verdict(pairs))
        if note:
            print(note)
        if fast.speed_up is not None:
            print(f"{fast.speed_up.value:.2f} times as fast as plain decoding")
    if args.show_tree is not None:
        drawn = []
        for start in range(0, len(rows), args.batch):
            output, _, _ = decode(args, models, rows[start : start + args.batch], start, options, programs, record=True)
            for i in range(len(output.tokens)):
                drawn += draw(args, models, output, i)
        save(args, models, drawn)


def contestant(args: argparse.Namespace, models: Models) -> tuple[TreeChoice, str]:
    """What stands against plain decoding, and a note: where plain decoding was chosen, the best tree all the same."""
    assert models.draft is not None
    if resolve(models.target, models.draft, args.tree, args.batch, chains_only=args.rule == "rejection") is not None:
        return args.tree, ""
    best = best_tree(models.target, models.draft, args.batch, chains_only=args.rule == "rejection")
    return best, f"on this machine plain decoding is expected to be fastest and is what --tree auto takes; {tree_name(best)} is shown"


def both_texts(models: Models, plain: Sequence[int], fast: Sequence[int], mode: str) -> str:
    """Beside each other on a terminal, below each other in a pipe."""
    a, b = models.text(plain), models.text(fast)
    if sys.stdout.isatty():
        return terminal.side_by_side(a, b, ("plain", f"speculative ({mode})"), min(shutil.get_terminal_size().columns, 160))
    return f"plain:\n{a}\n\nspeculative ({mode}):\n{b}"


def verdict(pairs: Sequence[tuple[Prompt, Sequence[int], Sequence[int]]]) -> str:
    apart = [(prompt, a, b) for prompt, a, b in pairs if list(a) != list(b)]
    if not apart:
        return f"same text: yes, all {sum(len(a) for _, a, _ in pairs)} tokens"
    prompt, a, b = apart[0]
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return (
        f"same text: no, {len(apart)} of {len(pairs)} answers differ; {prompt.name} from token {at + 1} on. "
        "Passes of different width round differently, so two tokens that are equally likely to the last bits can change places "
        "(in bfloat16 often, in float32 about once in 100,000 tokens)."
    )


def draw(args: argparse.Namespace, models: Models, output: Output, row: int) -> list[show.CycleTree]:
    """Prints the first trees of a row as text, or returns them for the PNG."""
    trees = show.cycle_trees(output, row)[: args.show_cycles]
    if args.show_tree:
        return trees
    stream = sys.stderr if args.json else sys.stdout
    style = tree_style(stream)
    print(f"\n{show.legend(style)}", file=stream)
    for tree in trees:
        print(f"\n{show.tree_text(tree, models.token, style)}", file=stream)
    if not trees:
        print("(no tree: the answer ended with the first token)", file=stream)
    return []


def tree_style(stream: Any) -> show.Style:
    """Colours on a terminal; plain ASCII where the stream's encoding lacks the marks."""
    try:
        "●○✚├─└│".encode(stream.encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return show.ASCII
    return show.COLOUR if stream.isatty() else show.UNICODE


def save(args: argparse.Namespace, models: Models, trees: list[show.CycleTree]) -> None:
    if not args.show_tree:
        return
    show.save_trees_png(args.show_tree, trees[: args.show_cycles], models.token)
    if not args.quiet:
        print(f"[trees drawn in {args.show_tree}]", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run_command(PROG, main, parse()))
