"""Prompts through a batch whose free rows are refilled: every answer is what the prompt alone gets."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import VOCAB, tiny_draft, tiny_target

from eagle3_jax.decoding.generate import generate
from eagle3_jax.decoding.segments import advance
from eagle3_jax.decoding.serve import BROKEN, Job, Server, opened
from eagle3_jax.params import fill, named_variables
from eagle3_jax.tree import Chain

NEW = 10


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def draft(target):
    return tiny_draft(target)


def jobs_of(lengths, seed=0) -> list[Job]:
    rng = np.random.default_rng(seed)
    return [Job(i, rng.integers(1, VOCAB, n).tolist(), seed=2**40 + 7 * i) for i, n in enumerate(lengths)]


def serve(server: Server, jobs: list[Job]) -> dict:
    for job in jobs:
        server.submit(job)
    answers = [answer for some in server.run() for answer in some]
    assert sorted(answer.job.key for answer in answers) == sorted(job.key for job in jobs)
    assert server.running == 0
    assert server.tokens >= sum(len(answer.tokens) for answer in answers)
    return {answer.job.key: answer for answer in answers}


# More prompts than rows, one of the least length, one of the next width.
LENGTHS = [1, 9, 4, 2, 5, 3, 40, 1, 6]


@pytest.mark.parametrize("heat", [0.0, pytest.param(0.9, marks=pytest.mark.slow)])
@pytest.mark.parametrize("drafted", [False, True])
def test_answers_are_those_of_generate(target, draft, heat, drafted):
    """Same tokens, reasons and cycles as each prompt in a batch of `generate`; the order of coming changes nothing."""
    head = draft if drafted else None
    jobs = jobs_of(LENGTHS)
    options = dict(max_new_tokens=NEW, temperature=heat, top_k=20, top_p=0.9, tree=Chain(2))
    all_of_them = [job.prompt for job in jobs], [job.seed for job in jobs]
    free = generate(target, head, all_of_them[0], seed=all_of_them[1], eos_token_ids=[], **options).tokens
    options["eos_token_ids"] = [free[0][0], free[3][4], free[6][7]]
    expected = generate(target, head, all_of_them[0], seed=all_of_them[1], **options)
    assert set(expected.finish_reasons) == {"stop", "length"}
    server = Server(target, head, batch=3, admit=2, cycles=3, **options)
    for order in (1, -1):
        before = server.tokens
        answers = serve(server, jobs[::order])
        for i, job in enumerate(jobs):
            assert answers[i].tokens == expected.tokens[i], job
            assert answers[i].finish_reason == expected.finish_reasons[i]
            assert answers[i].accept_lengths == expected.accept_lengths[i]
        assert server.tokens - before == sum(map(len, expected.tokens))
    assert server.tau == expected.tau
    assert not server.dead_draft


def test_caches_grow_and_the_context_ends(target):
    """Short prompts, then one that needs larger caches, then one whose answer the context cuts; rows on their way are not disturbed."""
    jobs = jobs_of([3, 140, 5, 250], seed=1)
    options = dict(max_new_tokens=30, eos_token_ids=[])
    server = Server(target, batch=2, cycles=5, **options)
    answers = serve(server, jobs)
    expected = generate(target, None, [job.prompt for job in jobs], **options)
    for i in range(4):
        assert answers[i].tokens == expected.tokens[i]
        assert answers[i].finish_reason == "length"
    assert [len(answers[i].tokens) for i in range(4)] == [30, 30, 30, 6]


def test_programs_are_few_and_compiled_once(target):
    server = Server(target, batch=2, max_new_tokens=4, cycles=2)
    serve(server, jobs_of([2, 7]))
    sizes = advance._cache_size(), opened._cache_size()
    serve(server, jobs_of(range(1, 20), seed=3))
    assert (advance._cache_size(), opened._cache_size()) == sizes


def test_prompts_may_come_while_others_run(target):
    """A conversation: the second prompt is made of the first answer."""
    server = Server(target, batch=2, max_new_tokens=4, cycles=2, eos_token_ids=[])
    first, second = jobs_of([3, 5])
    server.submit(first)
    told, asked = {}, False
    for answers in server.run():
        for answer in answers:
            told[answer.job.key] = answer.tokens
            if not asked:
                asked = True
                server.submit(Job(99, [*first.prompt, *answer.tokens, *second.prompt]))
    expected = generate(target, None, [[*first.prompt, *told[0], *second.prompt]], max_new_tokens=4, eos_token_ids=[])
    assert told[99] == expected.tokens[0]


def with_broken_token(target, token):
    """The same target, but for an embedding that is not a number."""
    values = {name: variable.get_value() for name, variable in named_variables(target)}
    values["embed"] = values["embed"].at[token].set(jnp.nan)
    return fill(tiny_target(), values)


def test_a_broken_row_breaks_no_other(target):
    """Logits that are not finite end their own answer; who comes into the row afterwards finds nothing of it."""
    broken = with_broken_token(target, 13)
    options = dict(max_new_tokens=6, eos_token_ids=[])
    jobs = [Job(i, [t for t in job.prompt if t != 13] or [1]) for i, job in enumerate(jobs_of([9, 2, 3, 4, 5]))]
    expected = generate(target, None, [job.prompt for job in jobs], **options)
    usable = [i for i in range(len(jobs)) if 13 not in expected.tokens[i]]
    assert len(usable) > 2
    server = Server(broken, batch=1, cycles=4, **options)
    bad = Job(-1, [13])
    answers = serve(server, [bad, *(jobs[i] for i in usable)])
    assert answers[-1].finish_reason == BROKEN
    assert answers[-1].tokens == []
    for i in usable:
        assert answers[i].tokens == expected.tokens[i]


def test_a_dead_draft_is_told(target, draft):
    values = {name: variable.get_value() for name, variable in named_variables(draft)}
    dead = fill(tiny_draft(target), {**values, "norm": jnp.full_like(values["norm"], jnp.nan)})
    options = dict(max_new_tokens=5, tree=Chain(2), eos_token_ids=[])
    server = Server(target, dead, batch=2, cycles=3, **options)
    (job,) = jobs_of([4])
    assert serve(server, [job])[0].tokens == generate(target, None, [job.prompt], max_new_tokens=5, eos_token_ids=[]).tokens[0]
    assert server.dead_draft


def test_refusals(target):
    with pytest.raises(ValueError, match="batch 0"):
        Server(target, batch=0)
    with pytest.raises(ValueError, match="max_new_tokens 0"):
        Server(target, max_new_tokens=0)
    with pytest.raises(ValueError, match="top_p"):
        Server(target, top_p=0.0)
    server = Server(target, batch=1)
    with pytest.raises(ValueError, match="empty"):
        server.submit(Job(0, []))
    with pytest.raises(ValueError, match="holds id 50"):
        server.submit(Job(0, [VOCAB]))
    with pytest.raises(ValueError, match="leaves no room"):
        server.submit(Job(0, [1] * 256))
    assert list(server.run()) == [[]]
