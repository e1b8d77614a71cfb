"""The decoder's promises: stops, limits, the cache's end, ragged rows, mixed settings, dead drafts, seeds."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import DRAFT_VOCAB, VOCAB, tiny_draft, tiny_target

from eagle3_jax import draft as draft_model
from eagle3_jax import target as target_model
from eagle3_jax.attention import causal_mask
from eagle3_jax.cache import append
from eagle3_jax.decode import run
from eagle3_jax.generate import NonFiniteLogitsError, generate, prepare
from eagle3_jax.params import fill, named_variables
from eagle3_jax.scripted import ScriptedDraft
from eagle3_jax.tree import Chain, Tree, ancestor_mask

TREE = Tree(nodes=8, depth=3, width=3)
PROMPTS = [[5, 9, 2, 31, 17, 40, 8], [11], [int(x) for x in np.random.default_rng(3).integers(1, VOCAB, 30)], [7, 7, 7]]


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def draft(target):
    return tiny_draft(target)


@pytest.fixture(scope="module")
def greedy(target):
    """40 greedy tokens of every prompt, by plain decoding."""
    return generate(target, None, PROMPTS, 40, eos_token_ids=[]).tokens


def scripted(draft, greedy, rows=(0, 1, 2, 3), chance=1.0):
    """A draft that knows the greedy text of these rows."""
    return ScriptedDraft.of(draft, [PROMPTS[r] + greedy[r] for r in rows], chance)


def reference_greedy(target, prompt, count):
    """One full pass per token: no cache, no loop."""
    tokens = list(prompt)
    for _ in range(count):
        n = len(tokens)
        padded = jnp.asarray(tokens + [0] * (48 - n), jnp.int32)[None]
        out = jax.jit(target_model.forward)(target, padded, jnp.arange(48, dtype=jnp.int32)[None], causal_mask(48))
        tokens.append(int(jnp.argmax(target_model.logits(target, out.hidden[:, n - 1])[0])))
    return tokens[len(prompt) :]


def test_plain_decoding_equals_full_passes(target, greedy):
    for prompt, got in zip(PROMPTS[:2], greedy[:2], strict=True):
        assert got[:12] == reference_greedy(target, prompt, 12)


@pytest.mark.parametrize("tree", [Chain(1), Chain(4), TREE, Tree(nodes=20, depth=4, width=5)], ids=str)
def test_batch_of_ragged_rows_equals_plain(target, draft, greedy, tree):
    got = generate(target, draft, PROMPTS, 40, tree=tree, eos_token_ids=[])
    assert got.tokens == greedy
    assert [sum(row) for row in got.accept_lengths] == [39] * 4


def test_each_row_gets_what_it_would_get_alone(target, draft):
    settings = dict(temperature=[0.0, 0.8, 1.0, 0.7], top_k=[0, 5, 0, 0], top_p=[1.0, 1.0, 0.8, 1.0], seed=[3, 4, 5, 6])
    together = generate(target, draft, PROMPTS, [20, 9, 31, 20], tree=TREE, eos_token_ids=[[], [1], [], [2, 3]], **settings)
    order = [2, 0, 3, 1]
    permuted = generate(
        target,
        draft,
        [PROMPTS[r] for r in order],
        [[20, 9, 31, 20][r] for r in order],
        tree=TREE,
        eos_token_ids=[[[], [1], [], [2, 3]][r] for r in order],
        **{name: [values[r] for r in order] for name, values in settings.items()},
    )
    for slot, r in enumerate(order):
        alone = generate(
            target,
            draft,
            [PROMPTS[r]],
            [20, 9, 31, 20][r],
            tree=TREE,
            eos_token_ids=[[[], [1], [], [2, 3]][r]],
            **{name: values[r] for name, values in settings.items()},
        )
        plain = generate(
            target, None, [PROMPTS[r]], [20, 9, 31, 20][r], eos_token_ids=[[], [1], [], [2, 3]][r], **{k: v[r] for k, v in settings.items()}
        )
        assert together.tokens[r] == permuted.tokens[slot] == alone.tokens[0] == plain.tokens[0]
        assert together.finish_reasons[r] == permuted.finish_reasons[slot] == alone.finish_reasons[0] == plain.finish_reasons[0]


@pytest.mark.parametrize("where", range(1, 9))
def test_stop_id_anywhere_in_a_block(target, draft, greedy, where):
    """The draft proposes the truth, so the stop id stands at every place of a block of five."""
    text = greedy[0]
    stop = text[where - 1]
    first = text.index(stop) + 1
    got = generate(target, scripted(draft, greedy, [0]), [PROMPTS[0]], 40, tree=Chain(4), eos_token_ids=[stop])
    assert got.tokens == [text[:first]] and got.finish_reasons == ["stop"]
    assert sum(got.accept_lengths[0]) == first - 1


def test_cap_and_stop_together(target, draft, greedy):
    text = greedy[0]
    at = next(i for i in range(2, 30) if text[i] not in text[:i])
    perfect = scripted(draft, greedy, [0])
    for cap, reason in ((at, "length"), (at + 1, "stop"), (at + 3, "stop")):
        got = generate(target, perfect, [PROMPTS[0]], cap, tree=Chain(6), eos_token_ids=[text[at]])
        assert got.tokens == [text[: min(cap, at + 1)]] and got.finish_reasons == [reason]


@pytest.mark.parametrize("cap", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("tree", [None, Chain(3), TREE], ids=str)
def test_small_limits(target, draft, greedy, cap, tree):
    got = generate(target, None if tree is None else draft, PROMPTS, cap, tree=tree, eos_token_ids=[])
    assert got.tokens == [text[:cap] for text in greedy] and set(got.finish_reasons) == {"length"}
    assert [sum(row) for row in got.accept_lengths] == [max(0, cap - 1)] * 4


def test_first_token_is_a_stop_id(target, draft, greedy):
    got = generate(target, draft, PROMPTS, 10, tree=TREE, eos_token_ids=[[text[0]] for text in greedy])
    assert got.tokens == [text[:1] for text in greedy] and got.finish_reasons == ["stop"] * 4
    assert got.accept_lengths == [[]] * 4 and got.tau == 1.0


def test_end_of_the_context(draft, greedy):
    """Room for four more tokens: eight nodes reach beyond the end, and nothing kept is overwritten."""
    short = tiny_target(max_position=32)
    prompt = PROMPTS[2][:28]
    want = generate(tiny_target(), None, [prompt], 4, eos_token_ids=[]).tokens
    for d, tree in ((None, None), (draft, TREE), (draft, Chain(7)), (ScriptedDraft.of(draft, [prompt + want[0] + [1] * 9]), Chain(7))):
        got = generate(short, d, [prompt], 10, tree=tree, eos_token_ids=[])
        assert got.tokens == want and got.finish_reasons == ["length"]
    for size in (31, 32, 33):
        ids = (PROMPTS[2] * 2)[:size]
        if size == 31:
            assert len(generate(short, draft, [ids], 10, tree=TREE, eos_token_ids=[]).tokens[0]) == 1
        else:
            with pytest.raises(ValueError, match=f"row 0 has {size} tokens, which leaves no room"):
                generate(short, draft, [ids], 10, tree=TREE)


@pytest.mark.parametrize("tree", [Chain(3), TREE], ids=str)
def test_caches_after_decoding_equal_a_fresh_prefill(target, draft, greedy, tree):
    """Only kept tokens and pairs made of real features: the scattered accepted path, gathered."""
    half = scripted(draft, greedy, chance=[0.9, 0.6, 0.3])
    request, config = prepare(target, half, PROMPTS, 25, tree=tree, eos_token_ids=[])
    state = run(target, half, request, dataclasses.replace(config, keep_caches=True))
    assert int(state.cycles.max()) < 24  # some drafts were accepted, some were not
    for row, prompt in enumerate(PROMPTS):
        tokens = prompt + greedy[row][:25]
        n = len(tokens) - 1
        assert int(state.cache.lengths[row]) == n
        ids = jnp.asarray(tokens, jnp.int32)[None]
        at = jnp.arange(n, dtype=jnp.int32)[None]
        out = target_model.forward(target, ids[:, :n], at, causal_mask(n), taps=draft.taps)
        fresh = append(target.new_cache(1, config.slots), out.kv, None, jnp.asarray([n]))
        for got, want in ((state.cache.k, fresh.k), (state.cache.v, fresh.v)):
            for a, b in zip(got, want, strict=True):
                valid = (slice(None), slice(None), slice(n)) if a.shape[-1] == config.slots else (slice(None), slice(n))
                np.testing.assert_allclose(np.asarray(a[row])[valid], np.asarray(b[0])[valid], atol=2e-5)
        pairs = int(state.draft_cache.lengths[row])
        assert n - tree_steps(tree) <= pairs <= n
        x = draft_model.fuse(draft, out.features[:, :pairs])
        _, (k, v) = draft_model.forward(draft, target.embed[...], ids[:, 1 : pairs + 1], x, at[:, :pairs], causal_mask(pairs))
        np.testing.assert_allclose(np.asarray(state.draft_cache.k[0][row])[..., :pairs], np.asarray(k[0]).transpose(1, 2, 0), atol=2e-5)
        np.testing.assert_allclose(np.asarray(state.draft_cache.v[0][row])[:, :pairs], np.asarray(v[0]).transpose(1, 0, 2), atol=2e-5)


def tree_steps(tree):
    return (tree.tree if isinstance(tree, Chain) else tree).depth + 1


@pytest.mark.parametrize(
    "parents", [[0, 0, 0, 0, 0], [0, 0, 1, 2, 3], [0, 0, 0, 1, 1, 2], [0, 0, 1, 1, 3]], ids=["star", "chain", "two levels", "comb"]
)
def test_every_node_sees_its_own_path_alone(target, parents):
    """Star and comb: each node's logits equal a plain pass over the prefix and its own path."""
    prefix = PROMPTS[0]
    n, M = len(prefix), len(parents)
    tokens = np.arange(20, 20 + M)
    depths = [0] * M
    for m in range(1, M):
        depths[m] = depths[parents[m]] + 1
    at = jnp.arange(n, dtype=jnp.int32)[None]
    out = target_model.forward(target, jnp.asarray([prefix], jnp.int32), at, causal_mask(n))
    cache = append(target.new_cache(1, 64), out.kv, None, jnp.asarray([n]))
    mask = ancestor_mask(jnp.asarray([parents], jnp.int32), M)
    out = target_model.forward(target, jnp.asarray(tokens[None], jnp.int32), n + jnp.asarray([depths], jnp.int32), mask, cache)
    for m in range(M):
        path, node = [m], m
        while node:
            node = parents[node]
            path.append(node)
        whole = prefix + [int(tokens[p]) for p in reversed(path)]
        alone = target_model.forward(
            target, jnp.asarray([whole], jnp.int32), jnp.arange(len(whole), dtype=jnp.int32)[None], causal_mask(len(whole))
        )
        np.testing.assert_allclose(np.asarray(out.hidden[0, m]), np.asarray(alone.hidden[0, -1]), atol=2e-5)


