"""The distribution function against a numpy oracle, and the noise against its law."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_jax.sampling import Sampling, argmax, choose, log_distribution, position_noise, position_uniforms

LEVELS = np.array([-np.inf, -3.0, -1.0, -0.0, 0.0, 0.5, 0.5, 2.0, 4.0], np.float32)


def sampling(temperature, top_k=0, top_p=1.0, seeds=None):
    B = len(temperature)
    return Sampling(
        jnp.asarray(temperature, jnp.float32),
        jnp.broadcast_to(jnp.asarray(top_k, jnp.int32), (B,)),
        jnp.broadcast_to(jnp.asarray(top_p, jnp.float32), (B,)),
        jnp.asarray(seeds if seeds is not None else [[0, i] for i in range(B)], jnp.uint32),
    )


def oracle(logits, temperature, top_k, top_p):
    """Sorted, float64: temperature, then top-k, then top-p on what is left; ties by lowest id."""
    V = len(logits)
    if temperature == 0:
        return np.eye(V)[int(np.argmax(logits))]
    z = logits.astype(np.float64) / temperature
    order = np.argsort(-(z + 0.0), kind="stable")
    keep = order[: top_k if 0 < top_k < V else V]
    p = np.exp(z[keep] - z[keep].max())
    p /= p.sum()
    before = np.concatenate([[0.0], np.cumsum(p)[:-1]])
    if top_p < 1:
        keep, p = keep[before < top_p], p[before < top_p]
    out = np.zeros(V)
    out[keep] = p / p.sum()
    return out


@settings(max_examples=60, deadline=None)
@given(
    picks=st.lists(st.integers(0, len(LEVELS) - 1), min_size=9, max_size=9),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([1.0, 0.05, 0.33, 0.61, 0.97]),
)
def test_distribution_equals_sorting_oracle_with_ties(picks, temperature, top_k, top_p):
    logits = LEVELS[picks]
    if not np.isfinite(logits).any():
        logits[4] = 1.0
    got = np.exp(np.asarray(log_distribution(jnp.asarray(logits[None]), sampling([temperature], top_k, top_p))))[0]
    np.testing.assert_allclose(got, oracle(logits, temperature, top_k, top_p), atol=2e-6)


def test_large_random_rows_and_mixed_settings_in_one_batch():
    rng = np.random.default_rng(0)
    logits = (rng.normal(size=(6, 3001)) * 3).astype(np.float32)
    temperature, top_k, top_p = [0.0, 0.7, 1.0, 1.0, 1.3, 0.5], [5, 0, 40, 0, 7, 3001], [0.5, 1.0, 1.0, 0.9, 0.8, 0.31]
    got = np.exp(np.asarray(log_distribution(jnp.asarray(logits), sampling(temperature, top_k, top_p))))
    for i in range(6):
        want = oracle(logits[i], temperature[i], top_k[i], top_p[i])
        assert set(np.flatnonzero(got[i])) == set(np.flatnonzero(want)), i
        np.testing.assert_allclose(got[i], want, atol=1e-6)


def test_a_nucleus_always_holds_one_token():
    got = np.exp(np.asarray(log_distribution(jnp.asarray([[1.0, 3.0, 2.0]]), sampling([1.0], 0, 1e-7))))
    np.testing.assert_array_equal(got, [[0, 1, 0]])


def test_argmax_takes_the_lowest_index_on_ties():
    x = jnp.asarray([[1.0, 5.0, 5.0, 0.0], [2.0, 2.0, 2.0, 2.0], [-jnp.inf, -jnp.inf, -1.0, -1.0]])
    assert argmax(x).tolist() == [1, 0, 2]


def test_greedy_rows_ignore_noise_and_never_divide_by_zero():
    logits = jnp.asarray([[0.0, 4.0, 1.0], [0.0, 4.0, 1.0]])
    noise = jnp.asarray([[1e6, 0.0, 0.0], [100.0, 0.0, 0.0]])
    assert choose(logits, noise, sampling([0.0, 1.0])).tolist() == [1, 0]


def test_noise_depends_on_seed_and_position_alone():
    seeds = jnp.asarray([[0, 7], [0, 8], [0, 7], [1, 7]], jnp.uint32)
    a = np.asarray(position_noise(seeds, jnp.asarray([5, 5, 5, 5]), 64))
    b = np.asarray(position_noise(seeds[2:3], jnp.asarray([5]), 64))
    np.testing.assert_array_equal(a[0], a[2])
    np.testing.assert_array_equal(a[0], b[0])
    assert not np.array_equal(a[0], a[1]) and not np.array_equal(a[0], a[3])
    assert not np.array_equal(a[0], np.asarray(position_noise(seeds[:1], jnp.asarray([6]), 64))[0])
    assert not np.array_equal(a[0], np.asarray(position_noise(seeds[:1], jnp.asarray([5]), 64, stream=2))[0])


def test_noise_is_threefry_whatever_the_default_generator():
    seeds, at = jnp.asarray([[0, 3]], jnp.uint32), jnp.asarray([11])
    want = np.asarray(position_noise(seeds, at, 32))
    with jax.default_prng_impl("rbg"):
        np.testing.assert_array_equal(np.asarray(position_noise(seeds, at, 32)), want)
    direct = jax.random.gumbel(jax.random.fold_in(jax.random.key(3, impl="threefry2x32"), 11), (32,), jnp.float32, mode="low")
    np.testing.assert_array_equal(want[0], np.asarray(direct))


@pytest.mark.parametrize("width", [1, 33, 8192, 8193, 49152])
def test_noise_has_jax_s_bits_for_any_positions(width, monkeypatch):
    """The custom call draws what JAX draws, alone and inside a program; so does the way without it."""
    seeds = jnp.asarray(np.random.default_rng(width).integers(0, 2**32, (2, 2)), jnp.uint32)
    at = jnp.asarray([[0, 1, 2], [70_000, 5, 2**31 - 1]], jnp.int32)

    def direct(seed, position):
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
        return jax.random.gumbel(key, (width,), jnp.float32, mode="low")

    want = jax.jit(jax.vmap(jax.vmap(direct, (None, 0))))(seeds, at)
    np.testing.assert_array_equal(jax.jit(position_noise, static_argnums=2)(seeds, at, width), want)
    monkeypatch.setattr("eagle3_jax.sampling.available", lambda: False)
    np.testing.assert_array_equal(jax.jit(lambda s, p: position_noise(s, p, width))(seeds, at), want)


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.8)])
def test_choices_follow_the_distribution(top_k, top_p):
    n, logits = 40_000, np.array([1.0, 0.2, -0.5, 2.0, 0.0, -2.0], np.float32)
    seeds = jnp.stack([jnp.zeros(n, jnp.uint32), jnp.arange(n, dtype=jnp.uint32)], axis=1)
    s = Sampling(jnp.full(n, 0.8), jnp.full(n, top_k, jnp.int32), jnp.full(n, top_p), seeds)
    rows = jnp.broadcast_to(jnp.asarray(logits), (n, 6))
    drawn = np.bincount(np.asarray(choose(rows, position_noise(seeds, jnp.full(n, 9), 6), s)), minlength=6)
    assert_law(drawn, oracle(logits, 0.8, top_k, top_p))


def test_uniforms_lie_in_the_unit_interval_and_streams_differ():
    seeds = jnp.asarray([[0, 1]], jnp.uint32)
    a = np.asarray(position_uniforms(seeds, jnp.asarray([4]), 500, stream=1))
    b = np.asarray(position_uniforms(seeds, jnp.asarray([4]), 500, stream=2))
    assert (a >= 0).all() and (a < 1).all() and not np.array_equal(a, b) and abs(a.mean() - 0.5) < 0.06


def assert_law(counts, probs, limit=1e-4):
    """Chi-square: fails when counts are improbable (p < limit) under probs, or fall where probs is zero."""
    counts, probs = np.asarray(counts, float), np.asarray(probs, float)
    assert counts[probs == 0].sum() == 0
    expected = counts.sum() * probs
    # Cells of few expected draws are pooled, so that the statistic follows its law.
    small = expected < 8
    observed = np.append(counts[~small], counts[small].sum())
    wanted = np.append(expected[~small], expected[small].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    statistic, freedom = ((observed - wanted) ** 2 / wanted).sum(), len(wanted) - 1
    if freedom:
        assert float(jax.scipy.special.gammaincc(freedom / 2, statistic / 2)) > limit, (statistic, freedom)
