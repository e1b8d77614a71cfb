#!python
"""eagle3-data: conversations to a training set, its draft vocabulary, and a look at what is supervised."""

from __future__ import annotations

import argparse
import sys
from functools import partial

from eagle3_jax import data

EXAMPLES = """examples:
  eagle3-data prepare chats.jsonl.gz --tokenizer smollm2-135m --out prepared
  eagle3-data prepare ultrachat-200k --tokenizer meta-llama/Llama-3.1-8B-Instruct --out prepared --limit 50000
  eagle3-data vocab prepared --size 8192 --out vocab.json
  eagle3-data show prepared --count 2
"""


class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults shown where there are any, examples kept as written."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False) else super()._get_help_string(action)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="eagle3-data", description=__doc__, epilog=EXAMPLES, formatter_class=Formatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = partial(commands.add_parser, formatter_class=Formatter)

    prepare = command(
        "prepare",
        help="encode conversations with the target's chat template",
        description="Encodes conversations with the target's chat template and writes token ids and response masks to a folder.",
        epilog="example:\n  eagle3-data prepare chats.jsonl.gz --tokenizer smollm2-135m --out prepared --max-length 1024",
    )
    prepare.add_argument(
        "source", help=f"file (JSONL or JSON list, plain or gzip; Parquet), preset ({', '.join(data.PRESETS)}), or hf:OWNER/NAME"
    )
    prepare.add_argument("--tokenizer", required=True, help="the target: folder, hub id, .gguf file, or built-in name")
    prepare.add_argument("--out", required=True, help="folder to write")
    prepare.add_argument("--format", choices=data.FORMATS, help="key that holds the conversation; unset: found per record")
    prepare.add_argument("--split", help="split of a hub data set; unset: the preset's, or train")
    prepare.add_argument("--max-length", type=int, default=2048, help="tokens per example; longer ones are cut; 0: no limit")
    prepare.add_argument("--last-turn-only", action="store_true", help="supervise the last answer of each conversation only")
    prepare.add_argument("--skip-bad-lines", action="store_true", help="pass over JSONL lines that are not JSON, and count them")
    prepare.add_argument("--limit", type=int, help="conversations to read; unset: all")
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
    return parser.parse_args(argv)


def run_prepare(args: argparse.Namespace) -> None:
    from tqdm import tqdm

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
        progress=partial(tqdm, desc="encoding", unit=" conversations", total=args.limit, dynamic_ncols=True),
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


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        if args.command == "prepare":
            run_prepare(args)
        elif args.command == "vocab":
            run_vocab(args)
        else:
            print_examples(args.folder, args.count, args.tokenizer)
    except (ValueError, OSError) as error:
        print(f"eagle3-data: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
