"""The official code's greedy runs: every first tree, every cycle, every token (tests/golden)."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax import target as target_model
from eagle3_jax.decoding.decode import DecodeConfig, prefill
from eagle3_jax.decoding.generate import generate, prepare
from eagle3_jax.drafting import grow
from eagle3_jax.sampling import Sampling
from eagle3_jax.tree import Tree, select
from eagle3_jax.verify import coupled, walk

SIZES = [(60, 7, 10), (10, 3, 4), (24, 5, 8), (6, 4, 1)]


def sizes(*fast):
    """All sizes; those not named are slow."""
    return [size if size in fast else pytest.param(size, marks=pytest.mark.slow) for size in SIZES]


@pytest.fixture(scope="module")
def runs(golden):
    return json.loads((golden / "generate.json").read_text())["runs"]


def first_trees(target, draft, prompts, tree):
    """Prefill and the first tree of every prompt, outside the loop; also the target's pass over it."""
    request, config = prepare(target, draft, prompts, 16, tree=tree, eos_token_ids=[])

    @jax.jit
    def go(target, draft, request):
        state = prefill(target, draft, request, config)
        embed = target.embed[...]
        cache, logits, carry = draft.extend(embed, state.draft_cache, state.features, state.tokens, state.count)
        pool, levels = grow(draft, embed, cache, logits, carry, tree, lambda _, raw: jax.nn.log_softmax(raw, axis=-1))
        drafted = select(state.pending, pool, tree)
        out = target_model.forward(
            target, drafted.tokens, state.cache.lengths[:, None] + drafted.depths, drafted.mask, state.cache, draft.taps
        )
        return drafted, logits, levels, target_model.logits(target, out.hidden), out.features

    return go(target, draft, request)


@pytest.mark.parametrize("size", sizes((60, 7, 10), (6, 4, 1)), ids=str)
def test_first_tree_of_every_prompt(golden, golden_target, golden_draft, size):
    total, depth, top_k = size
    tree = Tree.official(total, depth, top_k)
    recorded = [np.load(golden / f"tree_p{p}_t{total}_d{depth}_k{top_k}.npz") for p in range(3)]
    prompts = [want["input_ids"].tolist() for want in recorded]
    drafted, level0, levels, logits, features = first_trees(golden_target, golden_draft, prompts, tree)
    greedy = Sampling(jnp.zeros(3), jnp.zeros(3, jnp.int32), jnp.ones(3), jnp.zeros((3, 2), jnp.uint32))
    walked = walk(drafted, logits, coupled(drafted, greedy, None), tree.depth + 1)
    for p, want in enumerate(recorded):
        assert drafted.tokens[p].tolist() == want["draft_tokens"].tolist()
        assert drafted.parents[p].tolist() == [max(0, parent) for parent in want["parents"].tolist()]
        assert drafted.depths[p].tolist() == want["tree_position_ids"].tolist()
        np.testing.assert_array_equal(np.asarray(drafted.mask[p]), want["tree_mask"])
        np.testing.assert_allclose(np.asarray(level0[p]), want["level0_logits"], atol=5e-5)
        for level, raw in enumerate(levels[1:]):
            np.testing.assert_allclose(np.asarray(raw[p]), want["level_logits"][level], atol=5e-5)
        np.testing.assert_allclose(np.asarray(logits[p]), want["node_target_logits"], atol=1e-4)
        np.testing.assert_allclose(np.asarray(features[p]), want["node_taps"], atol=1e-4)
        accepted = int(walked.count[p]) - 1
        assert accepted == int(want["accept_length"]) and int(walked.tokens[p, accepted]) == int(want["next_token"])


@pytest.mark.parametrize("size", sizes((10, 3, 4), (6, 4, 1)), ids=str)
def test_every_cycle_of_the_greedy_runs(golden, golden_target, golden_draft, runs, size):
    mine = [r for r in runs if (r["total_tokens"], r["depth"], r["top_k"]) == size]
    assert len(mine) == 3
    got = generate(
        golden_target, golden_draft, [r["prompt_ids"] for r in mine], 48, tree=Tree.official(*size), eos_token_ids=[], record_trees=True
    )
    for row, run in enumerate(mine):
        assert got.tokens[row] == run["new_ids_48"] == run["naive_new_ids_48"]
        cycles = len(got.accept_lengths[row])
        # The official loop stops after a whole cycle; ours cuts the last one at the limit.
        assert [n - 1 for n in got.accept_lengths[row]][:-1] == run["accept_lengths"][: cycles - 1]
        assert got.accept_lengths[row][-1] - 1 <= run["accept_lengths"][cycles - 1]
        if size in ((60, 7, 10), (10, 3, 4)):
            recorded = np.load(golden / f"cycles_p{run['prompt']}_t{size[0]}_d{size[1]}_k{size[2]}.npz")
            for c, (tokens, parents) in enumerate(got.trees[row]):
                assert tokens == recorded["draft_tokens"][c].tolist()
                depths = [0] * len(parents)
                for m in range(1, len(parents)):
                    depths[m] = depths[parents[m]] + 1
                assert depths == recorded["tree_position_ids"][c].tolist()


def test_end_of_sequence_inside_a_block(golden, golden_target, golden_draft, runs):
    """The official code returns tokens after the stop id here; plain decoding does not, and neither do we."""
    case = json.loads((golden / "generate.json").read_text())["eos_case"]
    prompt = next(r["prompt_ids"] for r in runs if r["prompt"] == case["prompt"])
    for draft in (golden_draft, None):
        got = generate(golden_target, draft, [prompt], 48, tree=Tree.official(*case["setting"]), eos_token_ids=[case["eos_token_id"]])
        assert got.tokens == [case["naive_new_ids"]] and got.finish_reasons == ["stop"]
        assert got.tokens[0] != case["official_new_ids"]


def test_config_is_hashable():
    assert hash(DecodeConfig(tree=Tree(4, 3, 1), slots=64, max_new=16)) == hash(DecodeConfig(tree=Tree(4, 3, 1), slots=64, max_new=16))
