"""Training-time test: what is scored, against what, and that it is what decoding does."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_set import KEPT, TAPS, TARGET, parameters, tiny_draft

from eagle3_jax import draft as draft_model
from eagle3_jax.config import DraftConfig
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.params import count_parameters
from eagle3_jax.shapes import LLAMA_31_8B
from eagle3_jax.training.losses import head_loss
from eagle3_jax.training.trainer import join, split
from eagle3_jax.training.ttt import RECIPES, Batch, Frozen, Metrics, Recipe, recipe, scored, ttt_loss, unroll

D, A, V = TARGET.hidden_size, TARGET.hidden_size * len(TAPS), TARGET.vocab_size
ALIGNED = recipe("aligned", steps=3)


def itself(x: Any) -> Any:
    return x


unrolled = jax.jit(lambda draft, embed, batch, steps: unroll(draft, embed, batch, steps, itself), static_argnums=3)
forward = jax.jit(draft_model.forward)


def frozen(seed: int = 5) -> Frozen:
    a, b = jax.random.split(jax.random.key(seed))
    return Frozen(jax.random.normal(a, (V, D)), jax.random.normal(b, (D, len(KEPT))))


ROWS, WIDTH = 4, 16
"""One shape for most tests, so that a recipe compiles once. What is not used of it is padding."""


def make(
    response: list[list[int]], lengths: list[int] | None = None, segments: list[list[int]] | None = None, seed: int = 0, count: int = ROWS
) -> Batch:
    """A batch of random content; every slot is a query. Padding, by length and never by id, holds garbage."""
    rng = np.random.default_rng(seed)
    response = response + [[]] * (count - len(response))
    lengths = None if lengths is None else lengths + [0] * (count - len(lengths))
    segments = None if segments is None else segments + [[]] * (count - len(segments))
    T = WIDTH
    rows = np.zeros((len(response), T), np.int32)
    valid, parts = np.zeros(rows.shape, bool), np.zeros(rows.shape, np.int32)
    for b, row in enumerate(response):
        rows[b, : len(row)] = row
        valid[b, : len(row) if lengths is None else lengths[b]] = True
        parts[b, : len(row)] = 1 if segments is None else segments[b]
    positions = np.broadcast_to(np.arange(T, dtype=np.int32), rows.shape).copy()
    for b in range(len(rows)):
        for s in np.unique(parts[b]):
            where = np.flatnonzero(parts[b] == s)
            positions[b, where] = np.arange(len(where))
    return Batch(
        tokens=rng.integers(0, V, rows.shape).astype(np.int32),
        positions=positions,
        features=rng.normal(size=(*rows.shape, A)).astype(np.float32),
        hidden=rng.normal(size=(*rows.shape, D)).astype(np.float32),
        argmax=rng.choice(KEPT, rows.shape).astype(np.int32),
        response=rows,
        segments=parts,
        valid=valid,
        slots=np.broadcast_to(np.arange(T, dtype=np.int32), rows.shape).copy(),
    )  # type: ignore[arg-type]


def gather(batch: Batch, rule: Recipe, room: int = 14) -> Batch:
    """The same batch with queries only where a slot is scored."""
    wanted = scored(rule, batch.response, batch.segments, batch.valid).any(0)
    slots = np.full((len(wanted), room), -1, np.int32)
    for b, row in enumerate(wanted):
        slots[b, slots.shape[1] - row.sum() :] = np.flatnonzero(row)
    return dataclasses.replace(batch, slots=slots)  # type: ignore[arg-type]


@partial(jax.jit, static_argnums=(0, 1))
def _differentiate(rule: Recipe, config: DraftConfig, params: dict, variables: dict, tables: Frozen, batch: Batch) -> Any:
    loss = lambda p: ttt_loss(join(config, p, variables), tables, batch, rule)  # noqa: E731
    return jax.value_and_grad(loss, has_aux=True)(params)


def differentiate(batch: Batch, rule: Recipe, draft: Eagle3Draft | None = None) -> tuple[jax.Array, Metrics, dict[str, jax.Array]]:
    """(total, metrics, gradients by name)."""
    draft = draft or tiny_draft()
    (total, metrics), grads = _differentiate(rule, draft.config, *split(draft, rule), frozen(), batch)
    return total, metrics, grads


def assert_same(one: tuple, other: tuple, rtol: float = 1e-5) -> None:
    np.testing.assert_allclose(one[0], other[0], rtol=rtol)
    for name, value in one[2].items():
        np.testing.assert_allclose(other[2][name], value, rtol=rtol, atol=1e-6 * float(np.abs(value).max()) + 1e-9, err_msg=name)


def assert_finite(result: tuple) -> None:
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(result))


def simulate(draft: Eagle3Draft, embed: jax.Array, batch: Batch, slot: int, steps: int) -> list[np.ndarray]:
    """a of `steps` passes over row 0 as a decode makes them: real features up to `slot`, then its own states, reading the known tokens."""
    tokens = np.concatenate([batch.tokens[0], np.zeros(steps + 1, np.int32)])
    T = batch.tokens.shape[1]
    g = draft_model.fuse(draft, jnp.asarray(batch.features[:1]))
    positions = jnp.arange(T, dtype=jnp.int32)[None]
    a, kv = forward(draft, embed, jnp.asarray(tokens[None, 1 : T + 1]), g, positions, jnp.tril(jnp.ones((1, T, T), bool)))
    x, states = a[:, slot : slot + 1], [np.asarray(a[0, slot])]
    for s in range(1, steps):
        # The cache of a decode ends at `slot`: later pairs do not exist yet.
        mask = np.concatenate([np.arange(T) <= slot, np.ones(s, bool)])[None, None]
        token, position = jnp.asarray([[tokens[slot + 1 + s]]]), jnp.asarray([[slot + s]], jnp.int32)
        x, kv = forward(draft, embed, token, x, position, jnp.asarray(mask), earlier=kv)
        states.append(np.asarray(x[0, 0]))
    return states


def blank(batch: Batch, length: int) -> Batch:
    """Token 0 behind the end of row 0, as the shifted inputs have it."""
    tokens = batch.tokens.copy()
    tokens[:, length:] = 0
    return dataclasses.replace(batch, tokens=tokens)


@pytest.mark.parametrize("padding", [False, True])
def test_every_slot_and_step_equals_a_simulation_of_inference(padding: bool) -> None:
    T, J = 6, 3
    batch = make([[0, 0, 1, 1, 1, 1]], lengths=[T], count=1)
    if not padding:
        batch = jax.tree.map(lambda x: x[:, :T], batch)
    draft, tables = tiny_draft(), frozen()
    states = np.asarray(unrolled(draft, tables.embed, batch, J))
    for slot in range(T):
        # Beyond the end both read token 0.
        for s, want in enumerate(simulate(draft, tables.embed, blank(batch, T), slot, J)):
            np.testing.assert_allclose(states[s, 0, slot], want, rtol=1e-5, atol=1e-6, err_msg=f"slot {slot} step {s}")


def test_aligned_loss_is_the_mean_over_simulated_states() -> None:
    batch = make([[0, 0, 1, 1, 1, 1, 1]], seed=3)
    draft, tables = tiny_draft(), frozen()
    losses: list[list[float]] = [[], [], []]
    for slot in range(7):
        for s, a in enumerate(simulate(draft, tables.embed, batch, slot, 3)):
            if all(0 <= i < 7 and batch.response[0, i] == 1 for i in range(slot + 1, slot + 3 + s)):
                teacher = np.asarray(batch.hidden[0, slot + 1 + s] @ tables.teacher_head)
                p, q = jax.nn.softmax(teacher), jax.nn.log_softmax(draft_model.logits(draft, jnp.asarray(a)))
                losses[s].append(-float(jnp.sum(p * q)))
    total, metrics, _ = differentiate(batch, ALIGNED)
    np.testing.assert_allclose(metrics.loss, [np.mean(x) for x in losses], rtol=1e-5)
    np.testing.assert_allclose(total, sum(0.8**s * np.mean(x) for s, x in enumerate(losses)), rtol=1e-5)
    np.testing.assert_array_equal(metrics.slots, [len(x) for x in losses])


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        # tokens p p p A B C EOS; the scored slots of each step.
        ("aligned", [[2, 3, 4], [2, 3], [2], []]),
        ("official", [[3, 4, 5, 6], [2, 3, 4, 5], [1, 2, 3, 4], [0, 1, 2, 3]]),
        ("specforge", [[3, 4, 5], [2, 3, 4], [1, 2, 3], [0, 1, 2]]),
        ("speculators", [[2, 3, 4, 5], [1, 2, 3, 4], [0, 1, 2, 3], [0, 1, 2]]),
    ],
)
def test_scored_slots_by_recipe(name: str, steps: list[list[int]]) -> None:
    rule = recipe(name, steps=4)
    batch = make([[0, 0, 0, 1, 1, 1, 1]], lengths=[7])
    for arrays in ((batch.response, batch.segments, batch.valid), tuple(map(jnp.asarray, (batch.response, batch.segments, batch.valid)))):
        assert [list(np.flatnonzero(mask[0])) for mask in scored(rule, *arrays)] == steps
    # Gradient reaches exactly those: the loss moves with the hidden state of a teacher if and only if a scored slot predicts it.
    taught = {i + 1 + s for s, slots in enumerate(steps) for i in slots if i + 1 + s < 7}
    base = differentiate(batch, rule)[0]
    for i in range(9):
        hidden = batch.hidden.copy()
        hidden[0, i] *= 2
        moved = not np.array_equal(differentiate(dataclasses.replace(batch, hidden=hidden), rule)[0], base)
        assert moved == (i in taught), i


def test_aligned_never_crosses_a_turn() -> None:
    batch = make([[0, 1, 1, 1, 0, 2, 2, 0, 3]])
    masks = scored(recipe("aligned", steps=3), batch.response, batch.segments, batch.valid)
    assert [list(np.flatnonzero(mask[0])) for mask in masks] == [[0, 1, 4], [0], []]


@pytest.mark.parametrize("name", sorted(RECIPES))
@pytest.mark.parametrize("seed", range(3))
def test_scored_slots_come_in_runs(name: str, seed: int) -> None:
    """What the gathered form of the loss rests on."""
    rng = np.random.default_rng(seed)
    rule = recipe(name, steps=5)
    response = [list(rng.choice([0, 1, 1, 1, 2], WIDTH)) for _ in range(4)]
    segments = [list(np.repeat([1, 2, 3], [6, 1, 9])) for _ in range(4)]
    batch = make(response, segments=segments)
    masks = scored(rule, batch.response, batch.segments, batch.valid)
    for s, b, i in zip(*np.nonzero(masks), strict=True):
        assert all(masks[s - k, b, i + k] for k in range(s + 1))


@pytest.mark.parametrize("name", ["aligned", *(pytest.param(n, marks=pytest.mark.slow) for n in sorted(RECIPES) if n != "aligned")])
def test_gathering_changes_nothing(name: str) -> None:
    rule = recipe(name, steps=4)
    batch = make([[0, 1, 1, 1, 1, 0, 2, 2, 2, 2, 0], [0, 0, 0, 1, 1, 1, 0, 0]], lengths=[11, 8])
    whole, fewer = differentiate(batch, rule), differentiate(gather(batch, rule), rule)
    assert_same(whole, fewer)
    for a, b in zip(whole[1], fewer[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize("name", ["aligned", "speculators"])
def test_packed_equals_unpacked(name: str) -> None:
    rule = recipe(name, steps=4)
    lengths, responses = [5, 8, 3], [[0, 0, 1, 1, 1], [0, 1, 1, 1, 0, 2, 2, 2], [1, 1, 1]]
    segments = [n for number, length in enumerate(lengths, 1) for n in [number] * length]
    packed = make([[r for row in responses for r in row]], segments=[segments], lengths=[16])
    alone = make(responses, lengths=lengths, seed=9)
    start = 0
    for b, length in enumerate(lengths):
        for field in ("tokens", "features", "hidden", "argmax"):
            getattr(alone, field)[b, :length] = getattr(packed, field)[0, start : start + length]
        start += length
    assert_same(differentiate(packed, rule), differentiate(alone, rule))
    assert_same(differentiate(gather(packed, rule), rule), differentiate(alone, rule))


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_padding_is_never_read(name: str) -> None:
    rule = recipe(name, steps=4)
    batch = make([[0, 1, 1, 1, 1, 0]], lengths=[6])
    garbage = jax.tree.map(np.copy, batch)
    garbage.tokens[:, 6:], garbage.argmax[:, 6:] = V - 1, V - 1
    garbage.features[:, 6:], garbage.hidden[:, 6:] = 1e4, -1e4
    assert_same(differentiate(batch, rule), differentiate(garbage, rule), rtol=0)


@pytest.mark.parametrize("name", sorted(RECIPES))
@pytest.mark.parametrize("gathered", [False, True])
def test_rows_without_anything_to_learn_are_finite(name: str, gathered: bool) -> None:
    """An all-padding row, a sample of length 1, a chat cut before its answer, no supervised token at all."""
    rule = recipe(name, steps=4)
    nothing = make([[0, 0, 0, 0, 0], [0], [1]], lengths=[0, 1, 1])
    cases = {"nothing": nothing, "one good row": make([[0, 1, 1, 1, 1], [0], [0, 0, 0], [0] * 5], lengths=[5, 1, 3, 0])}
    for label, batch in cases.items():
        result = differentiate(gather(batch, rule) if gathered else batch, rule)
        assert_finite(result)
        if label == "nothing" and name in ("aligned", "specforge"):
            assert float(result[0]) == 0
            assert all(np.all(np.asarray(g) == 0) for g in result[2].values())


def test_left_padding_is_finite_and_changes_nothing() -> None:
    batch = make([[0, 1, 1, 1, 1]])
    shifted = jax.tree.map(lambda x: np.concatenate([np.zeros_like(x[:, :3]), x[:, :-3]], axis=1), batch)
    shifted = dataclasses.replace(shifted, slots=batch.slots)
    assert_same(differentiate(batch, ALIGNED), differentiate(shifted, ALIGNED))


def test_teacher_outside_the_draft_vocabulary() -> None:
    """Such a slot has no loss and counts as a miss, but stays in the divisor; `speculators` trains it."""
    batch = make([[0, 1, 1, 1, 1, 1]])
    outside = jax.tree.map(np.copy, batch)
    outside.argmax[0, 2] = KEPT[3] + 1  # the teacher of slot 1 at step 0 and of slot 0 at step 1
    rule = recipe("aligned", steps=1)
    full, part = (differentiate(x, rule) for x in (batch, outside))
    assert np.array_equal(full[1].slots, part[1].slots) and int(full[1].slots[0]) == 4
    # By hand: the mean over four slots, one of them zero.
    draft, tables = tiny_draft(), frozen()
    losses = []
    for slot in range(4):
        a = simulate(draft, tables.embed, batch, slot, 1)[0]
        p = jax.nn.softmax(jnp.asarray(batch.hidden[0, slot + 1]) @ tables.teacher_head)
        losses.append(-float(jnp.sum(p * jax.nn.log_softmax(draft_model.logits(draft, jnp.asarray(a))))))
    np.testing.assert_allclose(full[0], np.mean(losses), rtol=1e-5)
    np.testing.assert_allclose(part[0], (sum(losses) - losses[1]) / 4, rtol=1e-5)
    theirs = recipe("speculators", steps=1)
    np.testing.assert_allclose(differentiate(batch, theirs)[0], differentiate(outside, theirs)[0], rtol=1e-6)
    # All outside: nothing is learnt.
    outside.argmax[:] = KEPT[3] + 1
    total, _, grads = differentiate(outside, ALIGNED)
    assert float(total) == 0 and all(np.all(np.asarray(g) == 0) for g in grads.values())


def test_the_state_fed_back_is_not_normed() -> None:
    """With a final norm of weight 3 the unroll still equals decoding, and its states do not depend on that weight at all."""
    draft, batch, tables = tiny_draft(), make([[0, 1, 1, 1, 1, 1]]), frozen()
    plain = np.asarray(unrolled(draft, tables.embed, batch, 3))
    values = parameters(draft)
    draft = join(draft.config, {**values, "norm": values["norm"] * 3}, {})
    np.testing.assert_array_equal(np.asarray(unrolled(draft, tables.embed, batch, 3)), plain)
    for s, want in enumerate(simulate(draft, tables.embed, batch, 2, 3)):
        np.testing.assert_allclose(plain[s, 0, 2], want, rtol=1e-5, atol=1e-6)


def test_accuracy_and_survival() -> None:
    """A head that always proposes draft id 0: right wherever the teacher says so; survival needs an unbroken run from step 0."""
    draft, batch = tiny_draft(), make([[0, 1, 1, 1, 1, 1, 1]])
    values = parameters(draft)
    values["head"] = np.zeros_like(values["head"])  # ties go to id 0
    draft = join(draft.config, values, {})
    right = np.asarray([0, 1, 1, 1, 0, 1, 1], bool)  # teacher at position i says draft id 0
    batch.argmax[0, : len(right)] = np.where(right, KEPT[0], KEPT[1])
    metrics = differentiate(batch, ALIGNED, draft)[1]
    # Step s of slot i is judged by position i + 1 + s; slots 0..4, 0..3, 0..2.
    np.testing.assert_array_equal(metrics.slots, [5, 4, 3])
    np.testing.assert_array_equal(metrics.correct, [4, 3, 2])
    np.testing.assert_array_equal(metrics.survived, [4, 2, 1])


def test_gradient_equals_finite_differences() -> None:
    """Through the loss's own backward rule, all steps of the unroll, and the attention."""
    batch, draft = make([[0, 1, 1, 1, 1, 1, 0]]), tiny_draft()
    params, variables = split(draft, ALIGNED)
    loss = jax.jit(lambda p: ttt_loss(join(draft.config, p, variables), frozen(), batch, ALIGNED)[0])
    _, _, grads = differentiate(batch, ALIGNED)
    rng = np.random.default_rng(0)
    for name, value in params.items():
        direction = jnp.asarray(rng.normal(size=value.shape).astype(np.float32))
        step = 1e-2 / float(jnp.linalg.norm(direction))
        up, down = (loss({**params, name: value + sign * step * direction}) for sign in (1, -1))
        np.testing.assert_allclose((up - down) / (2 * step), jnp.sum(grads[name] * direction), rtol=2e-2, atol=2e-3, err_msg=name)


