"""The tree that pays: counts replayed from recorded trees, costs by width, the choice, its file, and its correction while it is used."""

import dataclasses

import jax
import numpy as np
import pytest
from tiny_models import VOCAB, tiny_draft, tiny_target

from eagle3_jax.bench.replay import replay
from eagle3_jax.decoding import auto
from eagle3_jax.decoding.generate import generate
from eagle3_jax.lm_draft import LanguageModelDraft
from eagle3_jax.params import fill, named_variables
from eagle3_jax.tree import Chain, Tree
from eagle3_jax.tree_names import tree_name
from eagle3_jax.tuning import plan_store
from eagle3_jax.tuning.costs import Costs, at_width, measure
from eagle3_jax.tuning.plan import Candidate, Plan, default_tree, make_plan, staying
from eagle3_jax.tuning.survival import Survival, candidates, read_survival, typical_survival

SURVIVAL = Survival(100, {"chain:1": (40,), "chain:2": (40, 20), "chain:3": (40, 20, 12), "tree:8,2,3": (60, 33)}, "made up")
FLAT = Costs(1, {1: 1.0, 64: 1.2}, {2: 0.02}, {1: 0.02})
STEEP = Costs(1, {1: 1.0, 2: 2.0, 64: 64.0}, {2: 0.1}, {1: 0.1})


@pytest.fixture(scope="module")
def target():
    return tiny_target(num_layers=1)


@pytest.fixture(scope="module")
def close(target):
    """A draft that is often right: the target itself, disturbed."""
    rng = np.random.default_rng(0)
    values = {name: v.get_value() for name, v in named_variables(target)}
    noise = {name: 0.03 * rng.standard_normal(v.shape).astype(np.float32) for name, v in values.items()}
    return LanguageModelDraft.of(fill(target, {name: v + noise[name] for name, v in values.items()}), target)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A user without a cache, in a process that knows no choice yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(auto, "_live", {})
    return tmp_path / "eagle3_jax" / "plans"


def test_lengths_and_shifts():
    assert SURVIVAL.length("chain:3") == pytest.approx(1.72)
    assert SURVIVAL.length("tree:8,2,3") == pytest.approx(1.93)
    assert SURVIVAL.length("chain:3", 1.0) > 1.72 > SURVIVAL.length("chain:3", -1.0)
    for shift in (-2.0, 0.3, 1.7):
        assert SURVIVAL.shift_for("chain:3", SURVIVAL.length("chain:3", shift)) == pytest.approx(shift, abs=1e-6)
    # Odds of 2 to 3, times 3, are 2 to 1.
    assert SURVIVAL.length("chain:1", float(np.log(3))) == pytest.approx(1 + 2 / 3)
    assert np.isfinite(SURVIVAL.shift_for("chain:1", 1.0))


