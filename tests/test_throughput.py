"""Where the gain of speculation ends, from figures."""

from __future__ import annotations

import pytest

from eagle3_jax.bench.tables import throughput_table
from eagle3_jax.bench.throughput import Throughput, break_even, rows_for


def curve(*gains: float) -> list[Throughput]:
    found = []
    for i, gain in enumerate(gains):
        found += [Throughput(2**i, "plain", 10.0 * 2**i, None, 1.0), Throughput(2**i, "chain:2", 10.0 * 2**i * gain, gain, 2.0)]
    return found


def test_the_gain_ends_between_two_batches_on_a_logarithmic_scale() -> None:
    assert break_even(curve(2.0, 1.5, 0.5), "chain:2") == pytest.approx(2**1.5)
    assert break_even(curve(2.0, 1.0, 0.9), "chain:2") == pytest.approx(2.0)
    assert break_even(curve(1.4, 1.2), "chain:2") is None
    assert break_even(curve(0.9, 0.8), "chain:2") == 0.0
    assert break_even(curve(2.0), "tree:8,3,3") is None


@pytest.mark.parametrize(("batch", "rows"), [(1, "abc"), (2, "abca"), (3, "abc"), (8, "abcabcab")])
def test_every_batch_size_answers_all_prompts(batch: int, rows: str) -> None:
    assert "".join(chr(row[0]) for row in rows_for([[97], [98], [99]], batch)) == rows


def test_table() -> None:
    text = throughput_table(curve(2.0, 1.5, 0.5))
    assert text.splitlines()[0].split() == ["batch", "1", "2", "4", "gain", "ends", "at"]
    assert text.splitlines()[2].split() == ["plain,", "over", "batch", "1", "1.00x", "2.00x", "4.00x"]
    assert text.splitlines()[-1].split() == ["chain:2,", "speed-up", "2.00x", "1.50x", "0.50x", "3"]
    assert "above 2" in throughput_table(curve(1.4, 1.2))
    assert "below 1" in throughput_table(curve(0.9, 0.8))
