"""Formats and files, and every way they can be broken."""

from __future__ import annotations

import gzip
import json
import sys
import types

import pytest

from eagle3_jax.data import PRESETS, ConversationError, DataError, load_conversations, parse_record, questions, read_records

MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}]
RECORDS = [
    {"messages": MESSAGES},
    {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "yes"}]},
    {"prompt": "hello", "response": "yes"},
    {"prompt": [{"role": "user", "content": "hello"}], "response": "yes"},
    {
        "prompt": "hello",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}, MESSAGES[1]],
    },
]


@pytest.mark.parametrize("record", RECORDS)
def test_every_format_gives_the_same_messages(record):
    assert list(parse_record(record).messages) == MESSAGES


def test_system_prompts():
    system = {"role": "system", "content": "be kind"}
    turns = [{"from": "user", "value": "hello"}, {"from": "assistant", "value": "yes"}]
    assert list(parse_record({"system": "be kind", "conversations": turns}).messages) == [system, *MESSAGES]
    assert list(parse_record({"conversations": [{"from": "system", "value": "be kind"}, *turns]}).messages) == [system, *MESSAGES]
    assert list(parse_record({"system": "be kind", "prompt": "hello", "response": "yes"}).messages) == [system, *MESSAGES]


def test_named_format_and_further_keys():
    record = {"messages": MESSAGES, "conversations": [{"from": "human", "value": "other", "lang": "en"}], "response_ids": [1, 2]}
    assert parse_record(record, "conversations").messages == ({"role": "user", "content": "other", "lang": "en"},)
    assert parse_record(record).response_ids == ((1, 2),)
    assert parse_record({"messages": MESSAGES, "response_ids": [[1], [2, 3]]}).response_ids == ((1,), (2, 3))
    tool = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    assert parse_record({"messages": [tool]}).messages == ({"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]},)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (["hello"], "not a JSON object"),
        ({"text": "hello"}, "no conversation in the record"),
        ({"messages": "hello"}, "no conversation in the record"),
        ({"messages": None}, "no conversation in the record"),
        ({"messages": ["hello"]}, "a message is not an object"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "unknown speaker"),
        ({"messages": [{"role": "user", "content": None}]}, "content is not text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content is not text"),
        ({"prompt": "hello"}, "no assistant turn"),
        ({"messages": MESSAGES, "response_ids": []}, "bad response_ids"),
        ({"messages": MESSAGES, "response_ids": [1, "2"]}, "bad response_ids"),
        ({"messages": MESSAGES, "response_ids": [[1], []]}, "bad response_ids"),
        ({"turns": ["hello"]}, "no conversation in the record"),
    ],
)
def test_unusable_records(record, reason):
    with pytest.raises(ConversationError) as error:
        parse_record(record, where="here:3")
    assert error.value.reason == reason
    assert "here:3" in str(error.value)


USER, SYSTEM = {"role": "user", "content": "hello"}, {"role": "system", "content": "be kind"}


@pytest.mark.parametrize(
    ("record", "turns"),
    [
        ({"turns": ["hello", "hello"]}, [[USER], [USER]]),
        ({"prompt": "hello"}, [[USER]]),
        ({"prompt": [SYSTEM, USER], "response": "yes"}, [[SYSTEM, USER]]),
        ({"messages": [*MESSAGES, USER, USER, MESSAGES[1]], "system": "be kind"}, [[SYSTEM, USER], [USER, USER]]),
        ({"messages": [SYSTEM, MESSAGES[1], USER]}, [[SYSTEM, USER]]),
        ({"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "yes"}], "turns": ["no"]}, [[USER]]),
    ],
)
def test_questions_of_every_format(record, turns):
    """The record's own answers are left out, answers to nobody open no turn, a question left open is one."""
    assert questions(record) == turns


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"turns": "hello"}, "no conversation in the record"),
        ({"turns": []}, "no question"),
        ({"turns": [" "]}, "no question"),
        ({"turns": [3]}, "content is not text"),
        ({"messages": [SYSTEM]}, "no question"),
        ({"messages": [USER, MESSAGES[1], SYSTEM]}, "no question"),
        ({"messages": [USER, MESSAGES[1], {"role": "tool", "content": "42"}]}, "tools answer in the conversation"),
        ({"text": "hello"}, "no conversation in the record"),
    ],
)
def test_records_that_ask_nothing(record, reason):
    with pytest.raises(ConversationError) as error:
        questions(record, where="here:3")
    assert error.value.reason == reason
    assert "here:3" in str(error.value)


