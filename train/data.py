#!python
"""eagle3-data: answers by the target itself; conversations to a training set, its draft vocabulary, a look at what is supervised."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial

from tqdm import tqdm

from eagle3_jax import commands, data
from eagle3_jax.decoding.serve import Server
from eagle3_jax.journal import finished
from eagle3_jax.regenerate import TURNS, Source, Tally, regenerate
from eagle3_jax.training.features import fingerprint

PROG = "eagle3-data"
EXAMPLES = """examples:
  eagle3-data regenerate ultrachat-200k --target ./Llama-3.1-8B-Instruct --dtype bfloat16 --batch 128 --out answers.jsonl.gz
  eagle3-data prepare chats.jsonl.gz --tokenizer smollm2-135m --out prepared
  eagle3-data prepare ultrachat-200k --tokenizer meta-llama/Llama-3.1-8B-Instruct --out prepared --limit 50000
  eagle3-data vocab prepared --size 8192 --out vocab.json
  eagle3-data show prepared --count 2
"""


TEXT_OPTIONS = ("max_new_tokens", "temperature", "top_k", "top_p", "eos_token_ids")
"""The settings that decide what is answered; batch, draft and tree do not."""
reading = partial(tqdm, desc="encoding", unit=" conversations", dynamic_ncols=True, disable=None)
SOURCE = f"file (JSONL or JSON list, plain or gzip; Parquet), preset ({', '.join(data.PRESETS)}), or hf:OWNER/NAME"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = commands.Parser(prog=PROG, description=__doc__, epilog=EXAMPLES, formatter_class=commands.Formatter)
    command = partial(parser.add_subparsers(dest="command", required=True).add_parser, formatter_class=commands.Formatter)

    regenerate = command(
        "regenerate",
        help="answer the questions of a data set with the target",
        description="Answers the questions of a data set with the target itself: what a head should be trained on. A row of the batch\n"
        "whose answer has ended takes the next question at once. Results are kept in OUT.part: a killed run goes on with --resume;\n"
        "OUT appears when all is done. Answers depend on the seed and their place in the source, not on batch or interruptions.",
        epilog="example:\n  eagle3-data regenerate prompts.jsonl --target smollm2-135m --out answers.jsonl.gz --max-new-tokens 320",
    )
    regenerate.add_argument("source", help=f"{SOURCE}; a record's own answers are left out")
    regenerate.add_argument("--out", required=True, metavar="FILE", help="JSONL to write, gzip when the name ends in .gz")
    regenerate.add_argument("--resume", action="store_true", help="go on with the unfinished run in OUT.part, if there is one")
    regenerate.add_argument("--batch", type=commands.positive, default=32, metavar="N", help="conversations answered together")
    regenerate.add_argument("--turns", choices=TURNS, default="all", help="questions asked: all in sequence, or the first alone")
    regenerate.add_argument("--share", default="0/1", metavar="I/N", help="answer every N-th record, from the I-th on")
    regenerate.add_argument("--max-prompt", type=commands.positive, default=2048, metavar="N", help="tokens of the longest prompt")
    regenerate.add_argument("--temperature", type=commands.temperature, default=0.7, metavar="T", help="0: always the likeliest token")
    regenerate.add_argument("--tree", type=commands.tree_argument, default="auto", help=commands.TREE_HELP)
    add_reading_options(regenerate, (*data.FORMATS, "turns"))
    commands.add_model_options(regenerate, plain_text=False)
    commands.add_sampling_options(regenerate, max_new_tokens=512)
    regenerate.set_defaults(draft="none", run=run_regenerate)

    prepare = command(
        "prepare",
        help="encode conversations with the target's chat template",
        description="Encodes conversations with the target's chat template and writes token ids and response masks to a folder.",
        epilog="example:\n  eagle3-data prepare chats.jsonl.gz --tokenizer smollm2-135m --out prepared --max-length 1024",
    )
    prepare.add_argument("source", help=SOURCE)
    prepare.add_argument("--tokenizer", required=True, help="the target: folder, hub id, .gguf file, or built-in name")
    prepare.add_argument("--out", required=True, help="folder to write")
    prepare.add_argument("--max-length", type=int, default=2048, help="tokens per example; longer ones are cut; 0: no limit")
    prepare.add_argument("--last-turn-only", action="store_true", help="supervise the last answer of each conversation only")
    add_reading_options(prepare, data.FORMATS)
    prepare.add_argument("--show", type=int, default=2, help="examples printed at the end with their responses marked")
    prepare.add_argument("--overwrite", action="store_true", help="replace prepared data at --out")

    vocab = command(
        "vocab",
        help="choose the draft vocabulary",
        description="Keeps the most frequent response tokens of prepared data as the draft vocabulary and writes them as JSON.",
        epilog="example:\n  eagle3-data vocab prepared --size 8192 --out vocab.json",
    )
    vocab.add_argument("folder", help="prepared data")
    vocab.add_argument("--size", type=int, default=32000, help="tokens to keep")
    vocab.add_argument("--out", required=True, help="JSON file to write")

    show = command(
        "show",
        help="print examples with their responses marked",
        description="Prints the first examples of prepared data; what is supervised stands in ⟦brackets⟧, in green on a terminal.",
        epilog="example:\n  eagle3-data show prepared --count 2",
    )
    show.add_argument("folder", help="prepared data")
    show.add_argument("--count", type=int, default=3, help="examples to print")
    show.add_argument("--tokenizer", help="unset: the one the data was prepared with")
    for each in (prepare, vocab, show):
        each.add_argument("--traceback", action="store_true", help="show where in the code an error arose")
    prepare.set_defaults(run=run_prepare)
    vocab.set_defaults(run=run_vocab)
    show.set_defaults(run=lambda args: print_examples(args.folder, args.count, args.tokenizer))
    return parser.parse_args(argv)


def add_reading_options(parser: argparse.ArgumentParser, formats: Sequence[str]) -> None:
    group = parser.add_argument_group("reading the source")
    group.add_argument("--format", choices=formats, help="key that holds the conversation; unset: found per record")
    group.add_argument("--split", help="split of a hub data set; unset: the preset's, or train")
    group.add_argument("--skip-bad-lines", action="store_true", help="pass over JSONL lines that are not JSON, and count them")
    group.add_argument("--limit", type=commands.positive, metavar="N", help="records to read; unset: all")
    group.add_argument("--processes", type=commands.positive, default=os.cpu_count(), help="that encode; a small set needs only one")


def run_regenerate(args: argparse.Namespace) -> None:
    if finished(args.out):
        if args.resume:
            print(f"{args.out} is complete")
            return
        raise ValueError(f"{args.out}: exists; name another output")
    source = Source(
        args.source,
        split=args.split,
        format=args.format,
        turns=args.turns,
        system=args.system,
        limit=args.limit,
        share=share(args.share),
        max_prompt=args.max_prompt,
        skip_bad_lines=args.skip_bad_lines,
    )
    if args.draft_model is not None and args.draft == "none":
        args.draft = None
    if not args.no_compilation_cache:
        commands.use_compilation_cache()
    models = commands.load_models(args, need_tokenizer=True)
    assert models.tokenizer is not None
    options = {**commands.sampling_options(args, models), "temperature": args.temperature}
    server = Server(models.target, models.draft, batch=args.batch, tree=args.tree, **options)
    with commands.status("fingerprint of the target"):
        about = {"target": fingerprint(models.target), **{key: options[key] for key in TEXT_OPTIONS}}
    bar = tqdm(desc="answering", unit=" conversations", dynamic_ncols=True, disable=None)

    def say(tally: Tally, waiting: int) -> None:
        done = tally.records - tally.dropped.total() - waiting
        bar.total, bar.initial = done + waiting, tally.earlier
        bar.update(done - bar.n)
        tau = f", acceptance length {tally.tau:.2f}" if models.draft is not None else ""
        bar.set_postfix_str(f"{tally.rate:.1f} tokens/s{tau}")

    tally = regenerate(
        server,
        models.tokenizer,
        source,
        args.out,
        seed=args.seed,
        about=about,
        resume=args.resume,
        processes=args.processes,
        progress=reading,
        say=say,
    )
    bar.close()
    print(f"{tally}\nwritten to     {args.out}")


def share(text: str) -> tuple[int, int]:
    """ "2/8" as (2, 8)."""
    parts = text.split("/")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise ValueError(f"--share {text!r}: expected I/N, for example 0/4")
    return int(parts[0]), int(parts[1])


def run_prepare(args: argparse.Namespace) -> None:
    report = data.prepare(
        args.source,
        args.out,
        args.tokenizer,
        format=args.format,
        split=args.split,
        max_length=args.max_length or None,
        last_turn_only=args.last_turn_only,
        skip_bad_lines=args.skip_bad_lines,
        limit=args.limit,
        overwrite=args.overwrite,
        processes=args.processes,
        progress=reading,
    )
    print(f"{report}\nwritten to     {args.out}")
    print_examples(args.out, args.show, None)


def run_vocab(args: argparse.Namespace) -> None:
    vocab = data.draft_vocab(args.folder, args.size, args.out)
    print(
        f"{len(vocab.target_ids)} of {vocab.vocab_size} tokens cover {vocab.coverage:.2%} of the response tokens ({vocab.seen} kinds seen)"
    )
    print(f"written to {args.out}")


def print_examples(folder: str, count: int, tokenizer: str | None) -> None:
    marks = data.GREEN if sys.stdout.isatty() else data.BRACKETS
    for number, text in enumerate(data.show(folder, count, tokenizer, marks)):
        print(f"--- example {number}\n{text}")


def main(args: argparse.Namespace) -> None:
    args.run(args)


if __name__ == "__main__":
    sys.exit(commands.run_command(PROG, main, parse()))
