"""The commands' scripts as modules, and a tiny tokenizer for the tiny target."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from eagle3_jax.commands import run_command

ROOT = Path(__file__).parent.parent
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant' }}{% endif %}"
)


def load_script(name: str, folder: str = "infer") -> ModuleType:
    """The file FOLDER/NAME.py, which is no part of any package."""
    spec = importlib.util.spec_from_file_location(f"eagle3_script_{folder}_{name}", ROOT / folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_script(module: ModuleType, *argv: str) -> int:
    """What the command line would do, in this process; the exit code."""
    try:
        args = module.parse(list(argv))
        args.no_compilation_cache = True
        return run_command(module.PROG, module.main, args)
    except SystemExit as done:
        return int(done.code or 0)


def save_word_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    """A tokenizer of 160 words: "user", "assistant", "system", then w3 ... w159."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["user", "assistant", "system", *(f"w{i}" for i in range(3, 160))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w159"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, unk_token="w159").save_pretrained(str(folder))
