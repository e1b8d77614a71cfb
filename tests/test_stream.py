"""Decoding in several programs: long prompts by chunks, caches that grow, streams, warm-up. The same tokens as in one program."""

import dataclasses
import gc
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_cache import assert_same_cache
from tiny_models import VOCAB, tiny_draft, tiny_target

import eagle3_jax as e3
from eagle3_jax.decoding import decode, segments
from eagle3_jax.decoding.buckets import WIDTHS, chunk_widths, slot_buckets
from eagle3_jax.decoding.decode import DecodeConfig, run
from eagle3_jax.decoding.generate import NonFiniteLogitsError, prepare, read
from eagle3_jax.decoding.segments import Segments, join
from eagle3_jax.params import fill, named_variables

TREE = e3.Tree(nodes=8, depth=3, width=3)
CHAIN = e3.Chain(3)
rng = np.random.default_rng(5)
PROMPTS = [rng.integers(1, VOCAB, n).tolist() for n in (40, 3, 100)]
MIXED = {"temperature": [0.0, 0.8, 1.0], "top_k": [0, 0, 9], "seed": [3, 4, 5], "eos_token_ids": [[], [7], []]}
PROGRAMS = [segments.blank, segments.feed, segments.grown, segments.shortened, segments.first_token, segments.advance]


def flat(parts):
    return [item for part in parts for item in part]


@pytest.fixture(scope="module")
def target():
    return tiny_target(max_position=1024)


@pytest.fixture(scope="module")
def draft(target):
    return tiny_draft(target)


def test_widths_of_chunks():
    for start, stop in ((0, 1), (0, 32), (0, 33), (7, 1000), (991, 1023), (500, 1023)):
        room = slot_buckets(DecodeConfig(None, 0, 16), 1024)[-1]
        widths = chunk_widths(start, stop, room)
        assert set(widths) <= set(WIDTHS) and sum(widths) >= stop - start > sum(widths[:-1])
        assert start + sum(widths) < room  # the padding of the last one is written too
        assert widths[-1] == WIDTHS[0] or widths[-1] < 2 * (stop - start - sum(widths[:-1]))
    assert (
        chunk_widths(0, 40, 1152) == [32, 32] and chunk_widths(0, 700, 1152) == [512, 128, 32, 32] and chunk_widths(0, 300, 1152) == [512]
    )
    assert slot_buckets(DecodeConfig(None, 0, 16), 1000) == [384, 640, 1152] and slot_buckets(DecodeConfig(None, 0, 16), 100) == [256]


def test_a_prompt_in_pieces(target, draft):
    """10 = 4 + 6 = 9 + 1 = ten times 1, and a shorter row beside it: the same caches, hidden states and features."""
    ids = np.array([PROMPTS[2][:10], PROMPTS[0][:10]])
    lengths = np.array([10, 7], np.int32)
    program = jax.jit(decode.feed)

    def fed(*pieces):
        state, start = decode.blank(target, draft, jnp.asarray(ids[:, 0]), 32), 0
        for piece in pieces:
            padded = np.pad(ids[:, start : start + 11], ((0, 0), (0, 17)))[:, :17].astype(np.int32)
            count = np.clip(lengths - start, 0, piece).astype(np.int32)
            state, start = program(target, draft, padded[:, :-1], padded[:, 1:], count, lengths, state), start + piece
        return state

    whole = fed(10)
    assert whole.cache.lengths.tolist() == [10, 7] and whole.draft_cache.lengths.tolist() == [9, 6]
    for pieces in ((4, 6), (9, 1), (1,) * 10):
        parts = fed(*pieces)
        assert_same_cache(parts.cache, whole.cache)
        assert_same_cache(parts.draft_cache, whole.draft_cache)
        np.testing.assert_allclose(parts.hidden, whole.hidden, atol=1e-5)
        np.testing.assert_allclose(parts.features, whole.features, atol=1e-5)


@pytest.mark.parametrize("tree", [None, CHAIN, TREE], ids=str)
def test_streams_give_the_tokens_of_generate(target, draft, tree):
    """Rows of other lengths, settings and limits, prompts by chunks: events, reasons and cycles add up to what one program gives."""
    head = None if tree is None else draft
    limits = [30, 25, 0]
    want = e3.generate(target, head, PROMPTS, limits, tree=tree, **MIXED)
    for cycles in (1, 5):
        stream = e3.stream(target, head, PROMPTS, limits, tree=tree, cycles=cycles, **MIXED)
        events = list(stream)
        for row in range(3):
            mine = [event for event in events if event.row == row]
            assert flat(event.tokens for event in mine) == want.tokens[row]
            assert flat(event.accept_lengths for event in mine) == want.accept_lengths[row]
            assert [event.finish_reason for event in mine] == [None] * (len(mine) - 1) + [want.finish_reasons[row]]
            assert all(len(event.accept_lengths) <= cycles for event in mine)
        assert events[0].tokens == want.tokens[0][:1] and events[0].accept_lengths == []  # the first token comes at once
        assert stream.output == want and stream.first_token_seconds > 0


