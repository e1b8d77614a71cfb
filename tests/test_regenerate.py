"""eagle3-data regenerate on the tiny pair: answers by the target, whatever interrupts the run."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_scripts import ROOT, load_script, run_script, save_word_tokenizer

from eagle3_jax import regenerate as module
from eagle3_jax.data import DataError, Report, encode_all, parse_record, read_records
from eagle3_jax.decoding.generate import generate
from eagle3_jax.decoding.serve import Server
from eagle3_jax.journal import JournalError
from eagle3_jax.regenerate import Source, regenerate, seed_of
from eagle3_jax.tokenizer import chat_ids, load_tokenizer

SCRIPT = load_script("data", "train")
STOPS = list(range(20, 36))
OPTIONS = dict(max_new_tokens=10, temperature=1.5, eos_token_ids=STOPS)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_word_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder):
    return load_tokenizer(tokenizer_folder)


def words(*numbers: int) -> str:
    return " ".join(f"w{n}" for n in numbers)


RECORDS = [
    {"id": "two", "source": "here", "turns": [words(50, 51), words(52)]},
    {"prompt": words(60), "response": words(1), "other": 1},
    {"text": "nothing to ask"},
    {"messages": [{"role": "user", "content": words(*range(70, 100))}]},
    {"conversations": [{"from": "human", "value": words(i)} if i % 2 else {"from": "gpt", "value": "no"} for i in range(41, 47)]},
    *({"turns": [words(*range(100, 100 + n)), words(130 + n)]} for n in range(1, 7)),
]


@pytest.fixture
def source(tmp_path) -> Source:
    file = tmp_path / "source.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return Source(str(file), max_prompt=60)


@pytest.fixture
def run(golden_target, tokenizer, source, tmp_path):
    """The whole thing; returns the tally and the lines."""

    def run(name="out.jsonl", source=source, *, draft=None, batch=3, cycles=4, **options):
        server = Server(golden_target, draft, batch=batch, cycles=cycles, **{**OPTIONS, **options.pop("settings", {})})
        tally = regenerate(server, tokenizer, source, tmp_path / name, **{"seed": 5, "about": {"x": 1}, **options})
        return tally, [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]

    return run


def test_every_answer_is_the_targets_own(run, golden_target, tokenizer):
    """By record; each turn behind the answers before it, sampled with its own seed; the sampled ids, and the text without the stop."""
    tally, records = run()
    assert [record["index"] for record in records] == [0, 1, 3, 4, 5, 6, 7, 8, 9, 10]
    assert (tally.records, tally.kept, dict(tally.dropped)) == (11, 10, {"no conversation in the record": 1})
    assert (records[0]["id"], records[0]["source"]) == ("two", "here")
    assert set(records[1]) == {"index", "messages", "response_ids", "finish_reason"}
    prompts, seeds, given, reasons = [], [], [], []
    for record in records:
        several = isinstance(record["finish_reason"], list)
        ids, ends = (record["response_ids"], record["finish_reason"]) if several else ([record["response_ids"]], [record["finish_reason"]])
        places = [i for i, message in enumerate(record["messages"]) if message["role"] == "assistant"]
        assert len(ids) == len(places)
        for turn, place in enumerate(places):
            prompts.append(chat_ids(tokenizer, record["messages"][:place]))
            seeds.append(seed_of(5, record["index"], turn))
            assert record["messages"][place]["content"] == tokenizer.decode(ids[turn][:-1] if ends[turn] == "stop" else ids[turn])
        given += ids
        reasons += ends
    expected = generate(golden_target, None, prompts, seed=seeds, **OPTIONS)
    assert expected.tokens == given
    assert expected.finish_reasons == reasons
    assert tally.answers == len(given) > tally.kept
    assert tally.response_tokens == tally.tokens == sum(map(len, given))
    assert tally.cut == reasons.count("length") > 0
    # A conversation goes on behind an answer that ended by itself, and ends behind one that was cut.
    asked = [2, 1, 1, 3, *[2] * 6]
    for record, turns in zip(records, asked, strict=True):
        ends = record["finish_reason"] if isinstance(record["finish_reason"], list) else [record["finish_reason"]]
        assert "length" not in ends[:-1]
        assert len(ends) == turns or ends[-1] == "length"


@pytest.mark.slow
def test_draft_and_batch_change_nothing(run, golden_draft, tmp_path):
    run("plain.jsonl")
    tally, _ = run("drafted.jsonl", draft=golden_draft, batch=4)
    assert (tmp_path / "plain.jsonl").read_bytes() == (tmp_path / "drafted.jsonl").read_bytes()
    assert tally.tau > 1


class Stopped(Exception):
    pass


def test_interrupted_runs_end_in_the_same_file(run, tmp_path):
    """Stopped again and again, each time with half a line behind the last one, and gone on with another batch."""
    run("whole.jsonl")
    part = tmp_path / "out.jsonl.part"

    def stop_after(count):
        def say(tally, waiting):
            nonlocal count
            count -= 1
            if not count:
                raise Stopped

        return say

    for attempt in range(100):
        try:
            tally, _ = run(batch=2 + attempt % 2, say=stop_after(3 + attempt), resume=True)
            break
        except Stopped:
            part.write_bytes(part.read_bytes() + b'{"number": 3, "resu')
    assert attempt > 2
    assert tally.earlier > 0
    assert (tally.records, tally.kept) == (11, 10)
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not part.exists()


def test_shares_together_are_the_whole(run, source):
    _, whole = run()
    shares = [run(f"{i}.jsonl", Source(source.name, share=(i, 3), max_prompt=60))[1] for i in range(3)]
    assert sorted((record for share in shares for record in share), key=lambda record: record["index"]) == whole


def test_first_turns_alone_and_a_system_message(run, source):
    tally, records = run("first.jsonl", Source(source.name, turns="first", system=words(7), limit=5, max_prompt=60))
    assert tally.records == 5
    assert [[message["role"] for message in record["messages"]] for record in records] == [["system", "user", "assistant"]] * 4
    assert records[0]["messages"][0]["content"] == "w7"


def test_what_is_dropped_is_told(run, source, tmp_path):
    """Prompts that are too long, and answers during which the target broke."""
    tally, records = run("short.jsonl", Source(source.name, max_prompt=20))
    assert tally.dropped["the prompt is too long"] == 1
    assert "source.jsonl:4" in tally.details["the prompt is too long"]
    assert 3 not in [record["index"] for record in records]
    assert "dropped        1: the prompt is too long; first: " in str(tally)
    with pytest.raises(DataError, match=r"(?s)no conversation could be kept.*10: the prompt is too long"):
        run("none.jsonl", Source(source.name, max_prompt=1))
    assert not (tmp_path / "none.jsonl").exists()


def test_a_broken_target_is_told(run, source, golden_target, monkeypatch):
    def broken(report_collect):
        def collect(self, report):
            return [module.Answer(a.job, [], module.BROKEN, []) if a.job.key.number == 1 else a for a in report_collect(self, report)]

        return collect

    monkeypatch.setattr(Server, "_collect", broken(Server._collect))
    tally, records = run("broken.jsonl", Source(source.name, turns="first"))
    assert 1 not in [record["index"] for record in records]
    assert tally.dropped["the target's logits were not finite"] == 1


def test_another_run_is_not_mixed_in(run, tmp_path):
    def stop(tally, waiting):
        raise Stopped

    with pytest.raises(Stopped):
        run(say=stop)
    with pytest.raises(JournalError, match="continue it with --resume"):
        run()
    with pytest.raises(JournalError, match=r"seed: there 5, now 6"):
        run(resume=True, seed=6)
    (tmp_path / "source.jsonl").write_text(json.dumps(RECORDS[0]))
    with pytest.raises(JournalError, match=r"name: there '[0-9a-f]{64}', now"):
        run(resume=True)


def test_prepared_data_holds_the_sampled_ids(run, tokenizer, tmp_path):
    """What was sampled is what is trained on, token for token, in every turn."""
    _, records = run()
    report = Report()
    examples = encode_all(tokenizer, read_records(tmp_path / "out.jsonl"), report)
    assert report.kept == len(records)
    kept = [ids for record in records for ids in parse_record(record).response_ids]
    trained = [e.ids[e.response == r].tolist() for e in examples for r in range(1, e.response.max() + 1)]
    assert [list(ids) for ids in kept] == trained


def test_command(golden, source, tokenizer_folder, tmp_path, capsys):
    out = tmp_path / "out.jsonl.gz"
    stops = [option for stop in STOPS for option in ("--stop", str(stop))]
    models = ["--target", str(golden / "target"), "--tokenizer", str(tokenizer_folder), *stops]
    options = ["--temperature", "1.5", "--max-new-tokens", "10", "--ignore-eos", "--seed", "5", "--batch", "3", "--max-prompt", "60"]
    arguments = ["regenerate", source.name, "--out", str(out), *models, *options]
    assert run_script(SCRIPT, *arguments) == 0
    shown = capsys.readouterr().out
    assert "conversations  11: 10 kept, 1 dropped" in shown
    assert "tokens/s" in shown
    assert len(gzip.decompress(out.read_bytes()).splitlines()) == 10
    assert run_script(SCRIPT, *arguments) == 2
    assert "exists; name another output" in capsys.readouterr().err
    assert run_script(SCRIPT, *arguments, "--resume") == 0
    assert "is complete" in capsys.readouterr().out
    assert run_script(SCRIPT, *arguments[:2], "--out", str(tmp_path / "x"), *models, "--share", "2/2") == 2
    assert "share 2 of 2" in capsys.readouterr().err
    assert run_script(SCRIPT, *arguments[:2], "--out", str(tmp_path / "x"), *models, "--share", "half") == 2
    assert "expected I/N" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl.gz", "source.jsonl"]


@pytest.mark.slow
def test_killed_at_random_moments(golden, tokenizer_folder, tmp_path):
    """kill -9, again and again, while answers are being written: no conversation is lost, doubled or changed."""
    file = tmp_path / "source.jsonl"
    file.write_text("".join(json.dumps({"turns": [words(40 + i % 90, 41 + i % 70), words(50)]}) + "\n" for i in range(600)))
    command = [sys.executable, str(ROOT / "train" / "data.py"), "regenerate", str(file), "--target", str(golden / "target")]
    command += ["--tokenizer", str(tokenizer_folder), "--temperature", "1.5", "--max-new-tokens", "40", "--resume", "--batch", "4"]
    command += [option for stop in STOPS for option in ("--stop", str(stop))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    errors = tmp_path / "errors"

    def start(out: Path) -> subprocess.Popen:
        with errors.open("wb") as stderr:
            return subprocess.Popen([*command, "--out", str(out)], env=environment, stdout=subprocess.DEVNULL, stderr=stderr)

    assert start(tmp_path / "whole.jsonl").wait() == 0, errors.read_text()
    out, part = tmp_path / "out.jsonl", tmp_path / "out.jsonl.part"
    chance, kills = random.Random(0), 0

    def kept() -> int:
        return part.read_bytes().count(b"\n") if part.exists() else 0

    while not out.exists():
        process, wanted = start(out), kept() + chance.randint(1, 200)
        while process.poll() is None and kept() < wanted:
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.2))
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
        else:
            assert process.returncode == 0, errors.read_text()
    assert kills >= 3
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert [json.loads(line)["index"] for line in out.read_text().splitlines()] == list(range(600))
    assert not part.exists()


def test_seeds_are_apart():
    seeds = {seed_of(seed, index, turn) for seed in range(3) for index in range(50) for turn in range(3)}
    assert len(seeds) == 450
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert seed_of(5, 1, 0) == 17996766564426832300
