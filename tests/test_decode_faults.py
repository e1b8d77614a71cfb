"""Thirteen kinds of fault that decoders have had, one test or two for each kind, named by its number, over every way to decode.

| | what goes wrong | ways |
|---|---|---|
| 1 | tokens behind a stop id in the middle of a block are kept | all |
| 2 | the cache's end: old slots are overwritten in silence | all |
| 3 | a node sees its siblings, or the root the whole tree | batch, mesh: one pass; a stream makes the same pass |
| 4 | the accepted path stays scattered in the cache | all |
| 5 | candidates are verified by a rule that bends the law | all; the laws themselves in test_verify.py and test_decode.py |
| 6 | the prefill's token is dropped, or not checked | all |
| 7 | padding is read as if it were real | all |
| 8 | rows disturb each other | all |
| 9 | speculative text differs from plain text: ties, rounding | all |
| 10 | a mixed batch divides by the temperature 0; filters in another order | all; the distribution itself in test_sampling.py |
| 11 | the draft's cache holds what the draft made of its own output | all; prompts in pieces in test_stream.py and test_cache.py |
| 12 | rows share their random numbers | all |
| 13 | acceptance counts what was cut, or hides a dead head | all; a head of no use after training in test_toy_training.py |

Ways: a batch of four rows in one program; the same on a mesh of four devices that splits rows, heads and vocabulary; a stream of two cycles
per dispatch; slow: such a stream on the mesh. What is right is written by `Author`: one whole pass per token, for one row alone, the token
chosen in numpy; no cache, no loop, no draft. Every batch here has one shape and one draft, so each way compiles its programs once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_decode import LONGEST, next_logits, padded, whole_pass
from test_sampling import oracle
from tiny_models import VOCAB, tiny_draft, tiny_target

from eagle3_jax import draft as draft_model
from eagle3_jax import target as target_model
from eagle3_jax.attention import causal_mask
from eagle3_jax.bench.lossless import Settings, compare
from eagle3_jax.cache import append
from eagle3_jax.decoding.decode import Request
from eagle3_jax.decoding.generate import Output, execute, generate, prepare, read
from eagle3_jax.decoding.segments import Segments
from eagle3_jax.decoding.stream import Stream
from eagle3_jax.params import fill, named_variables
from eagle3_jax.sampling import position_noise
from eagle3_jax.scripted import ScriptedDraft
from eagle3_jax.sharding import make_mesh, on_mesh_of, place
from eagle3_jax.tree import Chain, Tree, ancestor_mask

TREE = Tree(nodes=8, depth=3, width=3)
BLOCK = TREE.depth + 1
CONTEXT = LONGEST
NEVER = 10_000
"""A limit beyond the context."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One request of a batch."""

    prompt: tuple[int, ...]
    limit: int = 40
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stops: tuple[int, ...] = ()


def but(row: Row, **changes: Any) -> Row:
    return dataclasses.replace(row, **changes)


SEVEN = Row((5, 9, 2, 31, 17, 40, 8))
ONE = Row((11,))
LONG = Row(tuple(int(x) for x in np.random.default_rng(3).integers(1, VOCAB, 28)))
WILD = Row((7, 7, 7), temperature=1.3, top_p=0.9, seed=2**40 + 6)
"""Its text hardly repeats itself."""
ROWS = (SEVEN, ONE, LONG, WILD)


class Author:
    """Writes a row's text, token by token."""

    def __init__(self, target: Any):
        self.target, self.known = target, {}

    def text(self, row: Row) -> list[int]:
        """As far as the context reaches, stop ids and limit left out of account."""
        free = but(row, limit=0, stops=())
        if free not in self.known:
            words = jnp.asarray([[row.seed >> 32, row.seed & 0xFFFFFFFF]], jnp.uint32)
            tokens = list(row.prompt)
            while len(tokens) < CONTEXT:
                logits = next_logits(self.target, tokens)
                if row.temperature == 0:
                    tokens.append(int(np.argmax(logits)))
                else:
                    with np.errstate(divide="ignore"):
                        law = np.log(oracle(logits, row.temperature, row.top_k, row.top_p))
                    tokens.append(int(np.argmax(law + np.asarray(noise(words, np.array([len(tokens)], np.int32))[0]))))
            self.known[free] = tokens[len(row.prompt) :]
        return self.known[free]

    def answer(self, row: Row) -> tuple[list[int], str]:
        """(tokens, finish reason): the text up to the first stop id or the limit."""
        text = self.text(row)[: row.limit]
        stop = next((i for i, token in enumerate(text) if token in row.stops), None)
        return (text, "length") if stop is None else (text[: stop + 1], "stop")