def test_sampled_text_depends_on_seed_and_position_alone(target, draft):
    """With any draft or none, coupled drafting or not, in any tree: the same tokens for the same seed."""
    want = generate(target, None, [PROMPTS[0]] * 3, 30, temperature=[0.7, 1.0, 1.0], seed=[7, 7, 2**40 + 1], eos_token_ids=[]).tokens
    assert want[0] != want[1] != want[2]
    for tree in (Chain(3), TREE):
        for coupled_draft in (True, False):
            got = generate(
                target,
                draft,
                [PROMPTS[0]] * 3,
                30,
                1 * [0.7] + [1.0, 1.0],
                seed=[7, 7, 2**40 + 1],
                tree=tree,
                eos_token_ids=[],
                coupled_draft=coupled_draft,
            )
            assert got.tokens == want
    twins = generate(target, draft, [PROMPTS[0]] * 3, 12, temperature=1.0, seed=[5, 5, 6], tree=TREE, eos_token_ids=[])
    assert twins.tokens[0] == twins.tokens[1] != twins.tokens[2]
    counted = generate(target, draft, [PROMPTS[0]] * 2, 12, temperature=1.0, seed=5, tree=TREE, eos_token_ids=[])
    assert counted.tokens == [twins.tokens[0], twins.tokens[2]]


