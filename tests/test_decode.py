"""The decoder's promises: plain decoding is right, ragged rows, mixed settings, seeds, laws, the context's end, broken targets, bad input.

What has gone wrong elsewhere, in every way to decode, is in test_decode_faults.py.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_sampling import assert_law, oracle
from tiny_models import DRAFT_VOCAB, VOCAB, tiny_draft, tiny_target

from eagle3_jax import target as target_model
from eagle3_jax.attention import causal_mask
from eagle3_jax.decoding.generate import NonFiniteLogitsError, generate
from eagle3_jax.params import fill, named_variables
from eagle3_jax.scripted import ScriptedDraft
from eagle3_jax.tree import Chain, Tree

TREE = Tree(nodes=8, depth=3, width=3)
PROMPTS = [[5, 9, 2, 31, 17, 40, 8], [11], [int(x) for x in np.random.default_rng(3).integers(1, VOCAB, 28)], [7, 7, 7]]


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def draft(target):
    return tiny_draft(target)


@pytest.fixture(scope="module")
def greedy(target):
    """32 greedy tokens of every prompt, by plain decoding.

    Most tests here decode these four prompts to at most 32 tokens, so that they share a handful of compiled programs.
    """
    return generate(target, None, PROMPTS, 32, eos_token_ids=[]).tokens


def scripted(draft, greedy, chance=1.0):
    """A draft that knows the greedy text."""
    return ScriptedDraft.of(draft, [prompt + text for prompt, text in zip(PROMPTS, greedy, strict=True)], chance)


LONGEST = 64


@partial(jax.jit, static_argnames="taps")
def whole_pass(target, ids, at, taps=()):
    """(outputs, logits) of one pass over tokens that `padded` gives: no cache, no loop."""
    out = target_model.forward(target, ids, at, causal_mask(LONGEST), taps=taps)
    return out, target_model.logits(target, out.hidden)


def padded(tokens):
    """Ids and positions of one row of one length, so that all passes are one program: no token sees the padding behind it."""
    ids = np.zeros((1, LONGEST), np.int32)
    ids[0, : len(tokens)] = tokens
    return ids, np.arange(LONGEST, dtype=np.int32)[None]


def next_logits(target, tokens):
    return np.asarray(whole_pass(target, *padded(tokens))[1][0, len(tokens) - 1])


def reference_greedy(target, prompt, count):
    """One full pass per token."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(np.argmax(next_logits(target, tokens))))
    return tokens[len(prompt) :]


def test_plain_decoding_equals_full_passes(target, greedy):
    for prompt, got in zip(PROMPTS[:2], greedy[:2], strict=True):
        assert got[:12] == reference_greedy(target, prompt, 12)


@pytest.mark.parametrize("tree", [pytest.param(Chain(1), marks=pytest.mark.slow), Chain(4), TREE], ids=str)
def test_batch_of_ragged_rows_equals_plain(target, draft, greedy, tree):
    got = generate(target, draft, PROMPTS, 32, tree=tree, eos_token_ids=[])
    assert got.tokens == greedy
    assert [sum(row) for row in got.accept_lengths] == [31] * 4


def test_each_row_gets_what_it_would_get_alone(target, draft):
    """Greedy and sampled rows, own limits and stop ids: together, permuted, alone, and plainly."""
    settings = {
        "max_new_tokens": [20, 9, 31, 20],
        "temperature": [0.0, 0.8, 1.0, 0.7],
        "top_k": [0, 5, 0, 0],
        "top_p": [1.0, 1.0, 0.8, 1.0],
        "seed": [3, 4, 5, 6],
        "eos_token_ids": [[7], [1], [7], [2]],
    }

    def decode(rows, draft):
        chosen = {name: [values[r] for r in rows] for name, values in settings.items()}
        return generate(target, draft, [PROMPTS[r] for r in rows], tree=TREE, **chosen)

    together = decode([0, 1, 2, 3], draft)
    permuted = decode([2, 0, 3, 1], draft)
    plain = decode([0, 1, 2, 3], None)
    assert len({len(tokens) for tokens in together.tokens}) > 1
    for slot, r in enumerate([2, 0, 3, 1]):
        alone = decode([r], draft) if r == 3 else None  # in smaller buckets, too
        for other, at in ((permuted, slot), (plain, r), (alone, 0)):
            if other is not None:
                assert together.tokens[r] == other.tokens[at] and together.finish_reasons[r] == other.finish_reasons[at]


