"""Tokenizers rebuilt from the metadata of GGUF files: byte-level BPE and SentencePiece's BPE."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from eagle3_jax.weights.gguf import GGUFFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer
    from transformers import PreTrainedTokenizerFast

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = _CONTRACTIONS + r"\p{N}{1,3}" + _REST
QWEN2_SPLIT = _CONTRACTIONS + r"\p{N}" + _REST
SPACE = "\u2581"
"""SentencePiece's visible space."""


class TokenizerError(ValueError):
    """A tokenizer that cannot be built or used; the message names the file and the key."""


def gguf_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a GGUF file. Raises TokenizerError naming an unsupported model or pre-tokenizer, or what is damaged."""
    from tokenizers import AddedToken, processors
    from transformers import PreTrainedTokenizerFast

    file = GGUFFile(path)
    model, pre = file.need("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre", "default")
    if model not in ("gpt2", "llama"):
        raise TokenizerError(f"{path}: tokenizer.ggml.model {model!r} is not supported (supported: gpt2, llama)")
    tokens: list[str] = file.need("tokenizer.ggml.tokens")
    vocab = {token: i for i, token in enumerate(tokens)}
    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = file.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            if token_id >= len(tokens):
                raise TokenizerError(f"{path}: tokenizer.ggml.{key}_token_id {token_id} lies outside the {len(tokens)} tokens")
            special[f"{name}_token"] = tokens[token_id]
    tokenizer = _byte_level(file, vocab, pre) if model == "gpt2" else _sentencepiece(file, vocab, special.get("unk_token", "<unk>"))
    for token, kind in zip(tokens, file.get("tokenizer.ggml.token_type", []), strict=False):
        if kind in (CONTROL, USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False)])
    if file.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe" or model == "llama") and "bos_token" in special:
        bos = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocab[bos])]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=file.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        model_max_length=int(file.number(f"{file.get('general.architecture', 'llama')}.context_length", 2**30)),
        **special,
    )


def _byte_level(file: GGUFFile, vocab: dict[str, int], pre: str) -> Tokenizer:
    """Byte-level BPE, its merges as the file lists them."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    pre_tokenizer = _pre_tokenizer(pre, str(file.path))
    merges = [_merge(merge, str(file.path)) for merge in file.need("tokenizer.ggml.merges")]
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # `tokenizers` raises bare Exceptions, such as for a merge of pieces that are no tokens.
        raise TokenizerError(f"{file.path}: the tokenizer could not be built from its tokens and merges ({error})") from error
    if pre in QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GGUFFile, vocab: dict[str, int], unknown: str) -> Tokenizer:
    """SentencePiece's BPE: of two neighbours, those first whose union scores highest; bytes for what no piece covers."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores, kinds = file.need("tokenizer.ggml.scores"), file.need("tokenizer.ggml.token_type")
    if not len(scores) == len(kinds) == len(vocab):
        raise TokenizerError(
            f"{file.path}: {len(vocab)} different tokens, {len(scores)} tokenizer.ggml.scores and {len(kinds)} tokenizer.ggml.token_type"
        )
    merges: list[tuple[float, str, str]] = []
    for (piece, _), score, kind in zip(vocab.items(), scores, kinds, strict=True):
        if kind == NORMAL:
            splits = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
            merges += [(score, left, right) for left, right in splits if left in vocab and right in vocab]
    merges.sort(key=lambda merge: -merge[0])
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=[(left, right) for _, left, right in merges], unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = bool(file.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    strip = [decoders.Strip(content=" ", left=1)] if prefix else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return tokenizer


def _merge(merge: str, where: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right:
        raise TokenizerError(f"{where}: tokenizer.ggml.merges holds {merge!r}, which is not two pieces")
    return left, right


QWEN2 = ("qwen2", "deepseek-r1-qwen")
"""Names of Qwen2's pre-tokenizer, the distilled DeepSeek-R1's included."""


def _pre_tokenizer(name: str, where: str) -> PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name in ("gpt-2", "gpt2"):
        return byte_level
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if name == "llama-bpe" or name in QWEN2:
        pattern = LLAMA3_SPLIT if name == "llama-bpe" else QWEN2_SPLIT
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    supported = ", ".join(("smollm", "gpt-2", "llama-bpe", *QWEN2))
    raise TokenizerError(f"{where}: tokenizer.ggml.pre {name!r} is not supported (supported: {supported})")
