"""Acceptance figures by hand and against recorded trees; bootstrap; summaries of made-up samples; the benchmark on the tiny pair."""

from __future__ import annotations

import json

import numpy as np
import pytest

from eagle3_jax.bench.benchmark import Benchmark, Programs, Sample, benchmark, measure, summarise
from eagle3_jax.bench.evaluate import acceptance, accepted_path, add_acceptance, bootstrap
from eagle3_jax.decoding.generate import Output, generate
from eagle3_jax.tree import Chain, Tree
from eagle3_jax.tree_names import parse_tree, tree_name

PROMPTS = [[3, 14, 15, 92, 65], [2, 71, 82, 81, 82, 84, 59], [1, 41, 42, 13]]


def output(*lengths: list[int], trees: list | None = None, reason: str = "length") -> Output:
    tokens = [list(range(1 + sum(row))) for row in lengths]
    return Output(tokens, [reason] * len(lengths), list(lengths), trees)


def test_counts_of_a_chain_by_hand() -> None:
    # Cycles that kept 1, 3 and 4 tokens are whole: 0, 2 and all 3 drafts stood. The last one kept 2 and may have been cut:
    # draft 1 stood, of draft 2 nothing is known.
    got = acceptance(output([1, 3, 4, 2]), depth=3)
    assert got.trials == (4, 2, 2)
    assert got.accepted == (3, 2, 1)
    assert got.n_alpha == [0.75, 1.0, 0.5]
    assert got.per_position == [0.75, 0.75, 0.375]


def test_counts_add_up_over_rows_and_outputs() -> None:
    rows = acceptance(output([2, 1], [1, 1, 3]), depth=2)
    apart = add_acceptance([acceptance(output([2, 1]), 2), acceptance(output([1, 1, 3]), 2)])
    # Row 0: stood 1 and draft 2 refused; unknown. Row 1: refused, refused, both stood.
    assert rows == apart
    assert rows.trials == (4, 2)
    assert rows.accepted == (2, 1)


@pytest.mark.parametrize("kept", [1, 2, 3, 4])
def test_an_answer_of_one_cut_cycle_claims_no_refusal(kept: int) -> None:
    got = acceptance(output([kept], reason="stop"), depth=3)
    assert got.trials == got.accepted == tuple(int(i < kept - 1) for i in range(3))


def test_rates_without_trials() -> None:
    got = acceptance(output([1, 1, 1]), depth=3)
    assert got.n_alpha == [0.0, None, None]
    assert got.per_position == [0.0, 0.0, 0.0]
    cut = acceptance(output([3]), depth=3)
    assert cut.n_alpha == [1.0, 1.0, None]
    assert cut.per_position == [1.0, 1.0, None]


def test_no_cycle_at_all() -> None:
    assert acceptance(Output([[], [7]], ["length", "stop"], [[], []]), depth=2).trials == (0, 0)


@pytest.mark.parametrize(("last", "trials", "accepted"), [(2, (2, 1), (1, 1)), (9, (2, 1), (1, 0))])
def test_recorded_trees_tell_what_the_cut_hid(last: int, trials: tuple, accepted: tuple) -> None:
    # Two cycles; the second drafted 1, 2 and kept 1 and `last`, where the answer ended: drafted (2) or the target's own (9).
    trees = [[([0, 5, 6], [0, 0, 1]), ([8, 1, 2], [0, 0, 1])]]
    got = acceptance(Output([[0, 8, 1, last]], ["stop"], [[1, 2]], trees), depth=2)
    assert got.trials == trials
    assert got.accepted == accepted


def test_the_path_follows_parents_not_tokens_alone() -> None:
    # Token 4 occurs under both children of the root.
    tokens, parents = [9, 1, 2, 4, 4], [0, 0, 0, 1, 2]
    assert accepted_path(tokens, parents, [2, 4, 7]) == [0, 2, 4]
    assert accepted_path(tokens, parents, [1, 4]) == [0, 1, 3]
    assert accepted_path(tokens, parents, [4]) == [0]
    assert accepted_path(tokens, parents, [9]) == [0]  # the root is nobody's child, though its parent entry is 0


