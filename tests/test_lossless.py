"""Speculative output equals plain output: the checker itself, then sweeps over trees, temperatures, filters and batches.

The fast sweep uses the tiny golden pair; the slow ones real models: stories260k with a head of random weights and scripted
text, SmolLM2 with the head that ships.
"""

import numpy as np
import pytest
from tiny_models import VOCAB, tiny_draft, tiny_target

import eagle3_jax as e3
from eagle3_jax.bench.lossless import Case, Settings, compare, score_gap, sweep
from eagle3_jax.config import DraftConfig
from eagle3_jax.decoding.generate import Output, generate
from eagle3_jax.tokenizer import chat_ids
from eagle3_jax.training.train import fresh_draft


def clean(results):
    """Asserts that no case has a divergence which rounding does not explain; returns (positions, near-ties)."""
    positions = ties = 0
    for case, report, _ in results:
        assert not report.faults, (case.name, report.faults)
        positions, ties = positions + report.positions, ties + len(report.divergences)
    return positions, ties


def test_the_checker_sees_a_wrong_token_and_forgives_a_tie():
    target = tiny_target()
    prompt = [3, 4, 5]
    plain = generate(target, None, [prompt], 16, eos_token_ids=[])
    text = plain.tokens[0]
    assert compare(target, [prompt], plain, plain, [Settings()]).positions == 16

    def changed(tokens, reason="length"):
        return Output([tokens], [reason], [[1] * (len(tokens) - 1)])

    wrong = [*text[:5], (text[5] + 1) % VOCAB, *text[6:]]
    report = compare(target, [prompt], plain, changed(wrong), [Settings()])
    assert report.positions == 6 and len(report.faults) == 1 and report.faults[0].position == 8
    assert compare(target, [prompt], plain, changed(text[:7]), [Settings()]).faults
    assert compare(target, [prompt], plain, changed(text, "stop"), [Settings()]).faults
    gap, _ = score_gap(target, prompt + text[:5], text[5], text[5], Settings())
    assert gap == 0.0
    gap, edge = score_gap(target, prompt + text[:5], text[5], wrong[5], Settings(temperature=0.7, top_k=1, seed=3))
    assert gap == np.inf and edge > 1e-3


CASES = [
    Case(tree, batch, temperature, top_k, top_p, seed=17)
    for tree in (e3.Chain(3), e3.Tree(nodes=16, depth=4, width=4))
    for batch, temperature, top_k, top_p in ((4, 0.0, 0, 1.0), (4, 1.0, 0, 1.0), (4, 0.7, 20, 0.9))
]
CASES.append(Case(e3.Chain(3), 4, 0.7, 20, 0.9, seed=17, stream=True))


def test_sweep_of_a_tiny_pair():
    target = tiny_target()
    draft = tiny_draft(target)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, VOCAB, int(n)).tolist() for n in rng.integers(1, 16, 8)]
    positions, _ = clean(sweep(target, draft, prompts, CASES, 32))
    assert positions > 6 * 8 * 20


@pytest.mark.slow
def test_golden_pair(golden_target, golden_draft):
    """The official tiny pair, whose head accepts several tokens a cycle: 12 prompts, up to 110 tokens, 16 cases."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 160, 24).tolist() for _ in range(12)]
    cases = [
        Case(tree, batch, temperature, top_k, top_p, seed=100)
        for tree in (e3.Tree.official(60, 7, 10), e3.Chain(5))
        for batch in (1, 6)
        for temperature, top_k, top_p in ((0.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 0, 1.0), (1.0, 30, 0.9))
    ]
    positions, _ = clean(sweep(golden_target, golden_draft, prompts, cases, 110))
    assert positions > 5_000


@pytest.mark.slow
def test_stories260k(shared_data):
    """A real model with its text: trees up to 60 nodes, every temperature and filter, batches of 1 and 8."""
    target = e3.load_target(shared_data / "stories260k")
    tokenizer = e3.load_tokenizer(shared_data / "stories260k")
    config = DraftConfig.for_target(target.config, 256)
    draft = fresh_draft(config, np.arange(3, 259, dtype=np.int32), seed=0)
    starts = ["Once upon a time", "Lily", "The dog", "One day, a boy", "Mom said", "In the park", "A big red ball", "Tom and Sue"]
    prompts = [tokenizer.encode(text) for text in starts]
    cases = [
        Case(tree, batch, temperature, top_k, top_p, seed=7)
        for tree in (e3.Tree(nodes=60, depth=8, width=10), e3.Chain(4))
        for batch, temperature, top_k, top_p in ((8, 0.0, 0, 1.0), (8, 0.7, 0, 1.0), (8, 1.0, 40, 0.9), (1, 1.0, 0, 1.0))
    ]
    positions, _ = clean(sweep(target, draft, prompts, cases, 120))
    assert positions > 5_000


@pytest.mark.slow
def test_smollm2_with_the_head_that_ships():
    """A slice of the full run that eagle3-lossless makes: three questions, chain and tree, greedy and sampled."""
    target = e3.load_target("smollm2-135m")
    draft = e3.load_draft("smollm2-135m", target)
    tokenizer = e3.load_tokenizer("smollm2-135m")
    questions = ["Why is the sky blue?", "Write a haiku about rain.", "List three uses of a paper clip."]
    prompts = [chat_ids(tokenizer, [{"role": "user", "content": q}]) for q in questions]
    cases = [
        Case(tree, 3, temperature, top_k, top_p, seed=5)
        for tree in (e3.Chain(3), e3.Tree(nodes=16, depth=4, width=4))
        for temperature, top_k, top_p in ((0.0, 0, 1.0), (0.8, 0, 0.95))
    ]
    results = list(sweep(target, draft, prompts, cases, 48))
    assert clean(results)[0] > 4 * 3 * 30
    assert all(tau > 1.2 for _, _, tau in results), "a head that accepts next to nothing is dead, though the text is right"
