"""Whole sets: the report, prepared data on disk, and the command."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
from chat_tokenizers import FAMILIES, TWO_TURNS_RECORD, chatml
from command_scripts import load_script, run_script

from eagle3_jax import data
from eagle3_jax.data import DataError, Report, encode_all, load_prepared, mark_responses, save_prepared
from eagle3_jax.vocab import load_vocab


def ask(question: str, answer: str) -> dict:
    return {"prompt": question, "response": answer}


def records(*values) -> list[tuple[str, object]]:
    return [(f"file:{line}", value) for line, value in enumerate(values, 1)]


def test_report_counts_and_reasons():
    """Kept, dropped with reason and first case, cut with an answer left, cut before the answer."""
    report = Report()
    tokenizer = chatml()
    long_question = ask("one two three " * 30, "yes")
    values = [
        ask("hello", "yes"),
        ask("hello", "no " * 200),
        long_question,
        {"text": "x"},
        {"messages": [{"role": "user", "content": "hello"}]},
        {"text": "y"},
    ]
    examples = encode_all(tokenizer, records(*values), report, max_length=120)
    assert (report.records, report.kept, report.examples, report.truncated) == (6, 2, 2, 1)
    assert report.dropped == {"no conversation in the record": 2, "no assistant turn": 1, "no response within the length limit": 1}
    assert report.details["no conversation in the record"].endswith("found text")
    assert "file:4" in report.details["no conversation in the record"]
    assert [len(example) for example in examples][1] == 120
    assert report.tokens == sum(map(len, examples))
    assert report.supervised == sum(int((example.response > 0).sum()) for example in examples)
    assert "6: 2 kept, 4 dropped" in str(report)
    assert f"{report.supervised / report.tokens:.1%}" in str(report)
    assert json.loads(json.dumps(report.to_json()))["dropped"] == dict(report.dropped)


def test_rewritten_history_gives_several_examples():
    report = Report()
    examples = encode_all(FAMILIES["rewriting"](), records(TWO_TURNS_RECORD, ask("hello", "yes")), report)
    assert (report.records, report.kept, report.examples) == (2, 2, 3)
    assert len(examples) == 3
    shortest = min(map(len, examples[:2]))
    report = Report()
    assert len(encode_all(FAMILIES["rewriting"](), records(TWO_TURNS_RECORD), report, max_length=shortest)) == 1
    assert (report.kept, report.examples, report.truncated) == (1, 1, 0)


def test_nothing_supervised_is_an_error():
    with pytest.raises(DataError, match=r"(?s)no supervised token in the whole set.*2: no assistant turn"):
        encode_all(chatml(), records(*[{"messages": [{"role": "user", "content": "hello"}]}] * 2), Report())
    with pytest.raises(DataError, match="no supervised token"):
        encode_all(chatml(), [], Report())


def test_marks_show_exactly_what_is_supervised():
    (example,) = encode_all(chatml(), records(TWO_TURNS_RECORD), Report())
    text = mark_responses(chatml(), example)
    assert text.count("⟦") == text.count("⟧") == 2
    assert "assistant\n⟦the answer is one<|im_end|>⟧\n" in text
    assert text.endswith("⟦two, yes<|im_end|>⟧")
    assert text.replace("⟦", "").replace("⟧", "") == chatml().decode(example.ids.tolist())
    assert "⟦the an … _end|>⟧" in mark_responses(chatml(), example, longest=12)


def test_prepared_data_round_trip(tmp_path):
    examples = encode_all(chatml(), records(ask("hello", "yes"), TWO_TURNS_RECORD, ask("a", "")), Report())
    save_prepared(tmp_path / "set", examples, {"tokenizer": "t"})
    loaded = load_prepared(tmp_path / "set")
    assert len(loaded) == 3
    assert loaded.about["tokenizer"] == "t"
    for index in (0, 1, 2, -1):
        assert loaded[index].ids.tolist() == examples[index].ids.tolist()
        assert loaded[index].response.tolist() == examples[index].response.tolist()
    assert [len(example) for example in loaded] == [len(example) for example in examples]
    with pytest.raises(IndexError):
        loaded[3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set"]


def test_prepared_data_is_whole_or_absent(tmp_path):
    """Nothing half-written after a failure, nothing replaced unasked, nothing foreign replaced at all."""
    (example,) = encode_all(chatml(), records(ask("hello", "yes")), Report())
    with pytest.raises(TypeError):
        save_prepared(tmp_path / "set", [example], {"not JSON": object()})
    assert list(tmp_path.iterdir()) == []
    save_prepared(tmp_path / "set", [example], {})
    with pytest.raises(DataError, match="exists; name another output"):
        save_prepared(tmp_path / "set", [example, example], {})
    with pytest.raises(TypeError):
        save_prepared(tmp_path / "set", [example, example], {"not JSON": object()}, overwrite=True)
    assert len(load_prepared(tmp_path / "set")) == 1
    save_prepared(tmp_path / "set", [example, example], {}, overwrite=True)
    assert len(load_prepared(tmp_path / "set")) == 2
    (tmp_path / "mine").mkdir()
    with pytest.raises(DataError, match="is not prepared data"):
        save_prepared(tmp_path / "mine", [example], {}, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "set"]


def test_damaged_prepared_data_is_named(tmp_path):
    (example,) = encode_all(chatml(), records(ask("hello", "yes")), Report())
    folder = tmp_path / "set"
    save_prepared(folder, [example], {})
    np.save(folder / "response.npy", example.response[:-1])
    with pytest.raises(DataError, match=r"response\.npy: int32\[\d+\], the manifest says int32\[\d+\]"):
        load_prepared(folder)
    np.save(folder / "response.npy", example.response.astype(np.int64))
    with pytest.raises(DataError, match=r"response\.npy: int64"):
        load_prepared(folder)
    (folder / "response.npy").write_bytes(b"no array")
    with pytest.raises(DataError, match=r"response\.npy: missing or damaged"):
        load_prepared(folder)
    (folder / "manifest.json").write_text('{"format": 99}')
    with pytest.raises(DataError, match="format 99"):
        load_prepared(folder)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(DataError, match=r"manifest\.json: not valid JSON"):
        load_prepared(folder)
    with pytest.raises(DataError, match="not prepared data"):
        load_prepared(tmp_path / "absent")


@pytest.fixture
def command(monkeypatch):
    """eagle3-data in this process, with small tokenizers in the place of the ones it would load."""
    module = load_script("data", "train")
    monkeypatch.setattr("eagle3_jax.data.pipeline.load_tokenizer", lambda name: FAMILIES[name]())
    return partial(run_script, module)


def test_command(command, tmp_path, capsys):
    source = tmp_path / "chats.jsonl"
    source.write_text("\n".join(json.dumps(value) for value in (ask("hello", "yes"), TWO_TURNS_RECORD)) + "\nbroken\n")
    out, vocab = tmp_path / "out" / "set", tmp_path / "vocab.json"
    arguments = ["prepare", str(source), "--tokenizer", "chatml", "--out", str(out)]
    assert command(*arguments) == 2
    assert "chats.jsonl:3: not valid JSON" in capsys.readouterr().err
    assert not out.exists()
    assert command(*arguments, "--skip-bad-lines", "--show", "1") == 0
    shown = capsys.readouterr().out
    assert "2: 2 kept, 0 dropped" in shown
    assert "1 skipped; first:" in shown
    assert shown.count("--- example") == 1
    assert "⟦yes<|im_end|>⟧" in shown
    assert command(*arguments, "--skip-bad-lines") == 2
    assert "exists" in capsys.readouterr().err
    assert load_prepared(out).about["report"]["bad_lines"] == 1

    assert command("vocab", str(out), "--size", "12", "--out", str(vocab)) == 0
    assert "12 of" in capsys.readouterr().out
    kept = load_vocab(vocab)
    assert chatml().convert_tokens_to_ids("<|im_end|>") in kept.target_ids
    assert len(kept.target_ids) == 12
    assert 0 < kept.coverage <= 1
    assert command("show", str(out), "--count", "5") == 0
    assert capsys.readouterr().out.count("--- example") == 2


def test_command_options(command, tmp_path, capsys):
    source = tmp_path / "chats.jsonl"
    source.write_text("\n".join(json.dumps(TWO_TURNS_RECORD) for _ in range(3)))
    arguments = ["prepare", str(source), "--tokenizer", "chatml", "--out", str(tmp_path / "set"), "--overwrite", "--show", "0"]
    assert command(*arguments, "--limit", "2", "--last-turn-only", "--max-length", "0", "--format", "messages") == 0
    prepared = load_prepared(tmp_path / "set")
    assert len(prepared) == 2
    assert prepared.about["max_length"] is None
    assert chatml().decode(prepared[0].ids[prepared[0].response > 0].tolist()) == "two, yes<|im_end|>"
    assert command(*arguments, "--max-length", "1") == 2
    assert command(*arguments, "--format", "prompt") == 2
    assert "no supervised token" in capsys.readouterr().err
    assert len(load_prepared(tmp_path / "set")) == 2


def test_preset_brings_its_format(monkeypatch, tmp_path):
    monkeypatch.setattr("eagle3_jax.data.pipeline.load_tokenizer", lambda name: chatml())
    record = {
        "messages": [{"role": "user", "content": "not this"}],
        "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
    }
    monkeypatch.setattr("eagle3_jax.data.pipeline.read_records", lambda source, **_: iter(records(record)))
    assert data.prepare("sharegpt", tmp_path / "set", "chatml").kept == 1
