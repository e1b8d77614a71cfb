#!python
"""eagle3-convert: look into heads and targets, carry heads from one dialect to another, and check that a head is read as it was made."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

from eagle3_jax import convert
from eagle3_jax.commands import (
    Formatter,
    Parser,
    add_model_options,
    encode_prompts,
    load_models,
    positive,
    run_command,
    use_compilation_cache,
)
from eagle3_jax.config import TAP_CONVENTIONS
from eagle3_jax.diagnose import diagnose
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.prompts import Prompt, read_prompts
from eagle3_jax.weights.dialects import DIALECTS

PROG = "eagle3-convert"
EXAMPLES = """examples:
  eagle3-convert inspect ./head                                # what is it, what would be loaded, what is odd
  eagle3-convert head ./head ./out --to speculators --target-name meta-llama/Llama-3.1-8B-Instruct
  eagle3-convert target model.gguf ./folder                    # a target as a Hugging Face folder
  eagle3-convert verify --target smollm2-135m --draft ./head   # is it read as it was made?
"""
QUESTIONS = (
    "Explain why the sky is blue.",
    "Write a short story about a lighthouse keeper.",
    "Give three tips for learning a language.",
    "What is the difference between a list and a tuple in Python?",
)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog=PROG, description=__doc__, epilog=EXAMPLES, formatter_class=Formatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=f"{PROG} {name}: {text}", formatter_class=Formatter)
        made.add_argument("--json", action="store_true", help="one JSON object on stdout, for programs")
        return made

    look = command("inspect", "what a head or a target is, what would be loaded from it, and what is odd")
    look.add_argument("path", help="folder, hub id, .gguf file, or built-in name (a target's)")
    look.add_argument("--target", help="check a head against this target: folder, hub id, .gguf file, or built-in name")
    add_reading_options(look)

    head = command("head", "a head in another dialect, with its card")
    add_paths(head, "the head: folder, hub id, or built-in name")
    head.add_argument(
        "--to", choices=sorted(DIALECTS), default="official", help="dialect to write; official: read by vLLM, SGLang and here"
    )
    head.add_argument(
        "--target", help="its target, loaded: settles default taps and drops an embedding that is the target's; unset: as the head says"
    )
    head.add_argument("--target-name", help="what card and config call the target, best its hub id; unset: --target, or the source's own")
    head.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="type on disk; unset: the source's")
    add_reading_options(head)
    head.add_argument("--overrule", action="store_true", help="let --taps win over taps that the files store")
    head.add_argument("--norm-before-residual", choices=("true", "false"), help="correct a config that is wrong about it")
    for name, text in (
        ("data", "what it was trained on"),
        ("recipe", "how it was trained"),
        ("acceptance", "measured acceptance, and how"),
    ):
        head.add_argument(f"--{name}", metavar="TEXT", help=f"for the card: {text}")

    whole = command("target", "a target as a Hugging Face folder (safetensors), which vLLM, SGLang and transformers read")
    add_paths(whole, "the target: folder, hub id, .gguf file, or built-in name")
    whole.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="float32", help="type on disk")

    verify = command("verify", "acceptance of a head as it is read, with taps one off, other rotary bases and the other residual")
    add_model_options(verify)
    add_reading_options(verify)
    verify.add_argument("--prompts", metavar="FILE", help="JSONL, JSON or Parquet, or one text; unset: four questions")
    verify.add_argument("--limit", type=positive, default=8, metavar="N", help="prompts of the file")
    verify.add_argument("--max-new-tokens", type=positive, default=64, metavar="N", help="tokens per answer")
    verify.add_argument("--steps", type=positive, default=3, metavar="N", help="drafts per cycle")
    for sub in (look, head, whole):
        sub.add_argument("--traceback", action="store_true", help="show where in the code an error arose")
    return parser.parse_args(argv)


def add_paths(parser: argparse.ArgumentParser, source: str) -> None:
    parser.add_argument("source", help=source)
    parser.add_argument("out", help="folder to write; it appears whole or not at all")
    text = "write although the folder is there: a head replaces the one in it, a target all of it"
    parser.add_argument("--overwrite", action="store_true", help=text)


def add_reading_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how the head's files are read")
    group.add_argument("--dialect", choices=sorted(DIALECTS), help="unset: told by their content")
    group.add_argument("--taps", type=int, nargs="+", metavar="ID", help="target blocks whose input the head reads, counted from 0")
    group.add_argument("--tap-convention", choices=TAP_CONVENTIONS, help="what stored ids name: the block entered, or a block's output")
    group.add_argument("--rope-theta", type=float, metavar="BASE", help="rotary base without scaling in the place of the config's")


def reading(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `add_reading_options` as `load_draft` takes them."""
    taps = tuple(args.taps) if args.taps else None
    return {"taps": taps, "rope_theta": args.rope_theta, "dialect": args.dialect, "tap_convention": args.tap_convention}


def say(args: argparse.Namespace, value: Any, text: str) -> None:
    print(json.dumps(value, indent=1, ensure_ascii=False) if args.json else text)


def main(args: argparse.Namespace) -> None:
    {"inspect": inspect, "head": head, "target": target, "verify": verify}[args.command](args)


def inspect(args: argparse.Namespace) -> None:
    found = convert.inspect(args.path, args.target, **reading(args))
    say(args, dataclasses.asdict(found), convert.inspection_text(found))
    if found.error is not None:
        raise ValueError(f"{args.path} does not load: {found.error}")


def head(args: argparse.Namespace) -> None:
    done = convert.convert_head(
        args.source,
        args.out,
        args.to,
        target=args.target,
        target_name=args.target_name,
        dtype=args.dtype,
        overwrite=args.overwrite,
        overrule_taps=args.overrule,
        norm_before_residual=None if args.norm_before_residual is None else args.norm_before_residual == "true",
        card={"data": args.data, "recipe": args.recipe, "acceptance": [args.acceptance] if args.acceptance else []},
        **reading(args),
    )
    say(args, done, f"{done['source']} ({done['from']}) -> {done['folder']} ({done['to']}, {done['dtype']})")


def target(args: argparse.Namespace) -> None:
    folder = convert.convert_target(args.source, args.out, args.dtype, args.overwrite)
    say(args, {"source": args.source, "folder": str(folder), "dtype": args.dtype}, f"{args.source} -> {folder} ({args.dtype})")


def verify(args: argparse.Namespace) -> None:
    if not args.no_compilation_cache:
        use_compilation_cache()
    if args.int8 in ("draft", "both"):
        raise ValueError("--int8: a head is verified with the weights of its file; give --int8 target at most")
    if args.int8 == "auto":
        args.int8 = "none"
    if args.prompts is None:
        prompts = [Prompt.of_text(text, f"question {i}") for i, text in enumerate(QUESTIONS, 1)]
    else:
        prompts = read_prompts(args.prompts, args.limit)
    models = load_models(args, need_tokenizer=any(prompt.ids is None for prompt in prompts), reading=reading(args))
    if not isinstance(models.draft, Eagle3Draft):
        raise ValueError(f"--draft {args.draft}: not an EAGLE-3 head, so there is none to verify")
    rows = encode_prompts(prompts, models, args)
    found = diagnose(models.target, models.draft, rows, args.max_new_tokens, args.steps)
    say(args, convert.diagnosis_json(found), convert.diagnosis_text(found))


if __name__ == "__main__":
    sys.exit(run_command(PROG, main, parse()))
