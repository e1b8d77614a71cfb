"""What the compiled decode program is: one dispatch per call, nothing that calls back to the host, nothing compiled twice."""

import re
import sys

import jax
import numpy as np
import pytest
from tiny_models import VOCAB, tiny_draft, tiny_target

from eagle3_jax.decoding.decode import run
from eagle3_jax.decoding.generate import generate, prepare
from eagle3_jax.tree import Chain, Tree


@pytest.fixture(scope="module")
def pair():
    target = tiny_target()
    return target, tiny_draft(target)


@pytest.mark.parametrize("tree", [None, Chain(2), Tree(nodes=6, depth=2, width=3)], ids=str)
def test_no_callbacks_and_one_loop_of_cycles(pair, tree):
    target, draft = pair
    request, config = prepare(target, draft if tree else None, [[1, 2, 3]], 16, 0.7, tree=tree)
    text = run.lower(target, draft if tree else None, request, config).compile().as_text()
    called = set(re.findall(r'custom_call_target="([^"]+)"', text))
    assert not [name for name in called if "callback" in name.lower() or "python" in name.lower()]
    assert not re.search(r" (infeed|outfeed|send|recv)\(", text)
    assert " while(" in text


def test_one_dispatch_per_call(pair, monkeypatch):
    """`generate` runs the program once, whatever the number of cycles, and brings the result to the host once."""
    target, draft = pair
    calls = {"run": 0, "get": 0}
    module, get = sys.modules[generate.__module__], jax.device_get

    def counted_run(*args):
        calls["run"] += 1
        return run(*args)

    def counted_get(x):
        calls["get"] += 1
        return get(x)

    monkeypatch.setattr(module, "run", counted_run)
    monkeypatch.setattr(jax, "device_get", counted_get)
    out = generate(target, draft, [[1, 2, 3]], 16, tree=Chain(2), eos_token_ids=[])
    assert len(out.accept_lengths[0]) > 2 and calls == {"run": 1, "get": 1}


def test_nothing_is_compiled_after_warm_up(pair):
    """40 requests of other prompts, lengths, limits, settings and stop ids in the same buckets: not one more program."""
    target, draft = pair
    rng = np.random.default_rng(0)

    def request(temperature):
        prompts = [rng.integers(0, VOCAB, rng.integers(1, 17)).tolist() for _ in range(2)]
        return generate(
            target,
            draft,
            prompts,
            [int(rng.integers(0, 17)), int(rng.integers(1, 17))],
            temperature,
            int(rng.integers(0, 9)),
            float(rng.uniform(0.1, 1.0)),
            int(rng.integers(0, 2**60)),
            Chain(2),
            [int(rng.integers(0, VOCAB))],
        )

    request(0.0)
    request(1.0)
    programs = run._cache_size()
    for i in range(40):
        request([0.0, 0.7, [0.0, 1.2]][i % 3])
    assert run._cache_size() == programs
