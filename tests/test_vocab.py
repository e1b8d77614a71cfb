"""The draft vocabulary."""

from __future__ import annotations

import json

import numpy as np
import pytest

from eagle3_jax.data import Example
from eagle3_jax.vocab import (
    DraftVocab,
    check_vocab,
    count_tokens,
    coverage,
    load_vocab,
    save_vocab,
    select_vocab,
)


def example(ids, response) -> Example:
    return Example(np.array(ids, np.int32), np.array(response, np.int32))


def test_only_response_tokens_count():
    """Context is not counted however often it occurs; the end of turn is."""
    data = [example([5, 5, 5, 3, 3, 9], [0, 0, 0, 1, 1, 1]), example([5, 7, 9], [0, 2, 2])]
    counts = count_tokens(data, 10)
    assert counts.tolist() == [0, 0, 0, 2, 0, 0, 0, 1, 0, 2]
    assert counts.dtype == np.int64
    with pytest.raises(ValueError, match=r"example 1: token ids 7\.\.9 leave"):
        count_tokens([example([1], [1]), data[1]], 9)


def test_most_frequent_with_ties_to_the_lowest_id():
    counts = np.array([0, 4, 2, 2, 9, 2, 0])
    assert select_vocab(counts, 3).tolist() == [1, 2, 4]
    assert select_vocab(counts, 4).tolist() == [1, 2, 3, 4]
    assert select_vocab(counts, 6).tolist() == [0, 1, 2, 3, 4, 5]
    assert select_vocab(counts, 3).dtype == np.int32
    assert coverage(counts, select_vocab(counts, 3)) == pytest.approx(15 / 19)
    assert coverage(counts, np.arange(7)) == 1.0
    assert coverage(np.zeros(7, int), np.arange(2)) == 0.0
    for size in (0, 8):
        with pytest.raises(ValueError, match=r"must lie in 1\.\.7"):
            select_vocab(counts, size)
    with pytest.raises(ValueError, match="no response token"):
        select_vocab(np.zeros(7, int), 3)


def test_check_vocab():
    assert check_vocab(np.array([1, 2], np.int64), 3, "x").dtype == np.int32
    for bad in ([], [[1, 2]], [0.5, 1.0]):
        with pytest.raises(ValueError, match="x: expected a list of token ids"):
            check_vocab(np.array(bad), 3, "x")


def test_file_round_trip(tmp_path):
    path = tmp_path / "vocab.json"
    save_vocab(path, DraftVocab(np.array([1, 4, 5], np.int32), 7, 0.75, 6))
    loaded = load_vocab(path)
    assert loaded.target_ids.tolist() == [1, 4, 5]
    assert (loaded.vocab_size, loaded.coverage, loaded.seen) == (7, 0.75, 6)
    assert [p.name for p in tmp_path.iterdir()] == ["vocab.json"]
    assert json.loads(path.read_text())["target_ids"] == [1, 4, 5]  # ids as they are, not offsets


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "not a draft vocabulary file"),
        ('{"vocab_size": 7}', "target_ids"),
        (json.dumps({"vocab_size": 7, "coverage": 1, "seen": 1, "target_ids": [3, 7]}), "leave the target's vocabulary of 7"),
        (json.dumps({"vocab_size": 7, "coverage": 1, "seen": 1, "target_ids": [3, 3]}), "distinct and ascending"),
    ],
)
def test_broken_file_is_named(tmp_path, text, message):
    path = tmp_path / "vocab.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"vocab\.json.*{message}"):
        load_vocab(path)
    with pytest.raises(ValueError, match="no such file"):
        load_vocab(tmp_path / "absent.json")