@pytest.mark.parametrize("tree", [CHAIN, pytest.param(TREE, marks=pytest.mark.slow)], ids=str)
def test_long_prompts_and_long_answers(target, draft, tree):
    """700 tokens by chunks beside short rows, and more new tokens than a buffer holds: as one program gives them, to the context's end."""
    prompts = [rng.integers(1, VOCAB, 700).tolist(), PROMPTS[0], [1]]
    limits = [2000, 200, 300]
    request, config = prepare(target, None, prompts, limits, **MIXED)
    whole = read(run(target, None, request, config))
    assert list(map(len, whole.tokens))[::2] == [324, 300]
    got = e3.generate(target, draft, prompts, limits, tree=tree, record_trees=True, **MIXED)
    assert (got.tokens, got.finish_reasons) == (whole.tokens, whole.finish_reasons)
    assert [sum(row) for row in got.accept_lengths] == [len(row) - 1 for row in whole.tokens]
    assert [len(trees) for trees in got.trees] == [len(row) for row in got.accept_lengths]
    for row, trees in enumerate(got.trees):
        roots = [whole.tokens[row][sum(got.accept_lengths[row][:c])] for c in range(len(trees))]
        assert [tokens[0] for tokens, _ in trees] == roots  # each tree grows from the token before it


@pytest.mark.parametrize("kept", [pytest.param(True, marks=pytest.mark.slow), False], ids=["caches", "freed"])
def test_caches_grow_by_bucket(target, draft, kept):
    """From 384 slots to 640 while decoding; afterwards they hold what one program's caches hold, and dropping all frees all."""
    request, config = prepare(target, draft, PROMPTS, 500, tree=CHAIN, eos_token_ids=[])
    gc.collect()
    before = len(jax.live_arrays())
    parts = Segments(target, draft, request, config, cycles=8)
    sizes, reports = [], []
    for report in parts.reports():
        sizes.append(parts.caches[0].slots)
        reports.append(report)
        if not kept and sizes[-1] > sizes[0]:
            break
    assert set(sizes) == {384, 640} and sizes == sorted(sizes)
    if kept:
        state = run(target, draft, request, dataclasses.replace(config, keep_caches=True))
        assert read(state) == read(join(reports))
        assert_same_cache(parts.caches[0], state.cache, atol=2e-5)
        assert_same_cache(parts.caches[1], state.draft_cache, atol=2e-5)
    else:
        del parts
        gc.collect()
        assert len(jax.live_arrays()) == before


def test_a_stream_may_end_early(target, draft):
    want = e3.generate(target, draft, PROMPTS, 30, tree=CHAIN, eos_token_ids=[])
    gc.collect()
    before = len(jax.live_arrays())
    stream = e3.stream(target, draft, PROMPTS, 30, tree=CHAIN, eos_token_ids=[], cycles=2)
    assert stream.output.tokens == [[], [], []]
    for _, _event in zip(range(7), stream, strict=False):
        pass
    output = stream.output
    assert all(2 <= len(row) < 30 for row in output.tokens) and set(output.finish_reasons) == {"unfinished"}
    assert all(row == want.tokens[r][: len(row)] for r, row in enumerate(output.tokens))
    stream.close()
    assert next(stream, None) is None and stream.output == output
    gc.collect()
    assert len(jax.live_arrays()) == before
    with e3.stream(target, draft, PROMPTS, 30, tree=CHAIN, eos_token_ids=[]) as stream:
        next(stream)
    del stream
    gc.collect()
    assert len(jax.live_arrays()) == before


def test_bad_input_is_said_before_any_work(target, draft):
    for changed, words in (
        ({"cycles": 0}, "cycles: 0 must be"),
        ({"temperature": -1}, "temperature: -1"),
        ({"prompts": [[]]}, "row 0 is empty"),
    ):
        with pytest.raises(ValueError, match=words):
            e3.stream(target, draft, **{"prompts": [[1]], **changed})
    with pytest.raises(ValueError, match="must be positive"):
        e3.warmup(target, draft, batch=0)