def test_perfect_and_hopeless_drafts(target, draft, greedy):
    perfect = generate(target, scripted(draft, greedy), PROMPTS, 36, tree=Chain(4), eos_token_ids=[])
    assert perfect.tokens == [text[:36] for text in greedy]
    assert all(row == [5] * 7 for row in perfect.accept_lengths) and perfect.tau == 5.0
    hopeless = generate(target, scripted(draft, greedy, chance=0.0), PROMPTS, 36, tree=Chain(4), eos_token_ids=[])
    assert hopeless.tokens == [text[:36] for text in greedy] and hopeless.tau == 1.0
    half = generate(target, scripted(draft, greedy, chance=0.5), PROMPTS, 36, tree=Chain(4), eos_token_ids=[])
    assert 1.3 < half.tau < 2.7  # 1 + 1/2 + 1/4 + ... less the cut at the end


def test_metrics_do_not_count_what_was_cut(target, draft, greedy):
    got = generate(target, scripted(draft, greedy, [0]), [PROMPTS[0]], 7, tree=Chain(4), eos_token_ids=[])
    assert got.accept_lengths == [[5, 1]]


def test_dead_draft_warns_and_the_text_stays(target, draft, greedy):
    values = {name: variable.get_value() for name, variable in named_variables(draft)}
    for key, value in (("head", np.nan), ("norm", np.inf)):
        broken = fill(draft, {**values, key: jnp.full_like(values[key], value)})
        for tree in (Chain(3), TREE):
            with pytest.warns(UserWarning, match="the draft is dead"):
                got = generate(target, broken, PROMPTS[:2], 12, tree=tree, eos_token_ids=[])
            assert got.tokens == [text[:12] for text in greedy[:2]]


