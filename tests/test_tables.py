"""Texts beside each other, and tables, column for column."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eagle3_jax.bench.benchmark import Sample, summarise
from eagle3_jax.bench.evaluate import Interval, Percentiles
from eagle3_jax.bench.latency import Bursts
from eagle3_jax.bench.phases import Phases
from eagle3_jax.bench.tables import (
    benchmark_table,
    comparison_table,
    figure,
    latency_table,
    paper_table,
    phases_table,
    size,
)
from eagle3_jax.terminal import display_width, duration, side_by_side, table, wrap


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
    paper = paper_table({"talk": modes, "sums": modes}).splitlines()
    assert paper[0].split() == ["talk", "sums", "mean"]
    assert paper[2].split() == ["plain", *["1.00x", "1.00"] * 3]
    assert paper[3].split() == ["chain:3", *["1.64x", "3.20"] * 3]


def test_latency_table(modes: list) -> None:
    stepped = Bursts(Percentiles(0.5, 0.6, 0.7), Percentiles(3.0, 4.0, 4.0), 3.2, 5)
    lines = latency_table([replace(modes[0], memory_bytes=540_000_000), replace(modes[1], memory_bytes=552_000_000)], {}).splitlines()
    # Plain decoding: a first token after 1 s, eight more in 8 s.
    assert lines[1].split() == ["plain", *["1.00", "s"] * 6, "540", "MB", "-"]
    assert lines[2].split()[-4:] == ["552", "MB", "12", "MB"]
    assert "0.56 s" in lines[2]
    with_gaps = latency_table(modes[:2], {"plain": None, "chain:3": stepped}).splitlines()
    assert "0.50 s  0.60 s  0.70 s" in with_gaps[2]
    assert size(640_000) == "640 kB"
    assert size(12_300_000_000) == "12.3 GB"


def test_phases_table() -> None:
    line = phases_table([Phases("chain:2", draft=0.002, verify=0.006, commit=0.001, whole=0.010)]).splitlines()[1]
    for cell in ("10 ms", "2.00 ms [20%]", "6.00 ms [60%]", "1.00 ms [10%]"):
        assert cell in line
