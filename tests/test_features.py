"""The feature cache: what it holds, that it survives interruption, and that a wrong one is refused."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_set import TAPS, TARGET, Tokens, conversations, selection, tiny_cache, tiny_target

from eagle3_jax import fused, target
from eagle3_jax.params import initialize
from eagle3_jax.target import Target
from eagle3_jax.training import features
from eagle3_jax.training.features import CacheError, byte_budget, fingerprint, open_cache, select, write_cache


def test_an_example_equals_a_pass_over_it_alone(tmp_path: Path) -> None:
    model, cache = tiny_target(), tiny_cache(tmp_path / "cache")
    examples = selection().examples
    assert len(cache) == len(examples) and len(cache.manifest["shards"]) > 2
    forward = jax.jit(target.forward, static_argnames="taps")
    width = 32
    for index in (0, 3, len(cache) - 1):
        ids, response = examples[index]
        found = cache[index]
        np.testing.assert_array_equal(found.ids, ids)
        np.testing.assert_array_equal(found.response, response)
        # One width, so that all are one program: no token sees the padding behind it.
        T, padded = len(ids), np.pad(ids, (0, width - len(ids)))[None]
        out = forward(model, padded, np.arange(width, dtype=np.int32)[None], np.tril(np.ones((1, width, width), bool)), taps=TAPS)
        np.testing.assert_allclose(found.features.astype(np.float32), out.features[0, :T], rtol=1e-2, atol=1e-2)
        np.testing.assert_allclose(found.hidden.astype(np.float32), out.hidden[0, :T], rtol=1e-2, atol=1e-2)
        best = np.asarray(jnp.argmax(target.logits(model, out.hidden[0]), axis=-1))[:T]
        teaches = np.append(response[1:] > 0, False)
        np.testing.assert_array_equal(found.argmax, np.where(teaches, best, -1))


def test_taps_are_the_streams_that_enter_their_blocks(tmp_path: Path) -> None:
    """A target whose block k adds 10^k to every coordinate: the features name their taps."""
    model = tiny_target()
    for k, block in enumerate(model.blocks):
        for name in ("o", "down"):
            getattr(block, name)[...] = jnp.zeros_like(getattr(block, name)[...])
        block.down[...] = jnp.full_like(block.down[...], 10.0**k)
        block.gate_up[...] = jnp.zeros_like(block.gate_up[...])
        block.mlp_norm[...] = jnp.zeros_like(block.mlp_norm[...])
    model.embed[...] = jnp.ones_like(model.embed[...])

    def constant_mlp(gate: jax.Array, up: jax.Array) -> jax.Array:
        return jnp.full_like(gate, 1.0 / gate.shape[-1])

    original, fused.swiglu = fused.swiglu, constant_mlp
    try:
        tapped = features._forward.__wrapped__(model, TAPS, np.zeros((1, 5), np.int32))[1]
    finally:
        fused.swiglu = original
    want = [1 + sum(10.0**j for j in range(k)) for k in TAPS]
    np.testing.assert_allclose(np.asarray(tapped, np.float32)[0, 2].reshape(3, -1).mean(1), want, rtol=1e-2)


def test_a_killed_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tiny_cache(tmp_path / "whole")
    real, calls = features._run, []

    def dies(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(features, "_run", dies)
    folder = tmp_path / "cache"
    with pytest.raises(KeyboardInterrupt):
        tiny_cache(folder)
    # What a kill during the writing of a shard leaves behind.
    (folder / "shard-00002.unfinished").mkdir()
    (folder / "shard-00002.unfinished" / "ids.npy").write_bytes(b"half")
    with pytest.raises(CacheError, match=r"unfinished, \d+ of 24 examples"):
        open_cache(folder)
    assert 0 < len(open_cache(folder, partial_ok=True)) < len(whole)
    calls.append(1)
    resumed = tiny_cache(folder)
    assert len(calls) - 4 == len(whole.manifest["shards"]) - 2
    for index in range(len(whole)):
        for field in ("ids", "response", "argmax", "features", "hidden"):
            a, b = (np.asarray(getattr(cache[index], field)) for cache in (whole, resumed))
            np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8), err_msg=f"{index} {field}")


def test_what_other_caches_hold_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old examples among new ones, in another order, from an unfinished cache too: only the new ones are computed, all come out right."""
    older, newer = conversations(), conversations(count=9, seed=5)
    tiny_cache(tmp_path / "old", older[:12])
    tiny_cache(tmp_path / "part", older[12:])
    shards = sorted((tmp_path / "part").glob("shard-*"))
    shards[-1].rename(tmp_path / "lost")
    known = [open_cache(tmp_path / name, partial_ok=True) for name in ("old", "part")]
    held = sum(map(len, known))
    assert 12 < held < 24
    mixed = [example for pair in zip(reversed(older), [*newer, *[None] * 15], strict=True) for example in pair if example is not None]
    whole = tiny_cache(tmp_path / "whole", mixed)
    rows: list[int] = []
    real = features._forward

    def counted(model, taps, tokens, prompts):
        rows.append(int((prompts > 0).sum()))
        return real(model, taps, tokens, prompts)

    monkeypatch.setattr(features, "_forward", counted)
    said: list[str] = []
    arguments = dict(max_tokens=32, shard_tokens=150, batch_tokens=256, say=said.append)
    cache = write_cache(tiny_target(), TAPS, selection(mixed), tmp_path / "new", known=known, **arguments)
    assert sum(rows) == len(mixed) - held and said[1] == f"{held} examples' features are taken over"
    for index in range(len(whole)):
        for field in ("ids", "response", "argmax"):
            np.testing.assert_array_equal(getattr(cache[index], field), getattr(whole[index], field))
        for field in ("features", "hidden"):
            a, b = (np.asarray(getattr(each[index], field), np.float32) for each in (cache, whole))
            np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-2)
    with pytest.raises(CacheError, match=r"old: made for something else; taps: cache \[1, 2, 3\], needed \[0, 2, 3\]"):
        write_cache(tiny_target(), (0, 2, 3), selection(mixed), tmp_path / "other", known=known, **arguments)
    assert not (tmp_path / "other").exists()


