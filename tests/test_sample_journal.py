"""An interrupted benchmark goes on where it stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3_jax.bench.benchmark import Sample, finished
from eagle3_jax.bench.sample_journal import SampleJournal as Journal

RUN = {"trees": ["chain:2"], "limit": None, "sizes": (1, 2)}


def sample(mode: str, prompt: int) -> Sample:
    return Sample(mode, [prompt], [[1, 2]], ["length"], [[1]], [0.5], 0.1)


def test_samples_come_back_and_an_unfinished_line_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "bench.json.journal"
    first = Journal(path, RUN, resume=False)
    for unit, mode in (("a", "plain"), ("a", "chain:2"), ("b", "plain")):
        first.add(unit, sample(mode, 0))
    first.close()
    part = path.with_name(path.name + ".part")
    with part.open("a", encoding="utf-8") as file:
        file.write('{"number": 3, "resu')
    second = Journal(path, RUN, resume=True)
    assert second.samples == {"a": [sample("plain", 0), sample("chain:2", 0)], "b": [sample("plain", 0)]}
    second.add("b", sample("chain:2", 0))
    second.close()
    third = Journal(path, RUN, resume=True)
    assert third.samples["b"] == [sample("plain", 0), sample("chain:2", 0)]
    third.finish()
    assert not part.exists()


def test_another_run_is_refused_by_name_and_a_new_one_starts_over(tmp_path: Path) -> None:
    path = tmp_path / "bench.json.journal"
    first = Journal(path, RUN, resume=False)
    first.add("a", sample("plain", 0))
    first.close()
    with pytest.raises(ValueError, match="another run; limit: there None, now 3"):
        Journal(path, {**RUN, "limit": 3}, resume=True)
    fresh = Journal(path, RUN, resume=False)
    assert fresh.samples == {}
    fresh.close()
    missing = Journal(tmp_path / "none", RUN, resume=True)
    assert missing.samples == {}
    missing.close()


def test_only_batches_that_every_mode_decoded_are_finished() -> None:
    samples = [sample("chain:2", 1), sample("plain", 0), sample("chain:2", 0), sample("tree:8,3,3", 0)]
    assert finished(samples, ["plain", "chain:2"]) == [sample("plain", 0), sample("chain:2", 0)]
