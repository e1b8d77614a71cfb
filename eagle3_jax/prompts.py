"""Prompts for generation: from a text, a file or token ids, through the chat template, to ids.

A file whose name ends in .jsonl or .json (.gz too) or .parquet holds one prompt per record, under one of these keys:

    prompt       a text, or a list of messages
    turns        a list of texts, of which the first is asked (MT-bench and the other sets of the EAGLE papers)
    messages     a list of {"role", "content"}; answers at its end are left out, since they are what is generated
    prompt_ids   a list of token ids, used as they are

Any other file is one prompt: its whole text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_jax.data.sources import read_records
from eagle3_jax.tokenizer import chat_ids, encode_plain

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEYS = ("prompt", "turns", "messages", "prompt_ids")
RECORDS = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")


class PromptError(ValueError):
    """A prompt that cannot be used; the message names it."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """name: for messages to a person. messages: the conversation to answer; a plain text is one user message. ids: used instead, if any."""

    name: str
    messages: tuple[dict[str, Any], ...] = ()
    ids: tuple[int, ...] | None = None

    @classmethod
    def of_text(cls, text: str, name: str = "prompt") -> Prompt:
        """Raises PromptError for a text that is empty or blank."""
        if not text.strip():
            raise PromptError(f"{name} is empty: nothing to answer")
        return cls(name, ({"role": "user", "content": text},))


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """The prompts of a file, the first `limit` of them. Raises PromptError or DataError naming file, line and key."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise PromptError(f"{path}: no such file")
    if not file.name.lower().endswith(RECORDS):
        try:
            return [Prompt.of_text(file.read_text(encoding="utf-8"), str(path))]
        except UnicodeDecodeError:
            raise PromptError(f"{path}: not a text file; records need a name that ends in one of {', '.join(RECORDS)}") from None
    prompts = [parse_prompt(record, where) for where, record in islice(read_records(file), limit)]
    if not prompts:
        raise PromptError(f"{path}: no prompt in the file")
    return prompts


def parse_prompt(record: Any, where: str) -> Prompt:
    """One record as a Prompt, named by its `id` where it has one. Raises PromptError naming the key at fault."""
    key = next((key for key in KEYS if record.get(key) is not None), None) if isinstance(record, Mapping) else None
    if key is None:
        found = ", ".join(map(str, record)) if isinstance(record, Mapping) else type(record).__name__
        raise PromptError(f"{where}: a prompt needs one of the keys {', '.join(KEYS)}; found {found or 'none'}")
    name = str(record.get("id", where))
    value = record[key]
    if key == "prompt_ids":
        if not isinstance(value, list) or not value or not all(type(i) is int for i in value):
            raise PromptError(f"{where}: prompt_ids must be a list of token ids, at least one")
        return Prompt(name, ids=tuple(value))
    if key == "turns":
        value = value[0] if isinstance(value, list) and value else value
    if key in ("prompt", "turns") and isinstance(value, str):
        if not value.strip():
            raise PromptError(f"{where}: {key} is empty: nothing to answer")
        return Prompt.of_text(value, name)
    if key == "turns" or not isinstance(value, list):
        raise PromptError(f"{where}: {key} must be {'a list of texts' if key == 'turns' else 'a list of messages'}")
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise PromptError(f"{where}: {key} must hold objects with the texts role and content")
    while value and value[-1]["role"] == "assistant":
        value = value[:-1]
    if not value:
        raise PromptError(f"{where}: {key} holds no message to answer")
    return Prompt(name, tuple(dict(message) for message in value))


def encode_prompt(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None, chat: bool | None = None, system: str | None = None
) -> list[int]:
    """Token ids of a prompt.

    chat: put the conversation into the tokenizer's chat template, ready for an answer; None: if it has one. Without, only a single
    text can be encoded. system: a system message in front of conversations that have none.
    Raises PromptError naming what is missing: a tokenizer, a chat template, or a plain text.
    """
    if prompt.ids is not None:
        return list(prompt.ids)
    if tokenizer is None:
        raise PromptError(f"{prompt.name}: the target has no tokenizer; give token ids")
    if chat is None:
        chat = bool(tokenizer.chat_template)
    messages = list(prompt.messages)
    if chat:
        if system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        return chat_ids(tokenizer, messages)
    if system is not None:
        raise PromptError(f"{prompt.name}: a system message needs a chat template")
    if len(messages) != 1:
        raise PromptError(f"{prompt.name}: a conversation of several messages needs a chat template")
    return encode_plain(tokenizer, messages[0]["content"])
