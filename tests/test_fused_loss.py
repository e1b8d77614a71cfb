"""The cross-entropy in one walk against autodiff's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_jax.training import fused_loss, losses

pytestmark = pytest.mark.skipif(not fused_loss.is_native(), reason="this machine has no custom calls")


def plain(draft, teacher, weight, label):
    def weighed(draft):
        loss = losses.cross_entropy(teacher[None], draft)
        return jnp.sum(weight * loss), loss

    (_, loss), gradient = jax.value_and_grad(weighed, has_aux=True)(draft)
    return loss, (jnp.argmax(draft, -1) == label[None]), gradient


@settings(max_examples=15, deadline=None)
@given(
    steps=st.integers(1, 3),
    rows=st.integers(1, 5),
    width=st.integers(1, 70),
    seed=st.integers(0, 9),
    scale=st.sampled_from([0.1, 3.0, 40.0]),
)
def test_any_shape(steps: int, rows: int, width: int, seed: int, scale: float) -> None:
    draw = np.random.default_rng(seed)
    draft, teacher = (jnp.asarray(scale * draw.standard_normal(shape), jnp.float32) for shape in ((steps, rows, width), (rows, width)))
    weight = jnp.asarray(draw.random((steps, rows)), jnp.float32)
    label = jnp.asarray(draw.integers(-1, width, rows), jnp.int32)
    loss, correct, gradient = fused_loss.cross_entropy(draft, teacher, weight, label, jnp.float32)
    want = plain(draft, teacher, weight, label)
    np.testing.assert_allclose(loss, want[0], rtol=2e-6, atol=2e-6 * max(1.0, scale))
    np.testing.assert_array_equal(correct, want[1])
    np.testing.assert_allclose(gradient, want[2], atol=2e-6)
    short = fused_loss.cross_entropy(draft, teacher, weight, label, jnp.bfloat16)[2]
    np.testing.assert_array_equal(short, gradient.astype(jnp.bfloat16))


def test_ties_and_silence() -> None:
    """The first of equal bests counts; a weight of zero silences whatever is there; NaN is told."""
    draft = jnp.asarray([[[1.0, 3.0, 3.0], [1.0, 3.0, 3.0], [jnp.nan, 1.0, 2.0], [jnp.nan, 1.0, 2.0]]])
    weight, label = jnp.asarray([[1.0, 1.0, 0.0, 1.0]]), jnp.asarray([1, 2, 2, 2], jnp.int32)
    loss, correct, gradient = fused_loss.cross_entropy(draft, jnp.zeros((4, 3)), weight, label, jnp.float32)
    np.testing.assert_array_equal(correct[0, :2], [True, False])
    np.testing.assert_array_equal(gradient[0, 2], 0)
    assert np.isnan(loss[0, 2:]).all() and np.isnan(gradient[0, 3]).all()
    rounded = fused_loss.cross_entropy(draft, jnp.zeros((4, 3)), weight, label, jnp.bfloat16)[2]
    assert np.isnan(np.asarray(rounded[0, 3], np.float32)).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_within_the_head_loss(dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, padding and both products: as with autodiff."""
    draw = np.random.default_rng(0)
    J, B, C, D, U = 3, 2, 21, 16, 40
    array = lambda *shape: jnp.asarray(draw.standard_normal(shape), dtype)  # noqa: E731
    normed, head, teacher, teacher_head = array(J, B, C, D), array(D, U), array(B, C, D), array(D, U)
    weight = jnp.asarray(draw.random((J, B, C)) * (draw.random((J, B, C)) > 0.3), jnp.float32)
    label = jnp.asarray(draw.integers(-1, U, (B, C)), jnp.int32)

    def total(normed, head):
        return losses.head_loss("cross_entropy", normed, head, teacher, teacher_head, weight, label, chunk=8)

    run = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)
    (got, results), grads = run(normed, head)
    monkeypatch.setattr(fused_loss, "is_native", lambda: False)
    (want, expected), wanted = run(normed, head)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(results.loss, expected.loss, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(results.correct, expected.correct)
    for a, b in zip(grads, wanted, strict=True):
        assert a.dtype == b.dtype == dtype
        np.testing.assert_allclose(
            a.astype(jnp.float32),
            b.astype(jnp.float32),
            rtol=1e-5 if dtype == jnp.float32 else 2**-6,
            atol=2e-5 if dtype == jnp.float32 else 0.02,
        )
