"""What the commands that generate share: options, loading, the compilation cache, files written whole, errors on one line."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import jax
from jax.sharding import Mesh

from eagle3_jax.decoding.generate import NonFiniteLogitsError
from eagle3_jax.drafting import Draft
from eagle3_jax.layout import LAYOUTS, layout_of
from eagle3_jax.lm_draft import LanguageModelDraft
from eagle3_jax.processor import processor_name
from eagle3_jax.prompts import Prompt, PromptError, encode_prompt
from eagle3_jax.sharding import named_mesh, parse_mesh
from eagle3_jax.target import Target
from eagle3_jax.tokenizer import load_tokenizer
from eagle3_jax.tree import TreeChoice
from eagle3_jax.tree_names import SYNTAX, parse_tree
from eagle3_jax.user_cache import cache_folder
from eagle3_jax.verify import RULES
from eagle3_jax.weights import load_draft, load_target
from eagle3_jax.weights.builtin import BUILTIN_MODELS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

USER_ERROR, BROKEN, INTERRUPTED = 2, 1, 130
"""Exit codes: the arguments or files are at fault; the model is (logits that are not finite); Ctrl-C."""


class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults shown where there are any, examples kept as written."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False) else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Errors take one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(USER_ERROR, f"{self.prog}: {message} (see {self.prog} --help)\n")


def tree_argument(text: str) -> TreeChoice:
    try:
        return parse_tree(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive(text: str) -> int:
    value = int(text) if text.strip().isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number >= 1")
    return value


def temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a finite number >= 0")
    return value


def add_model_options(parser: argparse.ArgumentParser, plain_text: bool = True) -> None:
    """plain_text: whether the chat template may be left out."""
    group = parser.add_argument_group("models")
    group.add_argument("--target", default="smollm2-135m", help="folder, hub id, .gguf file, or built-in name")
    group.add_argument("--draft", help="head: folder, hub id, or built-in name; none: decode plainly; unset: the target's built-in head")
    group.add_argument(
        "--draft-model", metavar="MODEL", help="a small language model as the draft: folder, hub id, .gguf file, or built-in name"
    )
    group.add_argument(
        "--int8",
        choices=("auto", "none", "target", "draft", "both"),
        default="auto",
        help="weights of one byte, for the target, the draft or both. An int8 target has a text of its own; an int8 draft only changes the "
        "speed; auto: the draft, where it lies in panels, which are then read in a quarter of the time",
    )
    group.add_argument(
        "--layout",
        choices=LAYOUTS,
        default="auto",
        help="of the weights in memory: panels, which a CPU reads fastest (float32, one device, a C++ compiler), or plain arrays; "
        "auto: panels where they can be",
    )
    group.add_argument("--tokenizer", help="folder, hub id, .gguf file, or built-in name; unset: the target's")
    group.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="compute type; float32 is the fast one on a CPU")
    group.add_argument(
        "--mesh",
        metavar="AXES",
        help="split the models over all devices, such as data=2,tensor=4: tensor splits heads, feed-forward width and vocabulary, data the "
        "rows; unset: one device",
    )
    if plain_text:
        group.add_argument(
            "--no-chat-template", action="store_true", help="give the text to the target as it is, even if it has a chat template"
        )
    group.add_argument("--system", metavar="TEXT", help="system message for prompts without one; unset: the chat template's own")
    group.add_argument(
        "--no-compilation-cache", action="store_true", help=f"compile anew instead of keeping programs in {cache_folder() / 'programs'}"
    )
    group.add_argument("--traceback", action="store_true", help="show where in the code an error arose")


def add_sampling_options(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    group = parser.add_argument_group("decoding")
    group.add_argument("--max-new-tokens", type=int, default=max_new_tokens, metavar="N", help="tokens per answer at most")
    group.add_argument("--top-k", type=int, default=0, metavar="N", help="sample among the N likeliest tokens; 0: among all")
    group.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="sample among the likeliest tokens that reach this probability"
    )
    group.add_argument("--seed", type=int, default=0, help="of the first prompt; the next ones count up. Same seed, same text, any draft")
    group.add_argument("--rule", choices=RULES, default="coupled", help="how drafts are verified; rejection: chains only")
    group.add_argument("--no-coupled-draft", action="store_true", help="draft the likeliest tokens, not those the sampling noise favours")
    group.add_argument("--stop", action="append", default=[], metavar="TOKEN", help="further stop token, id or text; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="do not stop at the target's own end-of-sequence tokens")


TREE_HELP = (
    f"what to draft per cycle: {SYNTAX}; nodes count the root; auto: what pays on this machine, measured the first time; "
    "unset: the size chosen before, else one that suits the backend"
)


@dataclasses.dataclass(frozen=True)
class Models:
    """What a command decodes with; the draft is None for plain decoding, the tokenizer where the target has none."""

    target: Target
    draft: Draft | None
    tokenizer: PreTrainedTokenizerBase | None

    def text(self, ids: Sequence[int]) -> str:
        """Readable text without special tokens; ids where there is no tokenizer."""
        if self.tokenizer is None:
            return " ".join(map(str, ids))
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def token(self, token: int) -> str:
        """The text of one token, special ones by name."""
        return str(token) if self.tokenizer is None else str(self.tokenizer.decode([token]))


def load_models(
    args: argparse.Namespace, need_tokenizer: bool, mesh: Mesh | None = None, reading: Mapping[str, Any] | None = None
) -> Models:
    """Target, draft and tokenizer as the options say; ValueErrors name what is missing. A tokenizer that is not needed may be missing.

    reading: further arguments of `load_draft`, how the head's files are to be read.
    """
    if args.draft is not None and args.draft_model is not None:
        raise ValueError("--draft-model: a draft is a head (--draft) or a language model, not both")
    if args.draft is None and args.draft_model is None and args.target not in BUILTIN_MODELS:
        raise ValueError(f"--draft: there is no built-in head for {args.target}; name a head, or write --draft none")
    # transformers says on every start that it found no torch; nothing here needs it.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    tokenizer = None
    try:
        with status(f"loading the tokenizer of {args.tokenizer or args.target}"):
            tokenizer = load_tokenizer(args.tokenizer or args.target)
    except (ValueError, OSError):
        if need_tokenizer or args.tokenizer is not None:
            raise
    if mesh is None and args.mesh:
        mesh = named_mesh(parse_mesh(args.mesh))
    with status(f"loading {args.target}"):
        target = load_target(
            args.target, args.dtype, mesh, weights="int8" if args.int8 in ("target", "both") else "float", layout=args.layout
        )
    small = args.int8 in ("draft", "both") or (args.int8 == "auto" and layout_of(target) == "panels")
    drafted = "int8" if small else "float"
    draft = None
    if args.draft_model is not None:
        with status(f"loading {args.draft_model}"):
            draft = LanguageModelDraft.of(load_target(args.draft_model, args.dtype, mesh, weights=drafted, layout=args.layout), target)
    elif args.draft != "none":
        with status("loading the head"):
            draft = load_draft(args.draft or args.target, target, args.dtype, mesh, weights=drafted, layout=args.layout, **(reading or {}))
    return Models(target, draft, tokenizer)


def encode_prompts(prompts: Sequence[Prompt], models: Models, args: argparse.Namespace, longest: int | None = None) -> list[list[int]]:
    """Ids of every prompt, the first `longest` where that is given; PromptError names the prompt that the target has no room for, or that
    holds an unknown id."""
    config = models.target.config
    rows = []
    for prompt in prompts:
        ids = encode_prompt(prompt, models.tokenizer, False if args.no_chat_template else None, args.system)[:longest]
        if not ids:
            raise PromptError(f"{prompt.name}: no token in the prompt")
        if len(ids) >= config.max_position:
            raise PromptError(
                f"{prompt.name}: {len(ids)} tokens leave no room for an answer in the target's context of {config.max_position}"
            )
        unknown = next((i for i in ids if not 0 <= i < config.vocab_size), None)
        if unknown is not None:
            raise PromptError(f"{prompt.name}: id {unknown} is outside the target's vocabulary of {config.vocab_size}")
        rows.append(ids)
    return rows


def stop_ids(args: argparse.Namespace, models: Models) -> list[int]:
    """The target's own stop ids, unless ignored, and those of --stop. Raises ValueError for a text that is not exactly one token."""
    ids = [] if args.ignore_eos else list(models.target.config.eos_token_ids)
    for text in args.stop:
        if text.isdecimal():
            ids.append(int(text))
            continue
        if models.tokenizer is None:
            raise ValueError(f"--stop {text!r}: the target has no tokenizer; give a token id")
        parts = models.tokenizer.encode(text, add_special_tokens=False)
        if len(parts) != 1:
            pieces = ", ".join(json.dumps(models.token(part), ensure_ascii=False) for part in parts)
            raise ValueError(f"--stop {text!r} is {len(parts)} tokens ({pieces}); decoding stops at single tokens only")
        ids.extend(parts)
    return list(dict.fromkeys(ids))