@jax.jit
def noise(words, position):
    return position_noise(words, position, VOCAB)


@dataclasses.dataclass(frozen=True)
class Decoded:
    output: Output
    cache: Any
    draft_cache: Any


@dataclasses.dataclass(frozen=True)
class Way:
    """How rows are decoded. cycles: of a stream's dispatch; None: all in one program."""

    mesh: bool = False
    cycles: int | None = None

    def decode(
        self,
        target: Any,
        draft: Any,
        rows: Sequence[Row],
        tree: Any = TREE,
        rule: Any = "coupled",
        spoil: Callable[[Request], Request] = lambda request: request,
    ) -> Decoded:
        target, draft = self.placed(target), self.placed(draft)
        settings = {name: [getattr(row, name) for row in rows] for name in ("temperature", "top_k", "top_p", "seed")}
        request, config = prepare(
            target,
            draft,
            [row.prompt for row in rows],
            [row.limit for row in rows],
            tree=tree,
            eos_token_ids=[row.stops for row in rows],
            rule=rule,
            **settings,
        )
        request = spoil(request)
        if self.cycles is not None:
            segments = Segments(target, draft, request, config, self.cycles)
            return Decoded(Stream(segments).finish(), *segments.caches)
        state = execute(target, draft, request, dataclasses.replace(config, keep_caches=True))
        return Decoded(read(state), state.cache, state.draft_cache)

    def placed(self, module: Any) -> Any:
        if isinstance(module, ScriptedDraft):
            return dataclasses.replace(module, inner=self.placed(module.inner))
        return place(module, make_mesh(data=2, tensor=2, devices=jax.devices()[:4])) if self.mesh and module is not None else module


WAYS = {"batch": Way(), "mesh": Way(mesh=True), "stream": Way(cycles=2), "stream on the mesh": Way(mesh=True, cycles=2)}


@pytest.fixture(scope="module", params=[pytest.param(way, id=name, marks=[pytest.mark.slow] * (" " in name)) for name, way in WAYS.items()])
def way(request) -> Way:
    return request.param


@pytest.fixture(scope="module")
def target():
    return tiny_target(max_position=CONTEXT)


@pytest.fixture(scope="module")
def head(target):
    return tiny_draft(target)


@pytest.fixture(scope="module")
def author(target) -> Author:
    return Author(target)


def scripted(head, author: Author, rows: Sequence[Row], *chance: float) -> ScriptedDraft:
    """A draft that proposes each row's text, at every level with its chance (none: always)."""
    script = [[*row.prompt, *author.text(row)] for row in rows]
    return ScriptedDraft.of(head, script, chance or (1.0,) * TREE.depth)


def check(output: Output, author: Author, rows: Sequence[Row]) -> None:
    """Tokens, reasons and counts of every row are what its author says."""
    for b, row in enumerate(rows):
        tokens, reason = author.answer(row)
        assert (output.tokens[b], output.finish_reasons[b]) == (tokens, reason), (b, row)
        assert sum(output.accept_lengths[b]) == max(0, len(tokens) - 1)


def changed(module, **values):
    """The module with some of its arrays replaced."""
    return fill(module, {**{name: variable.get_value() for name, variable in named_variables(module)}, **values})


def values_of(module, name: str) -> jax.Array:
    return dict(named_variables(module))[name].get_value()


