"""Prompts from texts, files and records; what cannot be used is named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from command_scripts import save_word_tokenizer

from eagle3_jax.data import DataError
from eagle3_jax.prompts import Prompt, PromptError, encode_prompt, parse_prompt, read_prompts
from eagle3_jax.tokenizer import load_tokenizer

USER = {"role": "user", "content": "w5 w6"}
ANSWER = {"role": "assistant", "content": "w7"}


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"prompt": "w5 w6"}, (USER,)),
        ({"turns": ["w5 w6", "w9"]}, (USER,)),
        ({"prompt": [USER, ANSWER, USER]}, (USER, ANSWER, USER)),
        ({"messages": [USER, ANSWER]}, (USER,)),
        ({"messages": [USER, ANSWER, USER, ANSWER, ANSWER]}, (USER, ANSWER, USER)),
    ],
)
def test_records(record: dict, messages: tuple) -> None:
    prompt = parse_prompt(record, "file:1")
    assert prompt.messages == messages
    assert prompt.name == "file:1"
    assert parse_prompt({**record, "id": "q/7"}, "file:1").name == "q/7"


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"question": "x"}, "one of the keys prompt, turns, messages, prompt_ids; found question"),
        (["x"], "found list"),
        ({}, "found none"),
        ({"prompt": "  "}, "prompt is empty"),
        ({"turns": []}, "turns must be a list of texts"),
        ({"turns": [3]}, "turns must be a list of texts"),
        ({"messages": "hello"}, "messages must be a list of messages"),
        ({"messages": [{"role": "user"}]}, "role and content"),
        ({"messages": [ANSWER]}, "no message to answer"),
        ({"messages": []}, "no message to answer"),
        ({"prompt_ids": []}, "at least one"),
        ({"prompt_ids": [1, "2"]}, "list of token ids"),
        ({"prompt_ids": [1, True]}, "list of token ids"),
    ],
)
def test_bad_records(record: object, words: str) -> None:
    with pytest.raises(PromptError, match=words) as caught:
        parse_prompt(record, "set.jsonl:12")
    assert "set.jsonl:12" in str(caught.value)


def test_files(tmp_path: Path) -> None:
    text = tmp_path / "story.txt"
    text.write_text("Once\nupon a time", encoding="utf-8")
    (prompt,) = read_prompts(text)
    assert prompt.messages[0]["content"] == "Once\nupon a time"
    lines = "".join(json.dumps({"prompt": f"p{i}"}) + "\n\n" for i in range(3))
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    for name in ("a.jsonl", "a.jsonl.gz"):
        assert [p.messages[0]["content"] for p in read_prompts(tmp_path / name)] == ["p0", "p1", "p2"]
    assert len(read_prompts(tmp_path / "a.jsonl", limit=2)) == 2
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"prompt"\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"bad.jsonl:2: not valid JSON"):
        read_prompts(tmp_path / "bad.jsonl")
    for name, content, words in (
        ("none.jsonl", b"\n", "no prompt in the file"),
        ("blank.txt", b" \n", "is empty"),
        ("image.txt", b"\xff\xfe\x00", "not a text file"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(PromptError, match=words):
            read_prompts(tmp_path / name)
    with pytest.raises(PromptError, match="no such file"):
        read_prompts(tmp_path / "nowhere.jsonl")


def test_encoding(tmp_path: Path) -> None:
    save_word_tokenizer(tmp_path / "chat")
    save_word_tokenizer(tmp_path / "plain", template=None)
    chat, plain = load_tokenizer(tmp_path / "chat"), load_tokenizer(tmp_path / "plain")
    prompt = Prompt.of_text("w5 w6")
    assert encode_prompt(prompt, chat) == [0, 5, 6, 1]  # user w5 w6 assistant
    assert encode_prompt(prompt, chat, chat=False) == [5, 6]
    assert encode_prompt(prompt, plain) == [5, 6]
    assert encode_prompt(prompt, chat, system="w9") == [2, 9, 0, 5, 6, 1]
    own = Prompt("p", ({"role": "system", "content": "w8"}, USER))
    assert encode_prompt(own, chat, system="w9") == [2, 8, 0, 5, 6, 1]
    assert encode_prompt(Prompt("p", ids=(4, 4)), None) == [4, 4]
    with pytest.raises(PromptError, match="no tokenizer"):
        encode_prompt(prompt, None)
    with pytest.raises(PromptError, match="system message needs a chat template"):
        encode_prompt(prompt, plain, system="w9")
    with pytest.raises(PromptError, match="several messages"):
        encode_prompt(own, plain)
    with pytest.raises(ValueError, match="no chat template"):
        encode_prompt(prompt, plain, chat=True)