def test_counts_as_a_file(tmp_path):
    path = tmp_path / "survival.json"
    assert Survival.from_json(SURVIVAL.to_json(), "here") == SURVIVAL
    with pytest.raises(ValueError, match="no such file"):
        read_survival(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        read_survival(path)
    for change, words in (
        ({"format": "x"}, "not a file of acceptance counts"),
        ({"cycles": 0}, "cycles >= 1"),
        ({"stood": {"chain:2": [40]}}, "'chain:2' must be 2 whole numbers"),
        ({"stood": {"chain:2": [40, 41]}}, "never grow"),
    ):
        with pytest.raises(ValueError, match=words):
            Survival.from_json({**SURVIVAL.to_json(), **change}, "here")


def test_the_shipped_counts_know_every_candidate():
    counts = typical_survival()
    assert set(counts.stood) == {tree_name(tree) for tree in candidates()}
    assert 1.4 < counts.length("chain:3") < 1.8 < counts.length("tree:60,8,10")


@pytest.mark.slow
def test_replay_equals_smaller_trees(target, close):
    """The first cycle of every prompt: what a recorded large tree says of smaller ones is what they do."""
    recorded = Tree(nodes=22, depth=3, width=3)
    prompts = np.random.default_rng(5).integers(1, VOCAB, (20, 5)).tolist()
    run = generate(target, close, prompts, 12, tree=recorded, eos_token_ids=[], record_trees=True)
    first = dataclasses.replace(run, accept_lengths=[row[:1] for row in run.accept_lengths])
    sizes = [Chain(3).tree, Tree(6, 2, 2)]
    counts = replay([first], recorded, "here", sizes)
    assert counts.cycles == 20
    for size in sizes:
        own = generate(target, close, prompts, 12, tree=size, eos_token_ids=[])
        kept = np.array([row[0] for row in own.accept_lengths])
        stood = tuple(int((kept > i + 1).sum()) for i in range(size.depth))
        assert counts.stood[tree_name(size)] == stood, size
    assert 0 < counts.stood["chain:3"][2] < counts.stood["chain:3"][0] < 20
    with pytest.raises(ValueError, match="record_trees"):
        replay([dataclasses.replace(run, trees=None)], recorded, "here")
    short = dataclasses.replace(first, tokens=[row[:4] for row in run.tokens])
    with pytest.raises(ValueError, match="no cycle to count"):
        replay([short], recorded, "here")


def test_costs_between_and_beyond_widths():
    assert at_width({1: 1.0, 3: 3.0}, 2) == 2.0
    assert at_width({1: 1.0, 3: 3.0}, 5) == 5.0
    assert at_width({4: 2.0}, 9) == 2.0
    cost = Costs(1, {1: 10.0, 4: 16.0}, {2: 1.0, 4: 3.0}, {1: 0.5, 4: 0.8})
    assert cost.cycle(Chain(3).tree) == pytest.approx(16 + 3 + 2 * 0.5)
    assert Costs.from_json(cost.to_json()) == cost


def test_choice():
    plan = make_plan(FLAT, SURVIVAL)
    assert plan.chosen.name == "tree:8,2,3"
    assert [c.name for c in plan.candidates][-1] == "plain"
    assert plan.chosen.speed_up == pytest.approx(1.93 / FLAT.cycle(Tree(8, 2, 3)))
    assert make_plan(FLAT, SURVIVAL, widest=1).chosen.name == "chain:3"
    assert make_plan(STEEP, SURVIVAL).chosen.tree is None
    assert make_plan(STEEP, SURVIVAL).best_tree.tree is not None
    # A promise within the margin is none.
    even = Costs(1, {1: 1.0, 2: 1.38, 4: 4.0}, {2: 0.0001}, {1: 0.1})
    assert make_plan(even, SURVIVAL).chosen.tree is None
    assert make_plan(even, SURVIVAL, margin=0.0).chosen.name == "chain:1"
    assert default_tree("cpu") == Chain(2)
    assert default_tree("gpu", 1) == Chain(5)
    assert default_tree("tpu", 32000) == Tree.official()


def test_a_tree_that_pays_stays():
    """Until another is clearly faster: changing it costs a compilation."""

    def plan(best, other):
        ways = [Candidate(Chain(2), best, 1.0, 1.0), Candidate(Chain(3), other, 1.0, 1.0), Candidate(None, 1.0, 1.0, 1.0)]
        ways.sort(key=lambda way: -way.speed_up)
        return Plan(tuple(ways), ways[0])

    assert staying(plan(1.40, 1.38), Chain(3)).chosen.tree == Chain(3)
    assert staying(plan(1.40, 1.30), Chain(3)).chosen.tree == Chain(2)
    assert staying(plan(0.98, 0.97), Chain(3)).chosen.tree is None
    assert staying(plan(1.40, 1.38), None).chosen.tree == Chain(2)
    assert staying(plan(1.40, 1.38), Chain(5)).chosen.tree == Chain(2)


def test_passes_are_timed(target):
    tapped = tiny_target()
    for model, draft in ((tapped, tiny_draft(tapped)), (target, LanguageModelDraft.of(target, target))):
        got = measure(model, draft, 2, rounds=1, target_widths=(1, 3), extend_widths=(2,), expand_widths=(2,))
        assert got.batch == 2
        assert set(got.target) == {1, 3}
        assert min(*got.target.values(), *got.extend.values(), *got.expand.values()) > 0


def test_auto_from_first_call_to_fallback(target, close, home, monkeypatch):
    calls = []
    monkeypatch.setattr(auto, "measure", lambda target, draft, batch: calls.append(batch) or dataclasses.replace(FLAT, batch=batch))
    monkeypatch.setattr(auto, "attached", lambda draft: SURVIVAL)
    prompts = [[5, 9, 2], [7]]
    plain = generate(target, None, prompts, 16, eos_token_ids=[])
    before = generate(target, close, prompts, 16, eos_token_ids=[], tree=None)
    assert not calls, "only auto measures"
    out = generate(target, close, prompts, 16, eos_token_ids=[], tree="auto")
    assert calls == [2]
    assert out.tokens == before.tokens == plain.tokens
    assert out.tau > 1
    (file,) = home.iterdir()
    # Another process: the stored choice, without measuring, for None and "auto" alike.
    monkeypatch.setattr(auto, "_live", {})
    assert auto.resolve(target, close, None, 2) == auto.resolve(target, close, "auto", 2) == Tree(8, 2, 3)
    assert auto.resolve(target, close, "auto", 2, chains_only=True) == Chain(3).tree
    assert calls == [2]
    # Drafts that are always wrong, seen for long enough, and plain decoding takes over; it is not for ever.
    for _ in range(20):
        auto.observe(target, close, Tree(8, 2, 3), [[1] * 20, [1] * 20])
    assert auto.resolve(target, close, "auto", 2) is None
    out = generate(target, close, prompts, 16, eos_token_ids=[], tree="auto")
    assert out.tokens == plain.tokens
    assert out.tau == 1.0
    for _ in range(200):
        auto.observe(target, close, None, plain.accept_lengths)
    assert auto.resolve(target, close, "auto", 2) == Tree(8, 2, 3)
    # A file that is not what was written is named, and measured anew.
    monkeypatch.setattr(auto, "_live", {})
    file.write_text("{}")
    with pytest.warns(UserWarning, match="cannot be used"):
        assert auto.resolve(target, close, None, 2) == Chain(2)


def test_another_head_is_another_file():
    target = tiny_target()
    a, b = tiny_draft(target, seed=1), tiny_draft(target, seed=2)
    assert plan_store.fingerprint(a) == plan_store.fingerprint(tiny_draft(target, seed=1))
    assert len({plan_store.path_of(plan_store.identity(target, d, n)) for d in (a, b) for n in (1, 2)}) == 4


@pytest.mark.parametrize("bad", ["automatic", 3, (4, 2, 2)])
def test_unknown_choices_are_refused(target, close, bad):
    with pytest.raises(ValueError, match='neither a Chain nor a Tree nor "auto"'):
        generate(target, close, [[1]], 4, tree=bad)


def test_the_backend_is_the_one_jax_uses(target, close, home):
    assert auto.resolve(target, close, None, 1) == default_tree(jax.default_backend(), VOCAB)