def test_broken_target_names_row_and_position_and_spares_the_others(target, draft, greedy):
    """One embedding is NaN: the row that meets it stops there."""
    victim = greedy[0][5]
    rows = [r for r in range(4) if victim not in PROMPTS[r] + greedy[r][:20]]
    assert rows
    embed = target.embed[...].at[victim].set(jnp.nan)
    broken = fill(target, {**{n: v.get_value() for n, v in named_variables(target)}, "embed": embed})
    first = greedy[0].index(victim)
    for d, tree in ((None, None), (draft, Chain(3)), (scripted(draft, greedy, [0, rows[0]]), Chain(3))):
        with pytest.raises(NonFiniteLogitsError, match=f"row 0 at position {len(PROMPTS[0]) + first + 1}") as caught:
            generate(broken, d, [PROMPTS[0], PROMPTS[rows[0]]], 20, tree=tree, eos_token_ids=[])
        assert caught.value.output.tokens == [greedy[0][: first + 1], greedy[rows[0]][:20]]
    with pytest.raises(NonFiniteLogitsError, match="row 1 at position 3"):
        generate(broken, None, [PROMPTS[rows[0]], [4, victim, 5]], 4, eos_token_ids=[])


def test_padded_slots_are_never_read(target, draft):
    """The same prompt in a bucket of its own size and padded beside a longer one; garbage ids in the padding."""
    request, config = prepare(target, draft, [PROMPTS[0], PROMPTS[2]], 16, tree=TREE, eos_token_ids=[])
    filler = jnp.where(jnp.arange(request.prompts.shape[1])[None] < request.lengths[:, None], request.prompts, 43)
    a = run(target, draft, request, config)
    b = run(target, draft, dataclasses.replace(request, prompts=filler), config)
    alone = generate(target, draft, [PROMPTS[0]], 16, tree=TREE, eos_token_ids=[])
    np.testing.assert_array_equal(np.asarray(a.out[:, :16]), np.asarray(b.out[:, :16]))
    assert a.out[0, :16].tolist() == alone.tokens[0]