def test_files(tmp_path):
    """JSONL and one list, plain and gzip, told apart by their bytes; empty lines count as lines."""
    lines = "\n".join(json.dumps(record) for record in RECORDS[:2]) + "\n\n" + json.dumps(RECORDS[2])
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.data").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "c.json").write_text("\n" + json.dumps(RECORDS[:3], indent=1))
    (tmp_path / "d.json.gz").write_bytes(gzip.compress(json.dumps(RECORDS[:3]).encode()))
    for name in ("a.jsonl", "b.data", "c.json", "d.json.gz"):
        conversations = load_conversations(tmp_path / name)
        assert [list(c.messages) for c in conversations] == [MESSAGES] * 3
    assert load_conversations(tmp_path / "a.jsonl")[2].where == f"{tmp_path / 'a.jsonl'}:4"
    (tmp_path / "empty").write_text("")
    assert load_conversations(tmp_path / "empty") == []


def test_broken_line_is_named_or_passed_over(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"messages": []}\n\n{"messages": [\n\xff\xfe\n{"messages": []}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:3: not valid JSON"):
        list(read_records(path))
    bad: list[DataError] = []
    assert [where.rpartition(":")[2] for where, _ in read_records(path, on_bad_line=bad.append)] == ["1", "5"]
    assert [str(error).split(":")[1] for error in bad] == ["3", "4"]


def test_broken_files(tmp_path):
    whole = gzip.compress(b'{"messages": []}\n' * 1000)
    (tmp_path / "cut.gz").write_bytes(whole[:-12])
    (tmp_path / "bits.gz").write_bytes(whole[:20] + b"\x00" * 20 + whole[40:])
    for name in ("cut.gz", "bits.gz"):
        with pytest.raises(DataError, match=f"{name}: the gzip file is damaged or truncated"):
            list(read_records(tmp_path / name))
    (tmp_path / "list.json").write_text('[{"messages": []},')
    with pytest.raises(DataError, match=r"list\.json: not valid JSON"):
        list(read_records(tmp_path / "list.json"))
    with pytest.raises(DataError, match="no such file, and not a preset"):
        list(read_records(tmp_path / "absent.jsonl"))


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"messages": MESSAGES}] * 2), path)
    assert [list(c.messages) for c in load_conversations(path)] == [MESSAGES] * 2
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match=r"a\.parquet: not a readable Parquet file"):
        load_conversations(path)


def test_missing_extras_are_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1....")
    for source in (tmp_path / "a.parquet", "hf:owner/name", "sharegpt"):
        with pytest.raises(DataError, match=r"pip install 'eagle3-jax\[data\]'"):
            list(read_records(source))


def test_presets_and_hub_names(monkeypatch):
    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        if name == "owner/absent":
            raise FileNotFoundError("no such data set")
        return [{"messages": MESSAGES}]

    module = types.ModuleType("datasets")
    monkeypatch.setattr(module, "load_dataset", load_dataset, raising=False)
    monkeypatch.setitem(sys.modules, "datasets", module)
    assert [list(c.messages) for c in load_conversations("ultrachat-200k")] == [MESSAGES]
    list(read_records("hf:owner/name", split="part"))
    list(read_records("hf:owner/name"))
    assert asked == [(PRESETS["ultrachat-200k"].dataset, "train_sft"), ("owner/name", "part"), ("owner/name", "train")]
    with pytest.raises(DataError, match="owner/absent, split 'train': cannot be loaded"):
        list(read_records("hf:owner/absent"))
