"""Tokenizers from GGUF metadata and Hugging Face folders; SmolLM2's against ids that the model itself produced (slow)."""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import write_gguf
from make_reference import QUESTION

from eagle3_jax.tokenizer import TokenizerError, chat_ids, encode_plain, load_tokenizer
from eagle3_jax.weights import WeightsError

CHATML = (
    "{% for m in messages %}{{ '<s>' + m['role'] + ':' + m['content'] + '</s>' }}{% endfor %}{% if add_generation_prompt %}<s>A:{% endif %}"
)
SPECIAL = ["<unk>", "<s>", "</s>"]


def byte_alphabet() -> list[str]:
    """The 256 letters of byte-level BPE: printable Latin-1 bytes stand for themselves, the others for letters from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(others)) for b in range(256)]


MERGES = ["Ġ a", "1 2", "12 3", "a b", "ab ab", "n o", "no t"]
TOKENS = SPECIAL + byte_alphabet() + [merge.replace(" ", "") for merge in MERGES] + ["<keep>"]
METADATA: dict[str, Any] = {
    "llama.context_length": 512,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.merges": MERGES,
    # 3: control; 4: added by a user; 1: ordinary.
    "tokenizer.ggml.token_type": [3 if t in SPECIAL else 4 if t == "<keep>" else 1 for t in TOKENS],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": CHATML,
}


def write(tmp_path: Path, **changes: Any) -> Path:
    """`changes` by the last part of the key, as in `pre="gpt-2"`."""
    keys = {key.rsplit(".", 1)[1]: key for key in METADATA}
    return write_gguf(tmp_path / "model.gguf", METADATA | {keys[name]: value for name, value in changes.items()})


def pieces(tokenizer: Any, text: str) -> list[str]:
    return tokenizer.convert_ids_to_tokens(tokenizer.encode(text, add_special_tokens=False))


def test_merges_and_bytes(tmp_path: Path):
    tokenizer = load_tokenizer(write(tmp_path))
    assert pieces(tokenizer, "abab a") == ["abab", "Ġa"]
    for text in ("abab a", "  two  spaces\n\ttab", "naïve 日本 🙂", "a , b .", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == len(TOKENS)
    assert tokenizer.model_max_length == 512


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["a", "1", "2", "3", "4", "no", "'", "t"]),
        ("gpt-2", ["a", "123", "4", "no", "'", "t"]),
        ("llama-bpe", ["a", "123", "4", "no", "'", "t"]),
        ("qwen2", ["a", "1", "2", "3", "4", "no", "'", "t"]),
        ("deepseek-r1-qwen", ["a", "1", "2", "3", "4", "no", "'", "t"]),
    ],
)
def test_pre_tokenizers(pre: str, expected: list[str], tmp_path: Path):
    """SmolLM splits every digit on its own; the merges 12 and 123 exist and must not be used."""
    assert pieces(load_tokenizer(write(tmp_path, pre=pre)), "a1234no't") == expected


def test_special_tokens(tmp_path: Path):
    tokenizer = load_tokenizer(write(tmp_path))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id) == (1, 2, 0, 2)
    ids = tokenizer.encode("a</s><keep>b", add_special_tokens=False)
    assert ids == [TOKENS.index(t) for t in ("a", "</s>", "<keep>", "b")]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<keep>b"


@pytest.mark.parametrize(("name", "value"), [("model", "bert"), ("pre", "chameleon")])
def test_an_unsupported_tokenizer_is_named(name: str, value: str, tmp_path: Path):
    with pytest.raises(TokenizerError, match=rf"model\.gguf: tokenizer\.ggml\.{name} '{value}' is not supported"):
        load_tokenizer(write(tmp_path, **{name: value}))


@pytest.mark.parametrize("name", ["model", "tokens", "merges"])
def test_missing_metadata_is_named(name: str, tmp_path: Path):
    with pytest.raises(WeightsError, match=rf"model\.gguf: metadata key 'tokenizer\.ggml\.{name}' is missing"):
        load_tokenizer(write(tmp_path, **{name: None}))


def test_damaged_metadata_is_named(tmp_path: Path):
    with pytest.raises(TokenizerError, match=r"model\.gguf: tokenizer\.ggml\.merges.*'zz'"):
        load_tokenizer(write(tmp_path, merges=["zz"]))
    with pytest.raises(TokenizerError, match=r"model\.gguf: .*could not be built"):
        load_tokenizer(write(tmp_path, merges=["zz yy"]))
    with pytest.raises(TokenizerError, match=r"model\.gguf: tokenizer\.ggml\.eos_token_id 999"):
        load_tokenizer(write(tmp_path, eos_token_id=999))


@pytest.mark.parametrize(("adds", "pre", "expected"), [(True, "smollm", True), (False, "llama-bpe", False), (None, "llama-bpe", True)])
def test_plain_text_gets_one_bos_exactly_when_the_tokenizer_adds_it(adds: bool | None, pre: str, expected: bool, tmp_path: Path):
    tokenizer = load_tokenizer(write(tmp_path, add_bos_token=adds, pre=pre))
    ids = tokenizer.encode("ab", add_special_tokens=False)
    assert 1 not in ids
    assert tokenizer.encode("ab") == ([1] if expected else []) + ids
    assert encode_plain(tokenizer, "ab") == ([1] if expected else []) + ids
    assert encode_plain(tokenizer, "<s>ab") == [1, *ids]


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("template_has_bos", [True, False])
def test_a_chat_has_one_bos(adds: bool, template_has_bos: bool, tmp_path: Path):
    template = ("<s>" if template_has_bos else "") + "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer = load_tokenizer(write(tmp_path, add_bos_token=adds, chat_template=template))
    ids = chat_ids(tokenizer, [{"role": "user", "content": "ab"}])
    assert ids == ([1] if adds or template_has_bos else []) + tokenizer.encode("ab", add_special_tokens=False)


def test_the_chat_template_is_the_files(tmp_path: Path):
    tokenizer = load_tokenizer(write(tmp_path))
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.decode(chat_ids(tokenizer, messages)) == "<s>user:hi</s><s>A:"
    assert tokenizer.decode(chat_ids(tokenizer, messages, add_generation_prompt=False)) == "<s>user:hi</s>"
    tokenizer = load_tokenizer(write(tmp_path, chat_template=None))
    with pytest.raises(TokenizerError, match="no chat template"):
        chat_ids(tokenizer, messages)


def test_a_hugging_face_folder(tmp_path: Path):
    """What a GGUF tokenizer saves is read back as the same tokenizer, chat template included."""
    source = load_tokenizer(write(tmp_path, add_bos_token=True))
    source.save_pretrained(tmp_path / "folder")
    tokenizer = load_tokenizer(tmp_path / "folder")
    for text in ("abab 123 not", "<s>a</s>"):
        assert encode_plain(tokenizer, text) == encode_plain(source, text)
    messages = [{"role": "user", "content": "hi"}]
    assert chat_ids(tokenizer, messages) == chat_ids(source, messages)


def test_folders_without_a_tokenizer(tmp_path: Path):
    with pytest.raises(TokenizerError, match="no tokenizer is there"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match="could not be loaded"):
        load_tokenizer(tmp_path)
    with pytest.raises(WeightsError, match="no such file or folder"):
        load_tokenizer(tmp_path / "absent")


def test_no_torch_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it now fails
    assert pieces(load_tokenizer(write(tmp_path)), "abab") == ["abab"]


def test_a_sentencepiece_style_folder(shared_data: Path):
    tokenizer = load_tokenizer(shared_data / "stories260k")
    ids = encode_plain(tokenizer, "Once upon a time")
    assert ids[0] == 1
    assert ids.count(1) == 1
    assert ids == tokenizer.encode("Once upon a time")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Once upon a time"
    with pytest.raises(TokenizerError, match="no chat template"):
        chat_ids(tokenizer, [{"role": "user", "content": "hi"}])


SENTENCES = ["Once upon a time", "  two  spaces\n\nand\ttabs ", "naïve 日本 🙂 ▁", "", "<s>x</s> y", "Tom's 3 dogs, 12 cats!", "a", " the"]


def sentencepiece_metadata(folder: Path) -> dict[str, Any]:
    """The metadata of this folder's SentencePiece model as llama.cpp writes it; its pieces stand by score."""
    vocab: dict[str, int] = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = sorted(vocab, key=lambda token: vocab[token])
    kinds = [2 if i == 0 else 3 if i < 3 else 6 if i < 259 else 1 for i in range(len(tokens))]
    names = {"model": "llama", "pre": "default", "tokens": tokens, "token_type": kinds}
    names |= {
        "scores": [0.0 if i < 259 else 259.0 - i for i in range(len(tokens))],
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in names.items()}


