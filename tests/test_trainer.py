"""The training step, the loop, and its checkpoints."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from training_set import parameters, tiny_cache, tiny_draft, tiny_frozen, tiny_target

from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.training.batches import BatchSource, Cursor
from eagle3_jax.training.checkpoint import CheckpointError, Checkpoints
from eagle3_jax.training.features import FeatureCache, open_cache
from eagle3_jax.training.fit import fit
from eagle3_jax.training.reporting import Reporter
from eagle3_jax.training.trainer import Fixed, TrainConfig, evaluate, loss_and_gradient, new_state, split, train_step
from eagle3_jax.training.ttt import recipe

CONFIG = TrainConfig(recipe=recipe("aligned", steps=3), steps=10, rows=2, row_tokens=48, row_slots=40, warmup=2, peak_lr=1e-2)


differentiate = jax.jit(loss_and_gradient, static_argnums=(0, 1))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> FeatureCache:
    return tiny_cache(tmp_path_factory.mktemp("features") / "cache")


def source(cache: FeatureCache, config: TrainConfig = CONFIG) -> BatchSource:
    return BatchSource(
        lambda: open_cache(cache.folder), config.recipe, seed=config.seed, rows=config.rows, width=config.row_tokens, slots=config.row_slots
    )


def train(
    cache: FeatureCache, config: TrainConfig, folder: Path | None = None, resume: bool = False, stop: int | None = None
) -> Eagle3Draft:
    """`fit` on the tiny set. stop: the loop is interrupted by an exception before update stop + 1."""
    checkpoints = None if folder is None else Checkpoints(folder, {"train": dataclasses.asdict(config)})
    batches = source(cache, config)
    if stop is not None:
        batches = Interrupted(batches, stop)
    reporter = Reporter(config.steps)
    try:
        tables = tiny_frozen(tiny_target())
        return fit(tiny_draft(), tables, batches, config, reporter=reporter, checkpoints=checkpoints, checkpoint_every=4, resume=resume)
    finally:
        reporter.close()
        if checkpoints is not None:
            checkpoints.close()


class Interrupted(BatchSource):
    def __init__(self, inner: BatchSource, stop: int):
        self.__dict__.update(inner.__dict__)
        self.left = stop

    def build(self, rows, own=None):
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        return super().build(rows, own)


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_resume_is_the_same_run_bit_for_bit(cache: FeatureCache, tmp_path: Path, optimizer: str) -> None:
    config = dataclasses.replace(CONFIG, optimizer=optimizer, accumulate=2)
    whole = parameters(train(cache, config))
    with pytest.raises(KeyboardInterrupt):
        train(cache, config, tmp_path / "run", stop=13)  # in the seventh update, within its accumulation window
    resumed = parameters(train(cache, config, tmp_path / "run", resume=True))
    for name, value in whole.items():
        np.testing.assert_array_equal(resumed[name], value, err_msg=name)


def test_checkpoint_of_another_configuration_is_refused(cache: FeatureCache, tmp_path: Path) -> None:
    train(cache, CONFIG, tmp_path)
    with pytest.raises(CheckpointError, match=r"train.peak_lr: checkpoint 0.01, asked for 0.02"):
        train(cache, dataclasses.replace(CONFIG, peak_lr=0.02), tmp_path, resume=True)
    with pytest.raises(CheckpointError, match=r"train.recipe.steps: checkpoint 3, asked for 2"):
        train(cache, dataclasses.replace(CONFIG, recipe=recipe("aligned", steps=2)), tmp_path, resume=True)
    with pytest.raises(CheckpointError, match=r"train.steps: checkpoint 10, asked for 11"):
        train(cache, dataclasses.replace(CONFIG, steps=11), tmp_path, resume=True)


@pytest.mark.slow
def test_the_end_of_a_schedule_may_move_while_on_its_plateau(cache: FeatureCache, tmp_path: Path) -> None:
    whole = parameters(train(cache, dataclasses.replace(CONFIG, steps=10, decay=3)))
    with pytest.raises(KeyboardInterrupt):
        train(cache, dataclasses.replace(CONFIG, steps=8, decay=4), tmp_path, stop=4)
    moved = parameters(train(cache, dataclasses.replace(CONFIG, steps=10, decay=3), tmp_path, resume=True))
    for name, value in whole.items():
        np.testing.assert_array_equal(moved[name], value, err_msg=name)


def test_restored_state_equals_the_saved_one_although_training_went_on(cache: FeatureCache, tmp_path: Path) -> None:
    params, variables = split(tiny_draft(), CONFIG.recipe)
    fixed = Fixed(tiny_frozen(tiny_target()), variables)
    batches = source(cache)
    stream = batches.plan(Cursor())
    state = new_state(params, CONFIG)
    batch = lambda: jax.tree.map(lambda x: x[None], batches.build(next(stream)[0]))  # noqa: E731
    state, _ = train_step(tiny_draft().config, CONFIG, state, fixed, batch())
    before = jax.tree.map(lambda x: np.array(x), state)
    checkpoints = Checkpoints(tmp_path, {})
    checkpoints.save(state, Cursor(0, 1))
    train_step(tiny_draft().config, CONFIG, state, fixed, batch())
    restored, cursor = checkpoints.restore(new_state(split(tiny_draft(), CONFIG.recipe)[0], CONFIG))
    assert cursor == Cursor(0, 1)
    jax.tree.map(np.testing.assert_array_equal, restored, before)
    assert jax.tree.map(lambda x: x.dtype, restored) == jax.tree.map(lambda x: x.dtype, before)


def test_cutting_the_batch_changes_nothing(cache: FeatureCache) -> None:
    """The same rows as one batch of four, and accumulated 2 x 3 with two added rows of padding alone."""
    params, variables = split(tiny_draft(), CONFIG.recipe)
    fixed, config = Fixed(tiny_frozen(tiny_target()), variables), tiny_draft().config
    wide = dataclasses.replace(CONFIG, rows=4)
    batches = source(cache, wide)
    whole = batches.build(next(batches.plan(Cursor()))[0])
    assert np.all(whole.segments.max(1) > 0)
    padded = jax.tree.map(lambda x: np.concatenate([x, np.zeros_like(x[:2])]), whole)
    padded = dataclasses.replace(padded, slots=np.concatenate([whole.slots, np.full_like(whole.slots[:2], -1)]))
    cuts = jax.tree.map(lambda x: x[None], whole), jax.tree.map(lambda x: x.reshape(2, 3, *x.shape[1:]), padded)
    (total, metrics, grads), other = (differentiate(config, CONFIG, params, fixed, batch) for batch in cuts)
    np.testing.assert_allclose(other[0], total, rtol=1e-5)
    np.testing.assert_allclose(other[1].loss, metrics.loss, rtol=1e-5)
    for key, value in grads.items():
        np.testing.assert_allclose(other[2][key], value, rtol=1e-4, atol=1e-6, err_msg=key)


def test_training_learns_and_moves_only_what_is_trained(cache: FeatureCache) -> None:
    config = dataclasses.replace(CONFIG, steps=60)
    draft, frozen = tiny_draft(), tiny_frozen(tiny_target())
    before, programs = parameters(draft), train_step._cache_size()
    trained = train(cache, config)
    assert train_step._cache_size() == programs + 1  # for all steps
    after = parameters(trained)
    assert {name for name in before if not np.array_equal(before[name], after[name])} == set(before) - {"d2t"}
    assert all(value.dtype == np.float32 for name, value in after.items() if name != "d2t")
    scores = []
    for module in (draft, trained):
        params, variables = split(module, config.recipe)
        scores.append(evaluate(module.config, config.recipe, params, Fixed(frozen, variables), source(cache).once()))
    assert scores[1].accuracy[0] > scores[0].accuracy[0] + 0.1
    assert scores[1].loss[2] < scores[0].loss[2]


def test_a_frozen_head_never_moves_and_has_no_optimizer_state() -> None:
    rule = recipe("speculators")
    params, variables = split(tiny_draft(), rule)
    assert "head" not in params and "head" in variables
    config = dataclasses.replace(CONFIG, recipe=rule, weight_decay=0.1)
    state = new_state(params, config)
    names = {str(key.key) for path, _ in jax.tree.leaves_with_path(state.opt_state) for key in path if hasattr(key, "key")}
    assert "fc" in names and "head" not in names


def test_learning_rate_rises_holds_and_falls() -> None:
    config = TrainConfig(steps=100, warmup=10, decay=40, peak_lr=1.0, floor=0.1)
    rates = np.asarray([config.learning_rate(np.int32(s)) for s in range(100)])
    np.testing.assert_allclose(rates[:10], np.arange(1, 11) / 10, rtol=1e-6)
    np.testing.assert_allclose(rates[9:60], 1.0, rtol=1e-6)
    assert np.all(np.diff(rates[60:]) < 0)
    np.testing.assert_allclose(rates[80], 0.55, rtol=1e-5)
    assert 0.1 < rates[99] < 0.11


def test_learning_rate_may_fall_along_a_line() -> None:
    config = TrainConfig(steps=100, warmup=10, decay=40, peak_lr=1.0, floor=0.1, schedule="linear")
    rates = np.asarray([config.learning_rate(np.int32(s)) for s in (59, 60, 70, 80, 90, 100)])
    np.testing.assert_allclose(rates, [1.0, 1.0, 0.775, 0.55, 0.325, 0.1], rtol=1e-5)


@pytest.mark.slow
def test_bfloat16_compute_keeps_float32_masters(cache: FeatureCache) -> None:
    """An update far below a parameter's last bfloat16 bit still moves it; state and gradients' sums are float32."""
    config = dataclasses.replace(CONFIG, compute="bfloat16", peak_lr=1e-5, warmup=0, accumulate=2)
    params, variables = split(tiny_draft(), config.recipe)
    before = jax.tree.map(np.array, params)
    fixed, batches = Fixed(tiny_frozen(tiny_target()), variables), source(cache)
    stream = batches.plan(Cursor())
    parts = [batches.build(next(stream)[0]) for _ in range(2)]
    batch = jax.tree.map(lambda *x: np.stack(x), *parts)
    total, _, grads = differentiate(tiny_draft().config, config, params, fixed, batch)
    exact, _, want = differentiate(tiny_draft().config, dataclasses.replace(config, compute="float32"), params, fixed, batch)
    np.testing.assert_allclose(total, exact, rtol=2e-2)
    flat = lambda tree: np.concatenate([np.ravel(tree[name]) for name in sorted(tree)])  # noqa: E731
    a, b = flat(grads), flat(want)
    assert a @ b > 0.99 * np.linalg.norm(a) * np.linalg.norm(b)
    state, _ = train_step(tiny_draft().config, config, new_state(params, config), fixed, batch)
    for name, value in state.params.items():
        assert value.dtype == np.float32
        assert not np.array_equal(before[name], np.asarray(value)), name
    assert all(x.dtype == np.float32 for x in jax.tree.leaves(state.opt_state) if x.ndim)


def test_recomputing_changes_nothing(cache: FeatureCache) -> None:
    params, variables = split(tiny_draft(), CONFIG.recipe)
    fixed, batches = Fixed(tiny_frozen(tiny_target()), variables), source(cache, dataclasses.replace(CONFIG, rows=4))
    batch = jax.tree.map(lambda x: x[None], batches.build(next(batches.plan(Cursor()))[0]))
    plain, again = (
        differentiate(tiny_draft().config, dataclasses.replace(CONFIG, remat=remat), params, fixed, batch) for remat in (False, True)
    )
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_the_best_checkpoint_is_the_result(cache: FeatureCache, tmp_path: Path) -> None:
    """The decoder's judgement decides, not the last update."""
    lengths = iter([1.2, 1.9, 1.4, 1.5])
    seen: list[np.ndarray] = []

    def decode(draft: Eagle3Draft) -> float:
        seen.append(np.array(draft.fc[...]))
        return next(lengths)

    checkpoints, reporter = Checkpoints(tmp_path, {}, keep=1), Reporter(CONFIG.steps)
    trained = fit(
        tiny_draft(), tiny_frozen(tiny_target()), source(cache), CONFIG, reporter=reporter, checkpoints=checkpoints, checkpoint_every=2,
        decode=decode, decode_every=3,
    )  # fmt: skip
    reporter.close()
    assert len(seen) == 4
    assert checkpoints.best == 6
    checkpoints.close()
    np.testing.assert_array_equal(trained.fc[...], seen[1])
    reopened = Checkpoints(tmp_path, {}, keep=1)
    assert (reopened.best, reopened.latest) == (6, 10)
    reopened.close()


