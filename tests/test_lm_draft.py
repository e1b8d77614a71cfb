"""A language model as the draft: nothing changes in the text, the target as its own draft accepts everything, rejection samples the law."""

import numpy as np
import pytest
from test_sampling import assert_law
from tiny_models import VOCAB, tiny_target

from eagle3_jax.decoding.generate import generate
from eagle3_jax.lm_draft import LanguageModelDraft
from eagle3_jax.tree import Chain, Tree

PROMPTS = [[5, 9, 2, 31, 17, 40, 8], [11], [int(x) for x in np.random.default_rng(3).integers(1, VOCAB, 14)], [7, 7, 7]]
TREE = Tree(nodes=8, depth=3, width=3)
# Greedy and sampled rows share a program.
MIXED = {"max_new_tokens": 17, "temperature": [0.0, 0.0, 0.9, 0.9], "seed": 4, "eos_token_ids": []}


@pytest.fixture(scope="module")
def target():
    return tiny_target(num_layers=1)


@pytest.fixture(scope="module")
def small(target):
    """Another model of the same vocabulary: fewer blocks, other widths."""
    return LanguageModelDraft.of(tiny_target(seed=5, num_layers=1, hidden_size=16, num_heads=2, num_kv_heads=1), target)


def test_text_is_the_targets(target, small):
    plain = generate(target, None, PROMPTS, **MIXED)
    fast = generate(target, small, PROMPTS, tree=TREE, **MIXED)
    assert fast.tokens == plain.tokens
    assert all(sum(row) == 16 for row in fast.accept_lengths)


@pytest.mark.parametrize("rule", ["coupled", pytest.param("rejection", marks=pytest.mark.slow)])
def test_the_target_as_its_own_draft_accepts_everything(target, rule):
    """Depth + 1 tokens a cycle, also after the prompt of one token, which stands in no pair. Sampled: q is p, so both rules keep all."""
    out = generate(target, LanguageModelDraft.of(target, target), PROMPTS, tree=Chain(3), rule=rule, **MIXED)
    assert out.accept_lengths[:2] == [[4] * 4] * 2
    assert np.mean([kept for row in out.accept_lengths[2:] for kept in row]) > 3.8  # rounding of p/q alone may refuse


@pytest.mark.slow
def test_rejection_samples_the_targets_law(target, small):
    """The second token of 2,048 seeds against plain sampling's: a chi-square after the likeliest first token."""
    rows, rounds = 256, 8

    def draws(draft, rule):
        outs = [
            generate(target, draft, [PROMPTS[0]] * rows, 2, 1.0, seed=i * rows, tree=Chain(1), eos_token_ids=[], rule=rule, top_k=4)
            for i in range(rounds)
        ]
        return np.array([tokens for out in outs for tokens in out.tokens])

    plain, fast = draws(None, "coupled"), draws(small, "rejection")
    assert np.array_equal(plain[:, 0], fast[:, 0])  # the prefill's token: the same noise either way
    assert not np.array_equal(plain, fast)
    first = np.bincount(plain[:, 0]).argmax()
    mine, theirs = plain[plain[:, 0] == first, 1], fast[fast[:, 0] == first, 1]
    assert len(mine) > 400
    # The rejections' draws against the plain draws' own frequencies: both are samples, so the statistic is about twice a true law's.
    law = np.bincount(mine, minlength=VOCAB) / len(mine)
    assert_law(np.bincount(theirs, minlength=VOCAB), law, limit=1e-6)


def test_other_vocabulary_is_refused(target):
    with pytest.raises(ValueError, match="it has 60 tokens, the target 50"):
        LanguageModelDraft.of(tiny_target(vocab_size=60), target)