def check_cache(decoded: Decoded, target, author: Author, rows: Sequence[Row]) -> None:
    """The target's cache holds what a fresh pass over every kept token but the last one gives, and no more."""
    for b, row in enumerate(rows):
        tokens = [*row.prompt, *author.answer(row)[0]]
        assert int(decoded.cache.lengths[b]) == len(tokens) - 1
        out, _ = whole_pass(target, *padded(tokens))
        for got, want in zip(decoded.cache.k + decoded.cache.v, [k for k, _ in out.kv] + [v for _, v in out.kv], strict=True):
            check_slots(got, b, want, len(tokens) - 1)


def check_draft_cache(decoded: Decoded, target, head, author: Author, rows: Sequence[Row], block: int = BLOCK) -> None:
    """The draft's cache holds pairs of real features alone, all but those of the last cycle at least."""
    for b, row in enumerate(rows):
        tokens = [*row.prompt, *author.answer(row)[0]]
        pairs = int(decoded.draft_cache.lengths[b])
        assert len(tokens) - 1 - block <= pairs <= len(tokens) - 1
        ids, at = padded(tokens)
        out, _ = whole_pass(target, ids, at, taps=head.taps)
        k, v = draft_pass(head, target.embed[...], ids, at, out.features)
        check_slots(decoded.draft_cache.k[0], b, k, pairs)
        check_slots(decoded.draft_cache.v[0], b, v, pairs)


@jax.jit
def draft_pass(head, embed, ids, at, features):
    """Keys and values of every pair of (features, next token)."""
    return draft_model.forward(head, embed, jnp.roll(ids, -1, axis=1), draft_model.fuse(head, features), at, causal_mask(LONGEST))[1]


def check_slots(cached, b: int, made, n: int) -> None:
    """The first n slots of row b of a cache's keys [B, K, H, S] or values [B, K, S, H] against those that a pass made, [1, T, K, H]."""
    own, H = np.asarray(cached)[b], made.shape[-1]
    slots = own if own.shape[-1] == H else own.transpose(0, 2, 1)
    np.testing.assert_allclose(slots[:, :n], np.asarray(made)[0].transpose(1, 0, 2)[:, :n], atol=2e-5)


def test_01_nothing_stands_behind_a_stop_id(way, target, head, author):
    """The draft proposes the text itself: the stop id stands at every place of a block, a limit before it, at it and behind it."""
    text = author.text(WILD)
    assert len(set(text[:7])) == 7

    def stopped_by(places, limits=(40, 40, 40)):
        rows = [but(WILD, stops=(text[place],), limit=limit) for place, limit in zip(places, limits, strict=True)]
        rows.append(but(LONG, stops=(text[0], author.text(LONG)[2])))
        decoded = way.decode(target, scripted(head, author, rows), rows)
        check(decoded.output, author, rows)
        check_cache(decoded, target, author, rows)
        return decoded.output

    assert stopped_by([1, 2, 3]).accept_lengths[:3] == [[1], [2], [3]]
    assert stopped_by([4, 5, 6]).accept_lengths[:3] == [[4], [4, 1], [4, 2]]
    # Behind the first block a stop id with a limit in the same block.
    assert stopped_by([5, 5, 5], [5, 6, 7]).finish_reasons[:3] == ["length", "stop", "stop"]


def test_02_the_end_of_the_cache(way, target, head, author):
    """Every row runs to the context's end, where nodes reach beyond it; what the cache holds then is all that was kept."""
    full = Row((*LONG.prompt, 3, 4, 5, 6))
    rows = [but(row, limit=NEVER) for row in (SEVEN, full, LONG, WILD)]
    for chance in ((), (0.7, 0.7, 0.7)):
        decoded = way.decode(target, scripted(head, author, rows, *chance), rows)
        check(decoded.output, author, rows)
        assert [len(row.prompt) + len(tokens) for row, tokens in zip(rows, decoded.output.tokens, strict=True)] == [CONTEXT] * 4
        check_cache(decoded, target, author, rows)
    with pytest.raises(ValueError, match="row 1 has 64 tokens, which leaves no room"):
        way.decode(target, head, [SEVEN, Row((1,) * CONTEXT)])


