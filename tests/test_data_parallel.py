"""Encoding in several processes gives what encoding in one gives."""

from __future__ import annotations

import operator
from functools import partial
from itertools import count

import pytest
from chat_tokenizers import TWO_TURNS_RECORD, chatml

from eagle3_jax.data import Report, encode_all
from eagle3_jax.data.parallel import ordered_map

half = partial(operator.truediv, 1)


def test_processes_change_nothing(monkeypatch):
    """Examples and report, reasons and first cases included."""
    monkeypatch.setattr(ordered_map, "__kwdefaults__", {"small": 3, "chunk": 2})
    values = [{"prompt": f"hello {i}", "response": "yes " * i} for i in range(9)]
    values[4], values[6], values[7] = {"text": "x"}, TWO_TURNS_RECORD, {"text": "y"}
    records = [(f"file:{i}", value) for i, value in enumerate(values)]
    reports = Report(), Report()
    one, two = (encode_all(chatml(), records, report, max_length=40, processes=n) for n, report in zip((1, 2), reports, strict=True))
    assert reports[0] == reports[1]
    assert reports[0].records == 9
    assert [example.ids.tolist() for example in one] == [example.ids.tolist() for example in two]
    assert [example.response.tolist() for example in one] == [example.response.tolist() for example in two]


def test_small_sets_start_no_process_and_large_ones_are_read_as_they_go(monkeypatch):
    monkeypatch.setattr("eagle3_jax.data.parallel.ProcessPoolExecutor", None)
    assert list(ordered_map(half, [1, 2, 4], processes=8)) == [1, 0.5, 0.25]
    endless = ordered_map(half, count(1), processes=1)
    assert [next(endless), next(endless)] == [1, 0.5]


@pytest.mark.parametrize("small", [0, 10])
def test_errors_come_through(small):
    results = ordered_map(half, [1, 2, 0, 4], processes=2, small=small, chunk=1)
    assert [next(results), next(results)] == [1, 0.5]
    with pytest.raises(ZeroDivisionError):
        next(results)