def test_hand_made_ties_pick_the_same_index_everywhere(draft):
    """Two rows of the output head are equal, so that their logits tie exactly."""
    base = tiny_target()
    values = {n: v.get_value() for n, v in named_variables(base)}
    head = values["head"]
    for lower, upper in ((3, 30), (10, 11), (20, 49)):
        head = head.at[:, upper].set(head[:, lower])
    tied = fill(base, {**values, "head": head})
    plain = generate(tied, None, PROMPTS, 30, eos_token_ids=[])
    spec = generate(tied, draft, PROMPTS, 30, tree=TREE, eos_token_ids=[])
    assert plain.tokens == spec.tokens
    assert not {30, 11, 49} & {token for row in plain.tokens for token in row}


@pytest.mark.parametrize("rule", ["siblings", "rejection"])
def test_other_rules_are_greedy_at_temperature_zero(target, draft, greedy, rule):
    """A sampled row in the batch brings in the rule's machinery; the greedy rows still give the greedy text."""
    got = generate(target, draft, PROMPTS, 30, temperature=[0, 1, 0, 0], tree=Chain(3), eos_token_ids=[], rule=rule)
    assert [got.tokens[r] for r in (0, 2, 3)] == [greedy[r][:30] for r in (0, 2, 3)]


@pytest.mark.parametrize(("rule", "tree"), [("coupled", TREE), ("siblings", TREE), ("rejection", Chain(2))])
def test_law_of_the_first_two_tokens_of_whole_programs(target, draft, rule, tree):
    """5,000 seeds through the decoder: tokens 2 and 3 (the first two of a cycle) follow the target's distribution."""
    from test_sampling import assert_law

    n, temperature, top_k = 2500, 1.5, 4
    prompt = PROMPTS[0]
    got = generate(target, draft, [prompt] * n, 3, temperature=temperature, top_k=top_k, seed=0, tree=tree, eos_token_ids=[], rule=rule)
    tokens = np.asarray(got.tokens)

    def law(context):
        from test_sampling import oracle

        ids = jnp.asarray([prompt + list(context)], jnp.int32)
        out = target_model.forward(target, ids, jnp.arange(ids.shape[1], dtype=jnp.int32)[None], causal_mask(ids.shape[1]))
        return oracle(np.asarray(target_model.logits(target, out.hidden[:, -1])[0]), temperature, top_k, 1.0)

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


def test_bfloat16_tokens_come_from_the_passes_that_emitted_them(target, draft):
    """In bfloat16 a difference from plain decoding may only be a near-tie of a few units in the last place."""
    from eagle3_jax.lossless import Settings, compare

    def cast(module):
        return fill(module, {n: v.get_value().astype(jnp.bfloat16) if n != "d2t" else v.get_value() for n, v in named_variables(module)})

    t16, d16 = cast(target), cast(draft)
    plain = generate(t16, None, PROMPTS, 24, eos_token_ids=[])
    spec = generate(t16, d16, PROMPTS, 24, tree=TREE, eos_token_ids=[])
    for d in compare(t16, PROMPTS, plain, spec, [Settings()] * 4).divergences:
        assert d.gap < 0.25, d


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


def test_context_clips_the_limit(draft):
    short = tiny_target(max_position=40)
    got = generate(short, draft, [PROMPTS[0], PROMPTS[2]], 10_000, tree=Chain(2), eos_token_ids=[])
    assert [len(t) for t in got.tokens] == [33, 10]