def test_small_limits_of_plain_decoding(target, greedy):
    for caps in ([0, 1, 2, 32], [3, 7, 17, 0]):
        got = generate(target, None, PROMPTS, caps, eos_token_ids=[])
        assert got.tokens == [text[:cap] for text, cap in zip(greedy, caps, strict=True)] and set(got.finish_reasons) == {"length"}
        assert [sum(row) for row in got.accept_lengths] == [max(0, cap - 1) for cap in caps]


@pytest.mark.parametrize("tree", [None, pytest.param(TREE, marks=pytest.mark.slow)], ids=str)
def test_nothing_asked_for(target, draft, tree):
    nothing = generate(target, None if tree is None else draft, [[5]], 0, tree=tree)
    assert nothing.tokens == [[]] and nothing.finish_reasons == ["length"] and nothing.tau == 1.0


def test_end_of_the_context(draft, greedy):
    """The context clips the limit, to four more tokens and to 25: nodes reach beyond the end, and nothing kept is overwritten."""
    short = tiny_target(max_position=32)
    rows = [2, 0]
    prompts = [PROMPTS[r] for r in rows]
    want = [greedy[r][: 32 - len(PROMPTS[r])] for r in rows]
    script = ScriptedDraft.of(draft, [PROMPTS[r] + greedy[r] for r in rows])
    for d, tree in ((None, None), (script, Chain(7))):
        got = generate(short, d, prompts, 10_000, tree=tree, eos_token_ids=[])
        assert got.tokens == want and got.finish_reasons == ["length"] * 2
    for size in (31, 32, 33):
        ids = (PROMPTS[2] * 2)[:size]
        if size == 31:
            got = generate(short, draft, [ids, PROMPTS[0]], 10_000, tree=TREE, eos_token_ids=[])
            assert len(got.tokens[0]) == 1 and got.tokens[1] == want[1]
        else:
            with pytest.raises(ValueError, match=f"row 0 has {size} tokens, which leaves no room"):
                generate(short, draft, [ids], 10, tree=TREE)


def test_sampled_text_depends_on_seed_and_position_alone(target, draft):
    """With any draft or none, coupled drafting or not, in any tree: the same tokens for the same seed."""
    prompts, settings = [PROMPTS[0]] * 3 + [PROMPTS[2]], {"temperature": [0.3, 2.0, 2.0, 2.0], "eos_token_ids": []}
    seeds = [7, 7, 2**40 + 7, 7]
    want = generate(target, None, prompts, 32, seed=seeds, **settings).tokens
    assert len({tuple(tokens) for tokens in want}) == 4  # another temperature, another high word of the seed, another prompt
    for tree, coupled_draft in ((TREE, True), (Chain(2), False)):
        got = generate(target, draft, prompts, 32, seed=seeds, tree=tree, coupled_draft=coupled_draft, **settings)
        assert got.tokens == want
    twins = generate(target, draft, prompts, 32, temperature=1.0, seed=[5, 5, 6, 5], tree=TREE, eos_token_ids=[])
    assert twins.tokens[0] == twins.tokens[1] != twins.tokens[2]
    counted = generate(target, draft, prompts, 32, temperature=1.0, seed=5, tree=TREE, eos_token_ids=[])
    assert counted.tokens[0] == twins.tokens[0] and counted.tokens[1] == twins.tokens[2]


def test_a_scripted_draft_is_right_as_often_as_it_is_told(target, draft, greedy):
    for chance, tau in ((1.0, 5.0), (0.0, 1.0)):
        assert generate(target, scripted(draft, greedy, chance=chance), PROMPTS, 31, tree=Chain(4), eos_token_ids=[]).tau == tau
    half = generate(target, scripted(draft, greedy, chance=0.5), PROMPTS, 31, tree=Chain(4), eos_token_ids=[])
    assert half.tokens == [text[:31] for text in greedy] and 1.3 < half.tau < 2.7  # 1 + 1/2 + 1/4 + ... less the cut at the end


