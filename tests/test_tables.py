"""Texts beside each other, and tables, column for column."""

from __future__ import annotations

import pytest

from eagle3_jax.benchmark import Sample, summarise
from eagle3_jax.evaluate import Interval
from eagle3_jax.tables import benchmark_table, comparison_table, display_width, duration, figure, mean_table, side_by_side, table, wrap


def test_wrap() -> None:
    assert wrap("the quick brown fox", 10) == ["the quick", "brown fox"]
    assert wrap("a\n\n    indented code", 20) == ["a", "", "    indented code"]
    assert wrap("abcdefghij kl", 4) == ["abcd", "efgh", "ij", "kl"]
    assert wrap("", 5) == [""]
    assert wrap("日本語 テキスト", 6) == ["日本語", "テキス", "ト"]
    assert display_width("日本e\u0301") == 5
    text = "Speculative decoding drafts a few tokens, checks them in one pass, and keeps what the target would have said. " * 4
    for width in (1, 7, 23, 80):
        lines = wrap(text, width)
        assert all(display_width(line) <= width for line in lines)
        assert "".join("".join(lines).split()) == "".join(text.split())


def test_side_by_side() -> None:
    assert side_by_side("one two three", "eins", ("plain", "fast"), 19).splitlines() == [
        "plain    │ fast",
        "─────────┼─────────",
        "one two  │ eins",
        "three    │",
    ]


def test_table_and_figures() -> None:
    assert table([["", "a"], ["xyz", "10"]]) == "      a\nxyz  10"
    assert [duration(x) for x in (None, 0.0123, 0.5, 14.2)] == ["-", "12.3 ms", "0.50 s", "14 s"]
    assert figure(Interval(1.234, 1.1, 1.3)) == "1.23 [1.10, 1.30]"
    assert figure(Interval(1.234)) == "1.23"
    assert figure(None) == "-"


@pytest.fixture
def modes() -> list:
    def sample(mode: str, prompt: int, lengths: list[int], seconds: float) -> Sample:
        return Sample(mode, [prompt], [list(range(1 + sum(lengths)))], ["length"], [lengths], [seconds], 1.0)

    return summarise(
        [
            sample("plain", 0, [1] * 8, 9.0),
            sample("chain:3", 0, [4, 2, 2], 5.5),
            sample("tree:8,2,3", 0, [3, 3, 2], 7.0),
            sample("plain", 1, [1] * 8, 9.0),
            sample("chain:3", 1, [4, 4], 5.5),
            sample("tree:8,2,3", 1, [3, 3, 2], 7.0),
        ],
        {"plain": 2.0, "chain:3": 3.0, "tree:8,2,3": 4.0},
    )


def test_comparison_table(modes: list) -> None:
    lines = {line[:36].strip(): line[36:].split() for line in comparison_table(modes[0], modes[1]).splitlines()[1:]}
    assert lines["tokens"] == ["18", "18"]
    assert lines["target passes after the prompt"] == ["16", "5"]
    assert lines["acceptance length (tokens per pass)"][:3] == ["1.00", "[1.00,", "1.00]"]
    assert lines["acceptance length (tokens per pass)"][3] == "3.20"
    assert lines["speed-up"][:2] == ["1.00", "1.64"]
    assert lines["speed-up after the first token"][1] == "1.78"
    assert lines["time of a cycle"] == ["1.00", "s", "1.80", "s", "=", "1.80", "plain", "steps"]


def test_benchmark_and_mean_tables(modes: list) -> None:
    lines = benchmark_table(modes).splitlines()
    assert len(lines) == 4
    assert len({line.index(end) for line, end in zip(lines, ("compile", "2.00 s", "3.00 s", "4.00 s"), strict=True)}) == 2
    assert "3.20 [2.67, 4.00]" in lines[2]
    assert "2/2" in lines[2]
    assert "(" not in lines[2]
    assert "(1.00 1.00)" in lines[3]
    mean = mean_table([modes, modes]).splitlines()
    assert mean[2].split() == ["chain:3", "3.20", "1.6", "1.64", "1.78"]
    assert mean[1].split() == ["plain", "1.00", "1.0", "-", "-"]
