"""Rows of one length from examples of any length; the order of training."""

from __future__ import annotations

import numpy as np
import pytest
from chat_tokenizers import CHATML, byte_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle3_jax.data import Example, Stream, encode_conversation, fill_rows, order, pack, parse_record, process_share

# A busy machine is no defect.
patient = settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])


def numbered(lengths: list[int]) -> list[Example]:
    """Examples whose ids tell example and place: example e holds 1000 e + 1, 1000 e + 2, ..."""
    return [Example(np.arange(1, n + 1, dtype=np.int32) + 1000 * e, np.arange(n, dtype=np.int32) % 3) for e, n in enumerate(lengths)]


@patient
@given(st.lists(st.integers(1, 20), max_size=60), st.integers(1, 5))
def test_every_example_once_whole_and_apart(lengths, open_rows):
    examples = numbered(lengths)
    sizes = [(n,) for n in lengths]
    plan = pack(sizes, (20,), open_rows)
    assert sorted(e for row in plan for e in row) == list(range(len(lengths)))
    assert all(row == sorted(row) for row in plan)
    assert plan == pack(sizes, (20,), open_rows)
    rows = fill_rows([[examples[e] for e in row] for row in plan], 20)
    assert rows.ids.shape == rows.response.shape == rows.segments.shape == rows.positions.shape == (len(plan), 20)
    for r, members in enumerate(plan):
        for segment, e in enumerate(members, 1):
            (places,) = np.nonzero(rows.segments[r] == segment)
            assert places.tolist() == list(range(places[0], places[0] + lengths[e]))
            assert rows.ids[r, places].tolist() == examples[e].ids.tolist()
            assert rows.response[r, places].tolist() == examples[e].response.tolist()
            assert rows.positions[r, places].tolist() == list(range(lengths[e]))
        padding = rows.segments[r] == 0
        assert padding.sum() == 20 - sum(lengths[e] for e in members)
        assert not rows.response[r, padding].any()
    if lengths:
        assert rows.fill == pytest.approx(sum(lengths) / (20 * len(plan)))


def test_rows_are_filled_well():
    """Lengths of real chats vary: few slots may stay empty."""
    lengths = (np.random.default_rng(0).gamma(2.0, 140.0, 2000).astype(int) % 1024 + 1).tolist()
    plan = pack([(n,) for n in lengths], (1024,))
    examples = numbered(lengths)
    assert fill_rows([[examples[e] for e in row] for row in plan], 1024).fill > 0.95


def test_every_limit_holds():
    """Two limits: tokens and supervised tokens."""
    sizes = [(5, 1), (5, 3), (5, 2), (9, 0), (1, 3)]
    rows = pack(sizes, (10, 3))
    assert sorted(e for row in rows for e in row) == list(range(5))
    assert all(sum(sizes[e][limit] for e in row) <= most for row in rows for limit, most in enumerate((10, 3)))


def test_example_longer_than_a_row():
    with pytest.raises(ValueError, match="item 1 of size"):
        pack([(3,), (21,)], (20,))
    with pytest.raises(ValueError, match="row 1: 21 tokens do not fit"):
        fill_rows([numbered([3]), numbered([10, 11])], 20)


def test_rows_of_padding():
    rows = fill_rows([numbered([2])], 3, rows=2, pad_id=7)
    assert rows.ids.tolist() == [[1, 2, 7], [7, 7, 7]]
    assert rows.segments.tolist() == [[1, 1, 0], [0, 0, 0]]
    assert rows.places == [[slice(0, 2)]]


def test_padding_equal_to_end_of_sequence():
    """pad = eos: the answer's own end is supervised, the padding after it is not; padding is told by length, never by id."""
    tokenizer = byte_tokenizer(CHATML, eos="<|im_end|>", pad="<|im_end|>")
    eos = tokenizer.encode("<|im_end|>")[0]
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == eos
    example = encode_conversation(tokenizer, parse_record({"prompt": "hello", "response": "yes"}))
    rows = fill_rows([[example]], len(example) + 3, pad_id=eos)
    assert rows.ids[0, -4:].tolist() == [eos] * 4
    assert rows.response[0, -4:].tolist() == [1, 0, 0, 0]
    assert rows.segments[0, -4:].tolist() == [1, 0, 0, 0]


@patient
@given(st.integers(0, 2**63), st.integers(0, 1000), st.integers(0, 200), st.integers(1, 9))
def test_order_is_a_permutation_that_processes_share(seed, epoch, n, count):
    permutation = order(seed, epoch, n)
    assert sorted(permutation.tolist()) == list(range(n))
    shares = [process_share(permutation, process, count) for process in range(count)]
    assert sorted(np.concatenate(shares).tolist()) == list(range(n))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_order_depends_on_seed_and_epoch_and_nothing_else():
    known = [2, 5, 7, 3, 0, 6, 4, 1]
    assert order(7, 3, 8).tolist() == known
    order.cache_clear()
    assert order(7, 3, 8).tolist() == known
    assert len({tuple(order(seed, epoch, 50).tolist()) for seed in range(5) for epoch in range(5)}) == 25
    with pytest.raises(ValueError, match="read-only"):
        order(7, 3, 8)[0] = 1
    with pytest.raises(ValueError, match="negative"):
        order(-1, 0, 8)
    with pytest.raises(ValueError, match="process 2 of 2"):
        process_share(order(0, 0, 8), 2, 2)


@patient
@given(st.integers(1, 12), st.lists(st.integers(0, 30), min_size=1, max_size=6))
def test_stream_resumes_exactly(n, counts):
    """Any split of the stream gives the same stream, and each epoch holds every item once."""
    stream, pieces = Stream(3), []
    for count in counts:
        indices, stream = stream.take(n, count)
        stream = Stream(stream.seed, stream.position)  # as read back from a checkpoint
        pieces.append(indices)
    whole, _ = Stream(3).take(n, sum(counts))
    assert np.concatenate(pieces).tolist() == whole.tolist()
    for epoch in range(len(whole) // n):
        assert whole[epoch * n : (epoch + 1) * n].tolist() == order(3, epoch, n).tolist()


def test_stream_refuses_nonsense():
    with pytest.raises(ValueError, match="cannot take"):
        Stream(0).take(0, 1)
    with pytest.raises(ValueError, match="cannot take"):
        Stream(0).take(3, -1)