def test_training_goes_on_without_a_checkpoint_that_cannot_be_written(
    cache: FeatureCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    checkpoints, reporter = Checkpoints(tmp_path, {}, say=said.append), Reporter(CONFIG.steps)
    save = type(checkpoints._manager).save

    def full(manager, step: int, **arguments):
        if step == 8:
            raise OSError(28, "No space left on device")
        return save(manager, step, **arguments)

    monkeypatch.setattr(type(checkpoints._manager), "save", full)
    frozen = tiny_frozen(tiny_target())
    trained = fit(tiny_draft(), frozen, source(cache), CONFIG, reporter=reporter, checkpoints=checkpoints, checkpoint_every=4)
    reporter.close()
    checkpoints.close()
    assert len(said) == 1
    assert "step 8 could not be written ([Errno 28] No space left on device); the one of step 4 stays" in said[0]
    assert checkpoints_of(tmp_path) == [4, 10]
    whole = parameters(train(cache, CONFIG))
    for name, value in parameters(trained).items():
        np.testing.assert_array_equal(value, whole[name], err_msg=name)


def checkpoints_of(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def test_order_depends_on_seed_epoch_and_position_alone(cache: FeatureCache) -> None:
    def take(cursor: Cursor, count: int, seed: int = 0) -> list:
        return [rows for rows, _ in zip(source(cache, dataclasses.replace(CONFIG, seed=seed)).plan(cursor), range(count), strict=False)]

    straight = take(Cursor(), 30)
    stream, cursors = source(cache).plan(Cursor()), []
    for _ in range(20):
        cursors.append(next(stream)[1])
    assert cursors[-1].epoch >= 2
    for stop in (3, 11, 20):
        assert take(cursors[stop - 1], 30 - stop) == straight[stop:]
    assert take(Cursor(1), 5, seed=1) != take(Cursor(1), 5, seed=0)


def test_an_epoch_holds_every_example_once(cache: FeatureCache) -> None:
    seen: dict[int, list[int]] = {}
    for rows, cursor in source(cache).plan(Cursor()):
        if cursor.epoch == 3:
            break
        seen.setdefault(cursor.epoch, []).extend(i for row in rows for i in row)
    for epoch in (0, 1, 2):
        assert sorted(seen[epoch]) == list(range(len(cache)))


def test_bad_configuration() -> None:
    with pytest.raises(ValueError, match="optimizer 'sgd' is unknown"):
        TrainConfig(optimizer="sgd")
    with pytest.raises(ValueError, match="row_slots 900 exceeds row_tokens 832"):
        TrainConfig(row_slots=900)
    with pytest.raises(ValueError, match="do not fit into 50 steps"):
        TrainConfig(steps=50, decay=20)