def test_bootstrap() -> None:
    ratio = lambda s: s[..., 0] / s[..., 1]  # noqa: E731
    parts = [[2.0, 1.0]] * 10 + [[4.0, 1.0]] * 10
    got = bootstrap(parts, ratio)
    assert got.value == pytest.approx(3.0)
    assert got.low is not None
    assert got.high is not None
    # The mean of 20 values with standard deviation 1: 1.96 / sqrt(20) either side.
    assert 3 - got.low == pytest.approx(0.44, abs=0.08)
    assert got.high - 3 == pytest.approx(0.44, abs=0.08)
    assert got == bootstrap(parts, ratio)
    narrow = bootstrap(parts, ratio, confidence=0.5)
    assert narrow.low is not None
    assert got.low < narrow.low
    assert bootstrap([[3.0, 2.0]], ratio).low is None
    same = bootstrap([[3.0, 2.0]] * 5, ratio)
    assert (same.low, same.high) == (1.5, 1.5)


def sample(mode: str, prompts: list[int], lengths: list[list[int]], seconds: list[float], first: float = 1.0) -> Sample:
    o = output(*lengths)
    return Sample(mode, prompts, o.tokens, o.finish_reasons, o.accept_lengths, seconds, first)


def test_summary_of_made_up_samples() -> None:
    samples = [
        sample("plain", [0], [[1] * 8], [9.0, 8.0, 30.0]),
        sample("chain:3", [0], [[4, 2, 2]], [7.0]),
        sample("plain", [1], [[1] * 4], [5.0]),
        sample("chain:3", [1], [[3, 1]], [5.0]),
    ]
    plain, chain = summarise(samples, {"chain:3": 2.5})
    assert (plain.mode, plain.tokens, plain.cycles, plain.seconds) == ("plain", 14, 12, 14.0)  # the median call counts
    assert plain.acceptance_length.value == 1.0
    assert plain.speed_up is None
    assert plain.same_text is None
    assert plain.cycle_seconds == pytest.approx(1.0)
    assert chain.tokens_per_second.value == pytest.approx(14 / 12)
    assert chain.acceptance_length.value == pytest.approx(12 / 5)
    assert chain.cycle_seconds == pytest.approx(10 / 5)
    assert chain.cycle_cost == pytest.approx(2.0)
    assert chain.compile_seconds == 2.5
    assert chain.is_chain
    assert chain.same_text == 2
    assert chain.speed_up is not None
    assert chain.speed_up.value == pytest.approx(14 / 12)
    assert chain.speed_up.low is not None
    assert chain.speed_up.low <= 14 / 12
    assert chain.decode_speed_up is not None
    assert chain.decode_speed_up.value == pytest.approx(2.4 / 2.0)  # tau over the cost of a cycle
    assert chain.n_alpha == add_acceptance([acceptance(output([4, 2, 2]), 3), acceptance(output([3, 1]), 3)]).n_alpha


def test_a_batch_costs_as_many_passes_as_its_longest_row() -> None:
    (result,) = summarise([sample("plain", [0, 1], [[1] * 6, [1, 1]], [4.0])], {})
    assert result.cycle_seconds == pytest.approx(3.0 / 6)
    assert result.rows == 2


def test_rows_that_end_with_the_prefill() -> None:
    results = summarise([sample(mode, [0], [[]], [0.9], first=1.0) for mode in ("plain", "tree:8,2,3")], {})
    for result in results:
        assert result.tokens == 1
        assert result.cycle_seconds is None
        assert result.decode_tokens_per_second is None
        assert result.acceptance_length.value == 1.0
    assert not results[1].is_chain
    assert results[1].decode_speed_up is None


SETTINGS = {"max_new_tokens": 12, "eos_token_ids": [], "temperature": 0.8}


@pytest.fixture(scope="module")
def programs(golden_target, golden_draft) -> Programs:
    return Programs(golden_target, golden_draft)


@pytest.fixture(scope="module")
def measured(golden_target, golden_draft, programs: Programs) -> Benchmark:
    return benchmark(golden_target, golden_draft, PROMPTS, [Chain(2)], seed=5, programs=programs, **SETTINGS)


