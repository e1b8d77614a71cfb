"""Tokenizers: Hugging Face folders as they are, GGUF files rebuilt from their metadata; no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from eagle3_jax.weights.builtin import BUILTIN_MODELS, builtin_file
from eagle3_jax.weights.gguf_tokenizer import LLAMA3_SPLIT, TokenizerError, gguf_tokenizer
from eagle3_jax.weights.source import locate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["LLAMA3_SPLIT", "TokenizerError", "chat_ids", "encode_plain", "load_tokenizer"]


def load_tokenizer(path_or_id: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder or hub id, of a `.gguf` file, or of the built-in "smollm2-135m".

    Raises TokenizerError or WeightsError, both ValueErrors, naming the file and what it lacks.
    """
    path = locate(path_or_id, {name: partial(builtin_file, name) for name in BUILTIN_MODELS}, ["*.json", "*.model", "*.jinja", "*.txt"])
    if path.suffix == ".gguf":
        return gguf_tokenizer(path)
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")):
        raise TokenizerError(f"{path}: no tokenizer is there (tokenizer.json or tokenizer.model)")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path))
    except Exception as error:  # Broken JSON, an unknown class, a missing vocabulary: each raises something else.
        raise TokenizerError(f"{path}: the tokenizer could not be loaded ({type(error).__name__}: {error})") from error


def encode_plain(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of `text`, with BOS in front exactly when the tokenizer adds one, never twice, and no end-of-sequence id."""
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    bos = tokenizer.bos_token_id
    if bos is None or bos not in tokenizer.encode("", add_special_tokens=True) or ids[:1] == [bos]:
        return ids
    return [bos, *ids]


def chat_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
    """Token ids of a conversation in the tokenizer's chat template: BOS exactly once where the tokenizer or the template has it.

    messages: [{"role": ..., "content": ...}]. Raises TokenizerError when the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise TokenizerError("this tokenizer has no chat template; use plain text, or set tokenizer.chat_template")
    text = tokenizer.apply_chat_template([dict(m) for m in messages], tokenize=False, add_generation_prompt=add_generation_prompt)
    assert isinstance(text, str)
    return encode_plain(tokenizer, text)