@pytest.mark.slow
def test_02_caches_that_grow_on_the_mesh():
    """From 384 slots to 640 in the middle of a stream."""
    target = tiny_target(max_position=1024)
    rows = [but(row, limit=limit) for row, limit in zip(ROWS, (400, 9, 380, 390), strict=True)]
    plain = Way().decode(target, None, rows, tree=None).output
    script = [[*row.prompt, *tokens] for row, tokens in zip(rows, plain.tokens, strict=True)]
    decoded = Way(mesh=True, cycles=5).decode(target, ScriptedDraft.of(tiny_draft(target), script, (0.9, 0.8, 0.7)), rows)
    assert decoded.output.tokens == plain.tokens
    assert decoded.cache.slots == 640


PARENTS = {"star": [0, 0, 0, 0, 0, 0], "chain": [0, 0, 1, 2, 3, 4], "two levels": [0, 0, 0, 1, 1, 2], "comb": [0, 0, 1, 1, 3, 3]}


@pytest.mark.parametrize("name", ["batch", "mesh"])
def test_03_every_node_sees_its_own_path_alone(target, name):
    """A tree of another shape in each row: every node's logits equal a plain pass over the prompt and the node's path."""
    parents = np.array(list(PARENTS.values()), np.int32)
    tokens = np.arange(20, 20 + parents.size, dtype=np.int32).reshape(parents.shape)
    paths = [[path_to(m, row) for m in range(len(row))] for row in parents]
    depths = np.array([[len(path) - 1 for path in row] for row in paths], np.int32)
    ids, at = (np.concatenate(parts) for parts in zip(*(padded(row.prompt) for row in ROWS), strict=True))
    lengths = np.array([len(row.prompt) for row in ROWS], np.int32)
    logits = np.asarray(tree_pass(WAYS[name].placed(target), ids, at, lengths, tokens, lengths[:, None] + depths, parents))
    for b, row in enumerate(ROWS):
        for m, path in enumerate(paths[b]):
            np.testing.assert_allclose(logits[b, m], next_logits(target, [*row.prompt, *tokens[b, path]]), atol=2e-5)


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    """From the root."""
    return [*path_to(parents[node], parents), node] if node else [0]


@jax.jit
def tree_pass(target, ids, at, lengths, tokens, positions, parents):
    """Logits of the trees' nodes over a cache that holds the first `lengths` of the ids."""
    with on_mesh_of(target):
        out = target_model.forward(target, ids, at, causal_mask(LONGEST))
        cache = append(target.new_cache(len(ids), 2 * LONGEST), out.kv, None, lengths)
        mask = ancestor_mask(parents, parents.shape[1])
        return target_model.logits(target, target_model.forward(target, tokens, positions, mask, cache).hidden)


@pytest.fixture(scope="module")
def half_right(way, target, head, author) -> Decoded:
    """All four rows by a draft that is right now and then, so that paths of every length are kept."""
    decoded = way.decode(target, scripted(head, author, ROWS, 0.9, 0.6, 0.3), ROWS)
    assert {kept for row in decoded.output.accept_lengths for kept in row} == {1, 2, 3, 4}
    return decoded


def test_04_the_accepted_path_is_gathered(half_right, target, author):
    """The cache equals a fresh pass over what was kept, and all text behind a scattered path is right."""
    check(half_right.output, author, ROWS)
    check_cache(half_right, target, author, ROWS)


@pytest.fixture(scope="module")
def by_rule(target, head):
    """What each rule that is not coupled to plain decoding writes in one program: its law is tested in test_decode.py."""
    return {rule: WAYS["batch"].decode(target, head, HOT, tree, rule).output for rule, tree in RULES}


HOT = [but(row, temperature=1.0 + i / 10, top_k=9, seed=i) if i else row for i, row in enumerate(ROWS)]
RULES = [("siblings", TREE), ("rejection", Chain(2))]


