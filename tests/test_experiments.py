"""The paper's experiments on a tiny random target: every arm trains, is measured, and is trained once."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import tiny_target

from eagle3_jax.bench.evaluate import Interval
from eagle3_jax.experiments import Material, Setting, paper, run_experiment
from eagle3_jax.experiments.arms import Arm, ArmResult, arm_folder, trained_head
from eagle3_jax.training.losses import feature_distance
from eagle3_jax.weights import load_draft, save_head

SMALL = Setting(
    target="tiny",
    stories=64,
    story_tokens=24,
    hold_out=8,
    ttt_steps=2,
    steps=3,
    rows=2,
    row_tokens=24,
    row_slots=24,
    warmup=1,
    prompts=4,
    prompt_tokens=4,
    new_tokens=8,
    batch=4,
    chain=3,
)


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eagle3_jax.experiments.material.load_target", lambda _: tiny_target(num_layers=3, bos_token_id=1))
        return Material(SMALL, tmp_path_factory.mktemp("experiments"))


def test_own_text_is_the_targets(material: Material) -> None:
    assert len(material.training.examples) == 56
    assert len(material.held_out) == 8
    ids, response = material.training.examples[0]
    assert ids[0] == 1
    assert response.tolist() == [0] + [1] * 23
    assert [len(row) for row in material.prompts()] == [5] * 4
    (kept,) = material.out.glob("text-*.npy")
    np.testing.assert_array_equal(np.load(kept)[0], ids)


@pytest.mark.slow
def test_ablation_writes_figures_and_trains_once(material: Material, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    first = run_experiment("ablation", material, said.append)
    assert [r.name for r in first] == ["EAGLE", "top feature, TTT", "EAGLE-3"]
    record = json.loads((material.out / "ablation.json").read_text())
    assert record["setting"]["steps"] == 3
    assert (material.out / "ablation.png").read_bytes()[:4] == b"\x89PNG"
    assert "acceptance length" in said[0]
    for result in first:
        assert result.acceptance_length.value >= 1.0
        assert len(result.n_alpha) == 3
        assert result.coverage == 1.0
    monkeypatch.setattr("eagle3_jax.experiments.arms.train_arm", lambda *_: pytest.fail("trained again"))
    assert run_experiment("ablation", material, said.append) == first
    # Another size is another arm.
    monkeypatch.setattr(material, "setting", dataclasses.replace(SMALL, steps=4))
    with pytest.raises(pytest.fail.Exception, match="trained again"):
        run_experiment("ablation", material, said.append)


@pytest.mark.slow
def test_eagles_way_keeps_the_targets_head_and_feature(material: Material) -> None:
    head = trained_head(material, paper.EAGLE)
    assert head.config.taps == (3,)
    np.testing.assert_array_equal(head.fc[...], np.eye(32, dtype=np.float32))
    np.testing.assert_array_equal(head.head[...], material.target.head[...])


def test_shares_are_arms_of_their_own(material: Material) -> None:
    eighth = paper.scaled(paper.EAGLE_3, 0.125)
    assert (eighth.name, eighth.data) == ("EAGLE-3 1/8", 0.125)
    assert paper.scaled(paper.EAGLE_3, 1.0) is paper.EAGLE_3
    assert arm_folder(material, eighth).name == "EAGLE-3-1of8"
    assert Arm("x", feature_loss=True).recipe(SMALL).steps == 2


@pytest.mark.slow
def test_recipes_and_rates_from_an_existing_head(material: Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = trained_head(material, paper.EAGLE_3)
    folder = save_head(given, tmp_path / "given", dtype="float32")
    monkeypatch.setattr(material, "setting", dataclasses.replace(SMALL, start=str(folder), steps=1, warmup=0, peak_lr=1e-9))
    said: list[str] = []
    found = run_experiment("recipes", material, said.append)
    assert [r.name for r in found] == ["EAGLE-3", *(f"recipe {name}" for name in ("official", "specforge", "speculators")), "start"]
    assert "against the first, %" in said[0]
    # A rate of next to nothing: the head that was given, but that speculators puts the target's rows in it.
    for result, same in zip(found, (True, True, True, False, True), strict=True):
        head = load_draft(material.out / "arms" / result.name.replace(" ", "-") / "head", material.target)
        assert np.allclose(head.head[...], given.head[...], atol=1e-6) is same
    assert found[1].percent_over(found[0]) == Interval(0.0, 0.0, 0.0)
    rates = run_experiment("rates", material, said.append)
    assert [r.name for r in rates] == ["EAGLE-3", "rate 2.5e-10", "rate 5e-10", "rate 2e-09", "start"]
    with pytest.raises(ValueError, match="keeps its taps and draft vocabulary"):
        run_experiment("draft-vocab", material, said.append)
    with pytest.raises(ValueError, match="leave draft_vocab unset"):
        Material(dataclasses.replace(SMALL, start="head", draft_vocab=8), tmp_path)


def test_gain_is_paired_by_prompt() -> None:
    one = Interval(1.0)
    make = partial(
        ArmResult,
        "x",
        one,
        n_alpha=[],
        loss=None,
        examples=0,
        draft_vocab=0,
        coverage=0.0,
        parameters=0,
        train_seconds=0.0,
        cycle_seconds=None,
    )
    easy_and_hard = [(30, 10), (10, 10)] * 10
    base, better = make(by_prompt=easy_and_hard), make(by_prompt=[(tokens * 11, cycles * 10) for tokens, cycles in easy_and_hard])
    gain = better.percent_over(base)
    # Prompts differ threefold, the gain of each is the same.
    assert (gain.value, gain.low, gain.high) == pytest.approx((10, 10, 10))


def test_unknown_name(material: Material) -> None:
    with pytest.raises(ValueError, match="known: n-alpha"):
        run_experiment("figure-9", material)


def test_feature_distance_is_smooth_l1() -> None:
    state, feature = jnp.asarray([[0.0, 0.0, 3.0]]), jnp.asarray([[0.5, 0.0, 1.0]])
    np.testing.assert_allclose(feature_distance(state, feature), [(0.125 + 0.0 + 1.5) / 3], rtol=1e-6)
    with pytest.raises(ValueError, match="as wide as its target: 2 against 3"):
        feature_distance(state[:, :2], feature)
    assert jax.grad(lambda x: jnp.sum(feature_distance(x, feature)))(state)[0, 2] == pytest.approx(1 / 3)