def test_sentencepiece_in_a_gguf_file(shared_data: Path, tmp_path: Path):
    """LLaMA 2's kind, as TinyLlama, Vicuna and Mistral 7B have it: the ids and texts of the same model in a Hugging Face folder."""
    folder = shared_data / "stories260k"
    tokenizer, theirs = load_tokenizer(write_gguf(tmp_path / "model.gguf", sentencepiece_metadata(folder))), load_tokenizer(folder)
    for text in SENTENCES:
        ids = theirs.encode(text)
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == theirs.decode(ids), text
    assert tokenizer.encode("x")[0] == 1
    metadata = sentencepiece_metadata(folder) | {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_space_prefix": False}
    bare = load_tokenizer(write_gguf(tmp_path / "bare.gguf", metadata))
    assert bare.decode(bare.encode(" a")) == " a"
    assert bare.encode("a") != bare.encode(" a")
    assert 1 not in bare.encode("a")
    with pytest.raises(TokenizerError, match=r"short\.gguf: 512 different tokens, 3 tokenizer\.ggml\.scores"):
        load_tokenizer(write_gguf(tmp_path / "short.gguf", metadata | {"tokenizer.ggml.scores": [0.0, 1.0, 2.0]}))


@pytest.fixture(scope="module")
def smollm2() -> Any:
    try:
        return load_tokenizer("smollm2-135m")
    except WeightsError as error:
        if "could not download" in str(error) or "no pip" in str(error):
            pytest.skip(str(error))
        raise


@pytest.mark.slow
def test_smollm2_chat(smollm2: Any):
    ids = chat_ids(smollm2, [{"role": "user", "content": "Hi, what is 12+30?"}])
    text = smollm2.decode(ids)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi, what is 12+30?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids[0] == 1
    assert ids.count(2) == 2
    assert "<|im_start|>" not in smollm2.convert_ids_to_tokens(encode_plain(smollm2, "Hi"))
    own = chat_ids(smollm2, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    assert smollm2.decode(own).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi")


@pytest.mark.slow
def test_smollm2_equals_the_tokenizer_that_wrote_the_responses(smollm2: Any, shared_data: Path):
    """Decoding is exact for every response; encoding gives the sampled ids back for 89 % of them.

    The others hold a piece that a model may sample but that byte-pair encoding does not choose, such as `to` + `lower` for `tol` + `ower`.
    """
    with gzip.open(shared_data / "responses.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    assert len(rows) > 3000
    canonical = 0
    for row in rows:
        ids = row["response_ids"]
        if row["finish_reason"] == "stop":
            assert ids[-1] == 2
            ids = ids[:-1]
        text = row["messages"][-1]["content"]
        assert smollm2.decode(ids) == text
        encoded = smollm2.encode(text, add_special_tokens=False)
        canonical += encoded == ids
        assert smollm2.decode(encoded) == text
        assert not any(re.search(r"\d\d", piece) for piece in smollm2.convert_ids_to_tokens(encoded))
    assert canonical / len(rows) > 0.89


@pytest.mark.slow
def test_smollm2_equals_transformers_own_reading_of_the_file(smollm2: Any):
    reference = np.load(Path(__file__).parent / "reference" / "hf_smollm2.npz")
    expected = reference["tokens"][: int(reference["prompt_length"])]
    assert chat_ids(smollm2, [{"role": "user", "content": QUESTION}]) == expected.tolist()