@pytest.mark.parametrize("remat", [False, True])
def test_steps_in_a_loop_are_steps_written_out(remat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerators run the steps after the first as one loop's body."""
    rule, batch = recipe("aligned", steps=4), make([[0, 1, 1, 1, 1, 1, 0, 2, 2, 2, 2]], lengths=[11])
    draft = tiny_draft()
    params, variables = split(draft, rule)

    def program(params: dict) -> Any:
        return jax.value_and_grad(lambda p: ttt_loss(join(draft.config, p, variables), frozen(), batch, rule, remat=remat), has_aux=True)(
            params
        )

    monkeypatch.setattr("eagle3_jax.training.ttt.platform", lambda: "tpu")
    loops = [eqn for eqn in jax.make_jaxpr(program)(params).eqns if eqn.primitive.name == "scan" and eqn.params["length"] == 3]
    assert len(loops) == 2, "one forward, one backward"
    (total, metrics), grads = jax.jit(program)(params)
    assert_same((total, metrics, grads), differentiate(batch, rule))


def test_chunking_changes_nothing() -> None:
    keys = jax.random.split(jax.random.key(0), 5)
    n, head = jax.random.normal(keys[0], (3, 2, 10, D)), jax.random.normal(keys[1], (D, 24))
    teacher, weight = jax.random.normal(keys[2], (2, 10, D)), jax.random.uniform(keys[3], (3, 2, 10))
    label = jax.random.randint(keys[4], (2, 10), -1, 24)

    def run(chunk: int) -> Any:
        loss = lambda n, h: head_loss("kl", n, h, teacher, frozen().teacher_head, weight, label, chunk)  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(n, head)

    one, other = run(10), run(4)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_unknown_recipe() -> None:
    with pytest.raises(ValueError, match=r"'offical' is unknown \(known: aligned, official, specforge, speculators\)"):
        recipe("offical")


def test_head_of_llama_8b_has_425m_parameters() -> None:
    draft = jax.eval_shape(lambda: Eagle3Draft(DraftConfig.for_target(LLAMA_31_8B, 32000)))
    count = count_parameters(draft)
    assert count == 3 * 4096**2 + 2 * 4096 * (4096 + 2 * 1024) + 4096**2 + 3 * 4096 * 14336 + 4096 * 32000 + 4 * 4096
    assert abs(count - 425e6) < 5e6


def test_feature_loss_draws_the_state_to_the_next_feature() -> None:
    batch = make([[0, 0, 1, 1, 1, 1, 1]], seed=3)
    plain = dataclasses.replace(ALIGNED, steps=2, decay=0.5)
    rule = dataclasses.replace(plain, feature_weight=2.0, logit_weight=0.1, train_head=False, train_fusion=False)
    draft = tiny_draft()
    total, metrics, grads = differentiate(batch, rule, draft)
    states = np.asarray(unrolled(draft, frozen().embed, batch, 2))
    masks = np.asarray(scored(rule, batch.response, batch.segments, batch.valid))
    wanted = 0.0
    for s in range(2):
        apart = [
            np.abs(states[s, b, i] - np.asarray(batch.hidden)[b, i + 1 + s])  # a of step s stands for the feature of token i+1+s
            for b, i in zip(*np.nonzero(masks[s]), strict=True)
        ]
        wanted += 0.5**s * np.mean([np.where(x < 1, 0.5 * x * x, x - 0.5).mean() for x in apart])
    logits = differentiate(batch, plain, draft)[0]
    np.testing.assert_allclose(total, 2.0 * wanted + 0.1 * logits, rtol=1e-5)
    assert set(grads).isdisjoint({"fc", "head"})
    assert float(jnp.abs(grads["down"]).max()) > 0
    assert np.all(np.isfinite(metrics.loss))