@pytest.mark.parametrize(("rule", "tree"), RULES, ids=["siblings", "rejection"])
def test_05_every_way_draws_by_the_rule_of_a_batch(way, target, head, author, by_rule, rule, tree):
    """The same draws in other rows of a batch, on the mesh and in a stream; the greedy row gets its greedy text."""
    order = [2, 0, 3, 1]
    got = way.decode(target, head, [HOT[i] for i in order], tree, rule).output
    want = by_rule[rule]
    assert got.tokens == [want.tokens[i] for i in order]
    assert got.accept_lengths == [want.accept_lengths[i] for i in order]
    assert got.tokens[1] == author.answer(HOT[0])[0] and max(map(max, got.accept_lengths)) > 1
    assert got.tokens != [author.answer(HOT[i])[0] for i in order]  # the rule was asked


def test_06_the_token_of_the_prefill(way, target, head, author):
    """Limits of 0, 1 and 2 for every row, one of a single prompt token; a first token that is a stop id."""
    for turn in range(4):
        rows = [but(row, limit=(0, 1, 2, 40)[(b + turn) % 4]) for b, row in enumerate(ROWS)]
        output = way.decode(target, scripted(head, author, rows), rows).output
        check(output, author, rows)
        assert set(output.finish_reasons) == {"length"}
    rows = [but(row, stops=(author.text(row)[0],)) for row in ROWS]
    output = way.decode(target, scripted(head, author, rows), rows).output
    check(output, author, rows)
    assert set(output.finish_reasons) == {"stop"} and output.tau == 1.0


def test_07_padding_is_never_read(way, target, head, author):
    """Behind the shorter prompts: ids that are none, and one whose embedding is not a number."""
    rows = (SEVEN, ONE, LONG, but(WILD, top_k=1))
    poison = min(set(range(VOCAB)) - {token for row in rows for token in (*row.prompt, *author.text(row))})
    broken = changed(target, embed=values_of(target, "embed").at[poison].set(jnp.nan))
    ids = values_of(head, "d2t")
    head = changed(head, d2t=jnp.where(ids == poison, LONG.prompt[0], ids))  # the draft does not propose it

    def spoil(request: Request) -> Request:
        prompts, lengths = np.array(request.prompts), np.asarray(request.lengths)
        garbage = np.resize(np.array([poison, -1, 2**31 - 1, 43], np.int32), prompts.shape)
        return dataclasses.replace(request, prompts=jnp.asarray(np.where(np.arange(prompts.shape[1]) < lengths[:, None], prompts, garbage)))

    decoded = way.decode(broken, scripted(head, author, rows), rows, spoil=spoil)
    check(decoded.output, author, rows)
    check_cache(decoded, target, author, rows)


def test_08_rows_do_not_disturb_each_other(way, target, head, author):
    """Lengths 7, 1 and 28, one that ends early, and a dummy that asks for nothing: in any order, every row is what it is alone."""
    rows = [but(SEVEN, stops=(author.text(SEVEN)[5],)), ONE, LONG, but(WILD, prompt=(0,), limit=0)]
    for order in ([0, 1, 2, 3], [2, 3, 1, 0]):
        mine = [rows[i] for i in order]
        output = way.decode(target, scripted(head, author, mine), mine).output
        check(output, author, mine)
        assert [len(kept) for kept in output.accept_lengths] == [(2, 10, 9, 0)[i] for i in order]


def test_09_ties_fall_to_the_lowest_id(way, target, head):
    """Columns of the output head are equal, so that their logits tie exactly: within a device's part of the vocabulary, and across two."""
    columns = values_of(target, "head")
    for lower, upper in ((3, 30), (5, 43), (24, 44), (36, 37)):
        columns = columns.at[:, upper].set(columns[:, lower])
    tied = changed(target, head=columns)
    author = Author(tied)
    output = way.decode(tied, scripted(head, author, ROWS, 0.9, 0.9, 0.9), ROWS).output
    check(output, author, ROWS)
    greedy = {token for tokens in output.tokens[:3] for token in tokens}
    assert greedy & {5, 24, 36} and not greedy & {30, 43, 44, 37}


