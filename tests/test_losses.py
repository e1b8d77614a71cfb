"""Losses by name against their formulas in float64, and what tells them apart."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.training.losses import LK_ETA, ROW_LOSSES, head_loss


def by_hand(name: str, teacher: np.ndarray, draft: np.ndarray) -> np.ndarray:
    p, q = (np.exp(x - np.logaddexp.reduce(x, axis=-1, keepdims=True)) for x in (teacher.astype(np.float64), draft.astype(np.float64)))
    overlap, divergence = np.minimum(p, q).sum(-1), (p * np.log(p / q)).sum(-1)
    weight = np.exp(-LK_ETA * overlap)
    return {
        "cross_entropy": -(p * np.log(q)).sum(-1),
        "kl": divergence,
        "total_variation": 1 - overlap,
        "lk_alpha": -np.log(overlap),
        "lk_lambda": weight * divergence + (1 - weight) * (1 - overlap),
    }[name]


@pytest.mark.parametrize("width", [12, 256])
@pytest.mark.parametrize("name", sorted(ROW_LOSSES))
def test_formula_and_gradient(name: str, width: int) -> None:
    """Rows of 256 are summed otherwise than rows of 12 on a CPU."""
    rng = np.random.default_rng(0)
    teacher, draft = (rng.normal(size=shape).astype(np.float32) * 2 for shape in ((1, 5, width), (3, 5, width)))
    np.testing.assert_allclose(jax.jit(ROW_LOSSES[name])(teacher, draft), by_hand(name, teacher, draft), rtol=2e-5)
    grads = jax.jit(jax.grad(lambda x: jnp.sum(ROW_LOSSES[name](jnp.asarray(teacher), x))))(draft)
    np.testing.assert_allclose(jnp.sum(grads, -1), 0.0, atol=1e-5)
    step, fixed = 1e-5, by_hand_weight(teacher, draft)
    for index in [(0, 0, 0), (1, 3, 7), (2, 4, 11)]:
        sides = []
        for sign in (1, -1):
            moved = draft.astype(np.float64)
            moved[index] += sign * step
            if name == "lk_lambda":
                # Its weight is a constant for the gradient.
                divergence, distance = (by_hand(part, teacher, moved) for part in ("kl", "total_variation"))
                sides.append((fixed * divergence + (1 - fixed) * distance).sum())
            else:
                sides.append(by_hand(name, teacher, moved).sum())
        np.testing.assert_allclose(grads[index], (sides[0] - sides[1]) / (2 * step), rtol=2e-3, atol=1e-5)


def by_hand_weight(teacher: np.ndarray, draft: np.ndarray) -> np.ndarray:
    return np.exp(-LK_ETA * (1 - by_hand("total_variation", teacher, draft)))


@pytest.mark.parametrize("name", ["kl", "total_variation", "lk_alpha", "lk_lambda"])
def test_zero_when_the_draft_is_the_target(name: str) -> None:
    x = jax.random.normal(jax.random.key(0), (4, 9))
    np.testing.assert_allclose(jax.jit(ROW_LOSSES[name])(x, x), 0.0, atol=1e-6)


def test_hardly_any_overlap_still_teaches() -> None:
    """Where the total variation is flat, -log of the acceptance pulls as the cross-entropy does."""
    teacher, draft = jnp.asarray([[60.0, 0, 0]]), jnp.asarray([[0.0, 60, 0]])
    gradients = jax.jit(jax.jacobian(lambda x: {name: loss(teacher, x).sum() for name, loss in ROW_LOSSES.items()}))(draft)
    slope = {name: float(np.abs(gradient).max()) for name, gradient in gradients.items()}
    assert slope["total_variation"] < 1e-6
    assert slope["lk_alpha"] > 0.4
    assert slope["lk_lambda"] > 0.4
    assert all(np.isfinite(x) for x in slope.values())


def test_correct_is_the_first_of_the_best() -> None:
    """Ties go to the lowest id; a label outside the draft vocabulary, and a row that is not finite, are never correct."""
    U = 128
    rows = np.zeros((5, U), np.float32)
    rows[0, [3, 90]] = rows[1, [3, 90]] = rows[2, 90] = rows[3, 3] = 2.0
    rows[4] = np.nan
    labels, want = [3, 90, 90, -1, 3], [True, False, True, False, False]
    arguments = jnp.asarray(rows)[None, None], jnp.eye(U), jnp.zeros((1, 5, 4)), jnp.zeros((4, U)), jnp.ones((1, 1, 5))
    _, results = jax.jit(head_loss, static_argnums=0)("cross_entropy", *arguments, jnp.asarray([labels], jnp.int32))
    assert results.correct[0, 0].tolist() == want