def test_benchmark_measures_what_generate_gives(measured: Benchmark, golden_target, golden_draft) -> None:
    plain, chain = measured.modes
    assert [plain.mode, chain.mode] == ["plain", "chain:2"]
    assert chain.same_text == plain.rows == len(PROMPTS)
    alone = generate(golden_target, golden_draft, [PROMPTS[1]], 12, temperature=0.8, seed=6, tree=Chain(2), eos_token_ids=[])
    mine = next(s for s in measured.samples if s.mode == "chain:2" and s.prompts == [1])
    assert mine.tokens == alone.tokens
    assert mine.accept_lengths == alone.accept_lengths
    assert chain.tokens == plain.tokens == 36
    assert chain.cycles < plain.cycles == 33
    assert all(s.seconds[0] > 0 and s.first_token_seconds > 0 for s in measured.samples)
    assert plain.compile_seconds > 0
    assert chain.compile_seconds > 0
    again = json.loads(json.dumps(measured.to_dict(), allow_nan=False))
    assert again["modes"][1]["acceptance_length"]["value"] == chain.acceptance_length.value
    assert again["settings"]["modes"] == ["plain", "chain:2"]


def test_modes_take_turns_and_programs_compile_once(measured: Benchmark, programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    original = programs.get

    def spy(mode, request, config):
        call = original(mode, request, config)

        def noted(request):
            calls.append(mode)
            return call(request)

        return noted

    monkeypatch.setattr(programs, "get", spy)
    spent = dict(programs.compile_seconds)
    samples = list(measure(programs, PROMPTS, {"plain": None, "chain:2": Chain(2)}, 1, 5, 2, SETTINGS))
    assert [s.prompts for s in samples] == [[0], [0], [1], [1], [2], [2]]
    assert all(len(s.seconds) == 2 for s in samples)
    forward, back = ["plain", "plain", "chain:2", "chain:2"], ["chain:2", "chain:2", "plain", "plain"]
    assert calls == [*forward, *back] * 3  # each twice in a row: the prefill's time, then the whole
    assert programs.compile_seconds == spent
    assert [s.tokens for s in samples if s.mode == "plain"] == [s.tokens for s in measured.samples if s.mode == "plain"]


def test_recount_from_trees(golden_target, golden_draft) -> None:
    """Counting whole cycles from the recorded trees gives the rates that the lengths alone give."""
    out = generate(golden_target, golden_draft, PROMPTS, 28, tree=Tree(8, 3, 2), eos_token_ids=[], record_trees=True)
    assert out.trees is not None
    stood: list[int] = []
    for row, lengths in enumerate(out.accept_lengths):
        end = 1
        for cycle, kept in enumerate(lengths[:-1]):
            end += kept
            stood.append(len(accepted_path(*out.trees[row][cycle], out.tokens[row][end - kept : end])) - 1)
    assert max(stood) >= 2
    whole = Output(out.tokens, out.finish_reasons, [[*lengths[:-1], 1] for lengths in out.accept_lengths])
    got = acceptance(whole, depth=3)
    assert got.accepted == tuple(sum(s > n for s in stood) for n in range(3))
    assert got.trials == tuple(sum(s >= n for s in stood) for n in range(3))


@pytest.mark.parametrize("bad", [{"batch": 0}, {"repeats": 0}])
def test_benchmark_refuses(golden_target, bad: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        benchmark(golden_target, None, PROMPTS, **bad)
    with pytest.raises(ValueError, match="no prompt"):
        benchmark(golden_target, None, [])


def test_tree_names() -> None:
    assert parse_tree("auto") == "auto"
    assert parse_tree("chain:3") == Chain(3)
    assert parse_tree(" tree:16,4,4 ") == Tree(16, 4, 4)
    for tree in (Chain(1), Chain(5), Tree(60, 8, 10), Tree(5, 4, 2)):
        assert parse_tree(tree_name(tree)) == tree
    assert tree_name(Tree(4, 3, 1)) == "chain:3"
    assert tree_name(None) == "plain"
    for text in ("", "chain", "chain:", "chain:a", "chain:2,3", "tree:4", "tree:4,2", "bush:3", "auto:2", "chain:2.0"):
        with pytest.raises(ValueError, match="is not understood"):
            parse_tree(text)
    with pytest.raises(ValueError, match="at most"):
        parse_tree("tree:60,2,2")
    with pytest.raises(ValueError, match=">= 1"):
        parse_tree("chain:0")


def test_acceptance_is_what_output_tau_says() -> None:
    out = output([3, 1, 2], [4])
    got = bootstrap([[sum(row), len(row)] for row in out.accept_lengths], lambda s: s[..., 0] / s[..., 1])
    assert got.value == out.tau
    assert np.isfinite(got.value)