def test_09_bfloat16_differs_at_near_ties_alone(way, target, head):
    """From plain decoding, by no more than a few units in the last place of the two best logits."""

    def cast(module):
        values = {name: variable.get_value() for name, variable in named_variables(module)}
        return fill(module, {name: value if name == "d2t" else value.astype(jnp.bfloat16) for name, value in values.items()})

    rows = [but(row, temperature=0.0) for row in ROWS]
    prompts = [row.prompt for row in rows]
    small, own = cast(target), cast(head)
    plain = generate(small, None, prompts, 40, eos_token_ids=[])
    output = way.decode(small, own, rows).output
    for found in compare(small, prompts, plain, output, [Settings()] * 4).divergences:
        assert found.gap < 0.25, found


def test_10_greedy_and_sampled_rows_in_one_batch(way, target, head, author):
    """Temperature 0 beside hot and cold rows, with filters that cut another set when applied in another order."""
    rows = [
        but(SEVEN, top_k=3, top_p=0.5),
        but(ONE, temperature=3.0, top_p=0.6, seed=1),
        but(LONG, temperature=0.02, seed=2),
        but(WILD, temperature=2.0, top_k=6, top_p=0.7),
    ]
    output = way.decode(target, scripted(head, author, rows, 0.9, 0.6, 0.3), rows).output
    check(output, author, rows)
    assert output.tokens[0] == author.answer(SEVEN)[0]
    assert len(set(output.tokens[1])) > 5


def test_11_the_draft_cache_holds_real_pairs_alone(half_right, target, head, author):
    """After cycles that kept one to four tokens: no entry made of the draft's own output, none of another branch."""
    check_draft_cache(half_right, target, head, author, ROWS)


@pytest.mark.slow
def test_11_the_caches_of_a_chain(target, head, author):
    """Where the path is the pass's first rows, the target's cache and the draft's."""
    decoded = WAYS["batch"].decode(target, scripted(head, author, ROWS, 0.9, 0.8, 0.7, 0.5), ROWS, Chain(4))
    check(decoded.output, author, ROWS)
    check_cache(decoded, target, author, ROWS)
    check_draft_cache(decoded, target, head, author, ROWS, block=5)


def test_12_rows_have_random_numbers_of_their_own(way, target, head, author):
    """One prompt in all rows: a seed says everything, wherever the row stands; seeds that differ in their high word differ."""
    hot = but(LONG, temperature=1.3)
    seeds = [5, 6, 2**40 + 5, 5]
    for turn in range(2):
        rows = [but(hot, seed=seed) for seed in np.roll(seeds, turn).tolist()]
        output = way.decode(target, scripted(head, author, rows, 0.9, 0.6, 0.3), rows).output
        check(output, author, rows)
        assert len({tuple(tokens) for tokens in output.tokens}) == 3


def test_13_acceptance_counts_what_was_kept(way, target, head, author):
    """A draft that is always right keeps a whole block per cycle, one that is always wrong a token; nothing behind a cut counts."""
    rows = [but(SEVEN, limit=7), but(ONE, limit=1), LONG, but(WILD, stops=(author.text(WILD)[6],))]
    output = way.decode(target, scripted(head, author, rows), rows).output
    assert output.accept_lengths == [[4, 2], [], [4] * 8 + [3], [4, 2]]
    assert output.tau == (6 + 35 + 6) / (2 + 9 + 2)
    # The head's own candidates are ids that no text holds.
    spare = sorted(set(range(VOCAB)) - {token for row in rows for token in author.answer(row)[0]})[:2]
    hopeless = changed(head, d2t=jnp.resize(jnp.asarray(spare, jnp.int32), values_of(head, "d2t").shape))
    output = way.decode(target, scripted(hopeless, author, rows, 0.0, 0.0, 0.0), rows).output
    check(output, author, rows)
    assert output.tau == 1.0 and [len(kept) for kept in output.accept_lengths] == [6, 0, 35, 6]


@pytest.mark.parametrize(("name", "value"), [("head", np.nan), ("norm", np.inf)])
def test_13_a_dead_head_is_told(way, target, head, author, name, value):
    """Its text is right all the same, so somebody has to say it."""
    dead = changed(head, **{name: jnp.full_like(values_of(head, name), value)})
    with pytest.warns(UserWarning, match="the draft is dead"):
        output = way.decode(target, scripted(dead, author, ROWS), ROWS).output
    check(output, author, ROWS)