def test_broken_targets_and_dead_drafts(target, draft):
    """The events come, then the error that names row and position; a dead draft warns once."""
    few = [PROMPTS[0][:6], PROMPTS[1], PROMPTS[0][6:10]]
    values = {name: variable.get_value() for name, variable in named_variables(target)}
    text = e3.generate(target, None, few, 30, eos_token_ids=[]).tokens
    victim = next(t for t in text[0] if all(t not in few[r] + text[r] for r in (1, 2)) and t not in few[0])
    broken = fill(target, {**values, "embed": values["embed"].at[victim].set(jnp.nan)})
    stream, count = e3.stream(broken, None, few, 30, eos_token_ids=[]), text[0].index(victim) + 1
    got: list = []
    with pytest.raises(NonFiniteLogitsError, match=f"row 0 at position {len(few[0]) + count}") as caught:
        got.extend(stream)
    got = [flat(event.tokens for event in got if event.row == row) for row in range(3)]
    assert got == caught.value.output.tokens == [text[0][:count], text[1], text[2]]
    head = {name: variable.get_value() for name, variable in named_variables(draft)}
    dead = fill(draft, {**head, "norm": jnp.full_like(head["norm"], jnp.nan)})
    with pytest.warns(UserWarning, match="the draft is dead"):
        events = list(e3.stream(target, dead, few[:1], 30, tree=CHAIN, eos_token_ids=[]))
    assert flat(event.tokens for event in events) == text[0]


@pytest.mark.parametrize("program", ["advance", "feed"])
def test_caches_are_updated_in_place(target, draft, program):
    """Every cache array that goes in comes out in the same memory, and the target's are not copied on the way."""
    draft = tiny_draft(target, num_kv_heads=1)  # so that its cache has another shape than the target's
    request, config = prepare(target, draft, PROMPTS[:1], 30, tree=CHAIN)
    parts = Segments(target, draft, request, config)
    if program == "feed":
        row = np.zeros((1, 32), np.int32)
        lowered = segments.feed.lower(target, draft, row, row, np.array([32], np.int32), np.array([32], np.int32), parts.fed)
    else:
        parts.first()
        lowered = segments.advance.lower(target, draft, parts.request, parts.config, parts.state, np.int32(4))
    text = lowered.compile().as_text()
    arrays = len(target.blocks) * 2 + 2
    shapes = r"f32\[1,2,(?:8,384|384,8)\]"
    assert len(re.findall(shapes, text)) >= arrays - 2, "the test looks for the wrong shape"
    assert text.splitlines()[0].count("-alias)") >= arrays
    assert not re.findall(rf"= {shapes}\S* copy\(", text)


@pytest.mark.slow
def test_warm_up_compiles_all_there_is(target, draft, caplog):
    """It says how many programs there are, and no request of its kind compiles another: of `generate`, of streams, of sessions."""
    small = dataclasses.replace(target.config, max_position=300)
    target = fill(e3.target.Target(small), {n: v.get_value() for n, v in named_variables(target)})
    for program in (run, *PROGRAMS):
        program.clear_cache()
    settings = {"longest_prompt": 30, "max_new_tokens": (16, 30), "tree": CHAIN}
    count = e3.warmup(target, draft, sampled=False, **settings)
    assert count == run._cache_size() + sum(program._cache_size() for program in PROGRAMS)
    check_random_requests(target, draft, caplog, 40, sampled=False)


def check_random_requests(target, draft, caplog, count, sampled):
    """Prompts of up to 30 tokens, up to 30 new ones."""
    rng = np.random.default_rng(count)
    session = e3.Session(target, draft)
    text: list[int] = []
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        for i in range(count):
            options = {
                "max_new_tokens": int(rng.integers(1, 31)),
                "temperature": float(rng.choice([0.0, 0.7])) if sampled else 0.0,
                "top_k": int(rng.integers(0, 9)),
                "top_p": float(rng.uniform(0.1, 1.0)),
                "seed": int(rng.integers(0, 2**60)),
                "tree": CHAIN,
                "eos_token_ids": rng.integers(0, VOCAB, int(rng.integers(0, 4))).tolist(),
            }
            prompt = rng.integers(0, VOCAB, int(rng.integers(1, 31))).tolist()
            if i % 3 == 0:
                e3.generate(target, draft, [prompt], **options)
            elif i % 3 == 1:
                for _ in e3.stream(target, draft, [prompt], cycles=int(rng.integers(1, 5)), **options):
                    if rng.uniform() < 0.05:
                        break
            else:
                text = (text if len(text) < 200 else text[:50]) + prompt[:10]
                text += session.generate(text, **options).tokens[0]
    compiled = [record.message for record in caplog.records if "compil" in record.message.lower()]
    assert not compiled, compiled[0]


@pytest.mark.slow
def test_no_retrace_over_200_requests_and_flat_memory_over_1000(caplog):
    target = tiny_target(max_position=300)
    draft = tiny_draft(target)
    e3.warmup(target, draft, longest_prompt=30, max_new_tokens=(16, 30), tree=CHAIN)
    check_random_requests(target, draft, caplog, 200, sampled=True)
    arrays, resident = [], []
    for _ in range(5):
        check_random_requests(target, draft, caplog, 200, sampled=True)
        gc.collect()
        arrays.append(len(jax.live_arrays()))
        with open("/proc/self/statm") as file:
            resident.append(int(file.read().split()[1]) * 4096 / 2**20)
    assert len(set(arrays)) == 1, arrays
    assert resident[-1] - resident[0] < 20, resident
