"""Tokenizers: Hugging Face folders as they are, GGUF files rebuilt from their metadata; no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_jax.weights.builtin import BUILTIN_MODELS, builtin_file
from eagle3_jax.weights.gguf import GGUFFile
from eagle3_jax.weights.source import locate

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

CONTROL, USER_DEFINED = 3, 4
LLAMA3_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class TokenizerError(ValueError):
    """A tokenizer that cannot be built or used; the message names the file and the key."""


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


def gguf_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer from a GGUF file's metadata. Raises TokenizerError naming an unsupported model or pre-tokenizer."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors
    from transformers import PreTrainedTokenizerFast

    file = GGUFFile(path)
    model, pre = file.need("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre", "default")
    if model != "gpt2":
        raise TokenizerError(f"{path}: tokenizer.ggml.model {model!r} is not supported (supported: gpt2)")
    pre_tokenizer = _pre_tokenizer(pre, str(path))
    tokens: list[str] = file.need("tokenizer.ggml.tokens")
    merges = [_merge(merge, str(path)) for merge in file.need("tokenizer.ggml.merges")]
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # `tokenizers` raises bare Exceptions, such as for a merge of pieces that are no tokens.
        raise TokenizerError(f"{path}: the tokenizer could not be built from its tokens and merges ({error})") from error
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, file.get("tokenizer.ggml.token_type", []), strict=False):
        if kind in (CONTROL, USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False)])
    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = file.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            if token_id >= len(tokens):
                raise TokenizerError(f"{path}: tokenizer.ggml.{key}_token_id {token_id} lies outside the {len(tokens)} tokens")
            special[f"{name}_token"] = tokens[token_id]
    if file.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe") and "bos_token" in special:
        bos = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocab[bos])]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=file.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        model_max_length=int(file.get("llama.context_length", 2**30)),
        **special,
    )


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


def _merge(merge: str, where: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right:
        raise TokenizerError(f"{where}: tokenizer.ggml.merges holds {merge!r}, which is not two pieces")
    return left, right


def _pre_tokenizer(name: str, where: str) -> PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name in ("gpt-2", "gpt2"):
        return byte_level
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if name == "llama-bpe":
        split = pre_tokenizers.Split(Regex(LLAMA3_SPLIT), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    raise TokenizerError(f"{where}: tokenizer.ggml.pre {name!r} is not supported (supported: smollm, gpt-2, llama-bpe)")
