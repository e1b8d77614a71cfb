#!python
"""eagle3-chat: talk with the target; each turn runs only what is new, in the target and in the head."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any

from eagle3_jax.commands import (
    TREE_HELP,
    Formatter,
    Models,
    Parser,
    add_model_options,
    add_sampling_options,
    load_models,
    positive,
    run_command,
    sampling_options,
    temperature,
    tree_argument,
    use_compilation_cache,
)
from eagle3_jax.compile_clock import CompileClock
from eagle3_jax.decoding.conversation import Conversation
from eagle3_jax.decoding.live import show
from eagle3_jax.decoding.segments import CYCLES
from eagle3_jax.prompts import PromptError

PROG = "eagle3-chat"
EXAMPLES = """examples:
  eagle3-chat
  eagle3-chat --system "You answer in one sentence." --temperature 0.8
  printf 'Name a colour.\\nName another one.\\n' | eagle3-chat --quiet

While you write: /new begins another conversation, /quit or Ctrl-D ends. While it answers: Ctrl-C cuts the answer short.
Answers go to stdout, figures about them to stderr.
"""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog=PROG, description=__doc__, epilog=EXAMPLES, formatter_class=Formatter)
    add_model_options(parser)
    add_sampling_options(parser, max_new_tokens=512)
    parser.add_argument("--temperature", type=temperature, default=0.0, metavar="T", help="0: the likeliest token, always")
    parser.add_argument("--tree", type=tree_argument, help=TREE_HELP)
    parser.add_argument("--cycles", type=positive, default=CYCLES, metavar="N", help="cycles between two looks at what has come")
    parser.add_argument("--quiet", action="store_true", help="answers only, no figures on stderr")
    args = parser.parse_args(argv)
    if args.no_chat_template:
        parser.error("a conversation needs the chat template: leave --no-chat-template out")
    return args


def main(args: argparse.Namespace) -> None:
    if not args.no_compilation_cache:
        use_compilation_cache()
    models = load_models(args, need_tokenizer=True)
    assert models.tokenizer is not None
    conversation = Conversation(models.target, models.draft, models.tokenizer, args.system)
    options = {
        **sampling_options(args, models),
        "temperature": args.temperature,
        "seed": args.seed,
        "tree": args.tree,
        "cycles": args.cycles,
    }
    clock = CompileClock()
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (arrow keys and history at the prompt)
    while (line := ask()) is not None and line != "/quit":
        if line == "/new":
            conversation.restart()
        elif line.startswith("/"):
            print(f"{PROG}: {line.split()[0]} is unknown; there are /new and /quit", file=sys.stderr)
        elif line:
            try:
                answer(args, models, conversation, line, options, clock)
            except PromptError as error:
                print(f"{PROG}: {error} (/new)", file=sys.stderr)


def ask() -> str | None:
    """The next line of the person or the pipe; None at its end."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None


def answer(
    args: argparse.Namespace, models: Models, conversation: Conversation, line: str, options: dict[str, Any], clock: CompileClock
) -> None:
    stream = conversation.ask(line, **options)
    try:
        shown = show(stream, models.text, clock)
    finally:
        conversation.hear(stream.output.tokens[0])
    if not args.quiet:
        print(f"[{shown.figures()}; {conversation.session.reused} tokens kept from before]", file=sys.stderr)
    if shown.interrupted and not sys.stdin.isatty():
        raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(run_command(PROG, main, parse()))