def test_a_cache_made_for_something_else_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    cache = tiny_cache(folder)
    with pytest.raises(CacheError, match="data: cache"):
        tiny_cache(folder, conversations(seed=1))
    other = initialize(Target(TARGET), jax.random.key(7))
    arguments = dict(max_tokens=32, shard_tokens=150, batch_tokens=256)
    with pytest.raises(CacheError, match="target: cache"):
        write_cache(other, TAPS, selection(), folder, **arguments)
    with pytest.raises(CacheError, match=r"taps: cache \[1, 2, 3\], needed \[0, 2, 3\]"):
        write_cache(tiny_target(), (0, 2, 3), selection(), folder, **arguments)
    assert len(open_cache(folder)) == len(cache)


def test_missing_or_broken_cache(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="no feature cache here"):
        open_cache(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(CacheError, match="not valid JSON"):
        open_cache(tmp_path)


def test_budget_is_said_before_the_first_pass_and_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    real = features._run

    def run(*arguments):
        assert len(said) == 1 and "GiB" in said[0]
        return real(*arguments)

    monkeypatch.setattr(features, "_run", run)
    cache = write_cache(tiny_target(), TAPS, selection(), tmp_path, max_tokens=32, batch_tokens=256, say=said.append)
    arrays = sum(value.nbytes for shard in cache._shards for name, value in shard.items() if name != "offsets")
    assert arrays == byte_budget(tiny_target(), TAPS, selection())


def test_selection_counts_what_it_cuts_and_drops() -> None:
    def example(*response: int) -> Tokens:
        return Tokens(np.arange(len(response), dtype=np.int32), np.asarray(response, np.int32))

    chosen = select([example(0, 1, 1, 1, 1), example(0, 0, 0, 0, 1, 1), example(0, 0, 0), example(0, 1, 0, 2), example(0, 1, 1)], 4)
    assert [len(ids) for ids, _ in chosen.examples] == [4, 3]
    assert (chosen.truncated, chosen.unsupervised) == (1, 3)
    assert "1 truncated, 3 dropped" in chosen.report()


def test_fingerprint_sees_every_parameter() -> None:
    model = tiny_target()
    before = fingerprint(model)
    assert before == fingerprint(tiny_target())
    model.blocks[3].down[...] = model.blocks[3].down[...].at[0, 0].add(1e-3)
    assert fingerprint(model) != before


def test_manifest_is_readable(tmp_path: Path) -> None:
    tiny_cache(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["identity"]["taps"] == list(TAPS) and manifest["identity"]["examples"] == 24