def test_broken_target_names_row_and_position_and_spares_the_others(target, draft, greedy):
    """One embedding is NaN: the row that meets it stops there."""
    spared = lambda token: [r for r in range(1, 4) if token not in PROMPTS[r] + greedy[r][:20]]  # noqa: E731
    victim = next(token for token in greedy[0][1:20] if token not in [*PROMPTS[0], greedy[0][0]] and spared(token))
    rows = spared(victim)
    embed = target.embed[...].at[victim].set(jnp.nan)
    broken = fill(target, {**{n: v.get_value() for n, v in named_variables(target)}, "embed": embed})
    first = greedy[0].index(victim)
    for d, tree in ((None, None), (scripted(draft, greedy), Chain(4))):
        with pytest.raises(NonFiniteLogitsError, match=f"row 0 at position {len(PROMPTS[0]) + first + 1}") as caught:
            generate(broken, d, PROMPTS, [20] * 3 + [32], tree=tree, eos_token_ids=[])
        assert caught.value.output.tokens[0] == greedy[0][: first + 1]
        assert all(caught.value.output.tokens[r][:20] == greedy[r][:20] for r in rows)
    with pytest.raises(NonFiniteLogitsError, match="row 1 at position 3"):
        generate(broken, None, [PROMPTS[rows[0]], [4, victim, 5], PROMPTS[2], [4]], [4, 4, 4, 32], eos_token_ids=[])


@pytest.mark.parametrize(("rule", "tree"), [("coupled", TREE), ("siblings", Tree(8, 2, 3)), ("rejection", Chain(2))])
def test_law_of_the_first_two_tokens_of_whole_programs(target, draft, greedy, rule, tree):
    """2,500 seeds through the decoder: tokens 2 and 3 (the first two of a cycle) follow the target's distribution; one row is greedy."""
    rounds, rows, top_k = 10, 250, 4
    prompt = PROMPTS[0]
    settings = dict(temperature=[1.5] * rows + [0.0], top_k=top_k, tree=tree, eos_token_ids=[], rule=rule)
    outs = [generate(target, draft, [prompt] * (rows + 1), 3, seed=i * rows, **settings).tokens for i in range(rounds)]
    assert all(tokens[-1] == greedy[0][:3] for tokens in outs)
    tokens = np.asarray([row for tokens in outs for row in tokens[:-1]])

    def law(context):
        return oracle(next_logits(target, prompt + list(context)), 1.5, top_k, 1.0)

    assert_law(np.bincount(tokens[:, 0], minlength=VOCAB), law([]))
    checked = 0
    for first in np.unique(tokens[:, 0]):
        mine = tokens[tokens[:, 0] == first]
        assert_law(np.bincount(mine[:, 1], minlength=VOCAB), law([int(first)]))
        for second in np.unique(mine[:, 1]):
            deeper = mine[mine[:, 1] == second]
            if len(deeper) > 200:
                assert_law(np.bincount(deeper[:, 2], minlength=VOCAB), law([int(first), int(second)]))
                checked += 1
    assert checked


# Bad input: one clear message each, before any work.
BAD = [
    (dict(prompts=[]), "no prompt given"),
    (dict(prompts=[[1], []]), "row 1 is empty"),
    (dict(prompts=[[1, VOCAB]]), f"row 0 holds id {VOCAB}, outside the target's vocabulary of {VOCAB}"),
    (dict(prompts=[[1, -1]]), "holds id -1"),
    (dict(temperature=-0.1), "temperature: -0.1 must be a finite number >= 0"),
    (dict(temperature=float("nan")), "temperature: nan"),
    (dict(temperature=[0.5, 0.5]), "temperature: 2 values for 1 rows"),
    (dict(top_p=0.0), r"top_p: 0.0 must lie in \(0, 1\]"),
    (dict(top_p=1.01), "top_p: 1.01"),
    (dict(top_k=-1), "top_k: -1 must be an int >= 0"),
    (dict(top_k=1.5), "top_k: 1.5"),
    (dict(max_new_tokens=-1), "max_new_tokens: -1"),
    (dict(seed=-1), "seed: -1"),
    (dict(seed=2**64), "seed: 18446744073709551616"),
    (dict(eos_token_ids=[[1], [2]]), "eos_token_ids: 2 lists for 1 rows"),
    (dict(eos_token_ids=[VOCAB]), f"eos_token_ids: id {VOCAB}"),
    (dict(tree="chain"), "neither a Chain nor a Tree"),
    (dict(tree=Tree(nodes=4, depth=1, width=DRAFT_VOCAB + 1)), f"width {DRAFT_VOCAB + 1} exceeds the draft vocabulary of {DRAFT_VOCAB}"),
    (dict(rule="sampled"), "rule 'sampled' is unknown"),
    (dict(rule="rejection", tree=TREE), "right only for chains"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[m for _, m in BAD])
def test_bad_input(target, draft, arguments, message):
    with pytest.raises(ValueError, match=message):
        generate(target, draft, **{"prompts": [[1, 2]], **arguments})