def sampling_options(args: argparse.Namespace, models: Models) -> dict[str, Any]:
    """The options of `add_sampling_options` as arguments of `generate`, but for temperature and seed."""
    return {
        "max_new_tokens": args.max_new_tokens,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "rule": args.rule,
        "coupled_draft": not args.no_coupled_draft,
        "eos_token_ids": stop_ids(args, models),
    }


def use_compilation_cache(folder: Path | None = None) -> Path:
    """Keeps compiled programs on disk from now on, so that the next process loads them in a second. Returns the folder.

    The default is one in the user's cache folder per kind of processor: programs for one CPU may not run on another.
    """
    if folder is None:
        folder = cache_folder() / "programs" / processor_name()
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    return folder


@contextlib.contextmanager
def status(text: str) -> Iterator[None]:
    """A line on a terminal's stderr while something slow goes on, wiped afterwards; nothing when it is not a terminal."""
    shown = sys.stderr.isatty()
    if shown:
        print(f"\r\x1b[2K{text} ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def check_writable(path: str | Path, suffix: str) -> None:
    """Raises ValueError before any work when a file of this name cannot be what is asked for, or its folder does not exist."""
    target = Path(path)
    if target.suffix.lower() != suffix:
        raise ValueError(f"{path}: expected a name that ends in {suffix}")
    if target.is_dir() or not target.parent.is_dir():
        raise ValueError(f"{path}: {'is a folder' if target.is_dir() else f'no folder {target.parent}'}")


def run_command(prog: str, main: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> int:
    """Runs a command and returns its exit code: errors and warnings take one line on stderr each, unless --traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows another, rather than failing
    warnings.showwarning = lambda message, *_: print(f"{prog}: warning: {message}", file=sys.stderr)
    try:
        main(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of the pipe has gone (`| head`): not an error, and nothing more can be written.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, OSError, ImportError, NonFiniteLogitsError) as error:
        if args.traceback:
            raise
        print(f"{prog}: {' '.join(str(error).split())}", file=sys.stderr)
        return BROKEN if isinstance(error, NonFiniteLogitsError) else USER_ERROR
    return 0
