"""Results of long runs on disk: nothing lost, nothing doubled, whatever happens."""

from __future__ import annotations

import gzip
import json
import os

import pytest

from eagle3_jax.journal import Journal, JournalError, finished

ABOUT = {"seed": 0, "stops": (1, 2)}


def lines(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_results_by_number_in_one_file(tmp_path):
    file = tmp_path / "deep" / "out.jsonl"
    journal = Journal(file, ABOUT)
    journal.append({3: "c", 1: "a"})
    journal.append({})
    journal.append({2: {"é": 1}})
    assert not finished(file)
    assert list(journal.results()) == [(1, "a"), (2, {"é": 1}), (3, "c")]
    journal.finish(result for _, result in journal.results())
    assert lines(file) == ["a", {"é": 1}, "c"]
    assert [path.name for path in file.parent.iterdir()] == ["out.jsonl"]
    assert finished(file)
    with pytest.raises(JournalError, match=r"out\.jsonl: exists"):
        Journal(file, ABOUT, resume=True)


def test_compressed_files_are_the_same_each_time(tmp_path):
    for name in ("a.jsonl.gz", "b.jsonl.gz"):
        journal = Journal(tmp_path / name, ABOUT)
        journal.append({1: "x"})
        journal.finish(["x", "y"])
    assert gzip.decompress((tmp_path / "a.jsonl.gz").read_bytes()) == b'"x"\n"y"\n'
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()


@pytest.mark.parametrize("torn", [b"", b"{", b'{"number": 9, "result": "half'])
def test_a_line_cut_off_by_a_kill_is_dropped(tmp_path, torn):
    file, part = tmp_path / "out.jsonl", tmp_path / "out.jsonl.part"
    journal = Journal(file, ABOUT)
    journal.append({0: "a", 1: "b"})
    journal.close()
    part.write_bytes(part.read_bytes() + torn)
    journal = Journal(file, ABOUT, resume=True)
    assert journal.found == {0, 1}
    journal.append({2: "c"})
    journal.close()
    journal = Journal(file, ABOUT, resume=True)
    assert journal.found == {0, 1, 2}
    journal.close()


def test_whose_it_is(tmp_path):
    file = tmp_path / "out.jsonl"
    journal = Journal(file, ABOUT)
    journal.append({0: "a"})
    with pytest.raises(JournalError, match="another process is writing it"):
        Journal(file, ABOUT, resume=True)
    journal.close()
    before = (tmp_path / "out.jsonl.part").read_bytes()
    with pytest.raises(JournalError, match="an unfinished run is there; continue it with --resume"):
        Journal(file, ABOUT)
    with pytest.raises(JournalError, match=r"another run; heat: there None, now 1; seed: there 0, now 5$"):
        Journal(file, {**ABOUT, "seed": 5, "heat": 1}, resume=True)
    assert (tmp_path / "out.jsonl.part").read_bytes() == before


def test_damage_is_named(tmp_path):
    file, part = tmp_path / "out.jsonl", tmp_path / "out.jsonl.part"
    Journal(file, ABOUT).close()
    whole = part.read_bytes()
    part.write_bytes(whole + b'not JSON\n{"number": 1, "result": 1}\n')
    with pytest.raises(JournalError, match=r"out\.jsonl\.part:2: damaged"):
        Journal(file, ABOUT, resume=True)
    for contents in (b"", whole[:-1], b'{"prompt": "mine"}\n'):
        part.write_bytes(contents)
        with pytest.raises(JournalError, match=r"damaged|holds no run"):
            Journal(file, ABOUT, resume=True)
        assert part.read_bytes() == contents


def test_a_full_disk_costs_nothing_that_was_there(tmp_path, monkeypatch):
    file = tmp_path / "out.jsonl"
    journal = Journal(file, ABOUT)
    journal.append({0: "a"})

    def full(handle):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", full)
        with pytest.raises(JournalError, match=r"No space left.*go on with --resume"):
            journal.append({1: "b"})
        with pytest.raises(OSError, match="No space left"):
            journal.finish(["a"])
    assert not finished(file)
    journal.append({2: "c"})
    journal.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl.part"]
    journal = Journal(file, ABOUT, resume=True)
    assert journal.found == {0, 2}
    journal.close()


def test_killed_between_the_file_and_its_part(tmp_path):
    file, part = tmp_path / "out.jsonl", tmp_path / "out.jsonl.part"
    file.write_text("{}\n")
    part.write_text("{}\n")
    assert finished(file)
    assert not part.exists()
