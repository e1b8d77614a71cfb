"""The decode program: prefill, then a while loop over draft -> verify -> commit -> stop. One XLA program, no host work between cycles.

Plain decoding is the tree of one node. A chain is the tree of width 1. Everything has a batch dimension, and every row gets
what it would get alone.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from eagle3_jax import target as target_model
from eagle3_jax.attention import causal_mask
from eagle3_jax.cache import after, append
from eagle3_jax.drafting import Draft, ScoreRule, grow
from eagle3_jax.sampling import Sampling, argmax, choose, position_noise, position_uniforms
from eagle3_jax.sharding import constrain, on_mesh_of
from eagle3_jax.target import Target
from eagle3_jax.tree import DraftTree, Tree, root_only, select
from eagle3_jax.verify import Decide, Rule, Walk, coupled, rejection, siblings, walk


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """What selects a compiled program, beside the shapes of its arguments.

    tree: None is plain decoding. slots: cache slots per row. max_new: size of the output buffer.
    sampled: some row has a temperature. rule, coupled_draft: how drafts are verified, and whether candidates are ranked with
    the positions' noise. record: keep every cycle's tree in the output. keep_caches: return the caches too.
    """

    tree: Tree | None
    slots: int
    max_new: int
    sampled: bool = False
    rule: Rule = "coupled"
    coupled_draft: bool = True
    record: bool = False
    keep_caches: bool = False

    @property
    def steps(self) -> int:
        """C: nodes a walk can visit, and rows that one commit writes."""
        return 1 if self.tree is None else self.tree.depth + 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Request:
    """prompts: int32 [B, T], padded right; lengths, limits: int32 [B], prompt tokens and most new tokens.

    stops: int32 [B, E], padded with -1.
    """

    prompts: jax.Array
    lengths: jax.Array
    limits: jax.Array
    stops: jax.Array
    sampling: Sampling


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """All that a cycle reads and writes.

    cache: the target's, every kept token but the pending last one. draft_cache: pairs made of real features.
    features [B, C, A], tokens [B, C], count [B]: the last cycle's real features, each with the token after it, not yet in the draft cache.
    out: int32 [B, max_new + C] new tokens, of which n_out [B] count. pending: int32 [B], the last of them.
    accepted: int32 [B, max_new], tokens kept per cycle; cycles: int32 [B]. done, stopped: bool [B].
    bad: int32 [B], the absolute position whose target logits were not finite, else -1.
    dead: bool [B], the draft gave a logit that is not finite.
    trees: every cycle's drafted tree when recorded, [max_new, B, M] tokens, parents and scores, else None.
    """

    cache: Any
    draft_cache: Any
    features: jax.Array
    tokens: jax.Array
    count: jax.Array
    pending: jax.Array
    out: jax.Array
    n_out: jax.Array
    accepted: jax.Array
    cycles: jax.Array
    done: jax.Array
    stopped: jax.Array
    bad: jax.Array
    dead: jax.Array
    trees: tuple[jax.Array, jax.Array, jax.Array] | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fed:
    """Prompts of which some part has been run, or all.

    cache, draft_cache: as in `DecodeState`: every token that was run, and every pair whose second token the prompt holds.
    hidden [B, D], features [B, A]: the last prompt token's, in rows whose prompt has been run to its end.
    """

    cache: Any
    draft_cache: Any
    hidden: jax.Array
    features: jax.Array


@partial(jax.jit, static_argnames=("config",))
def run(target: Target, draft: Draft | None, request: Request, config: DecodeConfig) -> DecodeState:
    """Prefill and every cycle until all rows are done, on the mesh that the target lies on, if on one.

    Plain decoding (`config.tree` None) asks nothing of a draft that is given.
    """
    draft = draft if config.tree is not None else None
    with on_mesh_of(target):
        state = prefill(target, draft, request, config)
        state = jax.lax.while_loop(lambda s: ~jnp.all(s.done), partial(cycle, target, draft, request, config), state)
    return state if config.keep_caches else dataclasses.replace(state, cache=None, draft_cache=None)


def prefill(target: Target, draft: Draft | None, request: Request, config: DecodeConfig) -> DecodeState:
    """Runs the prompts, samples the first token of every row and checks it like any other."""
    fed = blank(target, draft, request.prompts[:, 0], config.slots)
    following = jnp.roll(request.prompts, -1, axis=1)
    fed = feed(target, draft, request.prompts, following, request.lengths, request.lengths, fed, empty=True)
    state = first_token(target, request, config, fed.hidden, fed.features)
    return dataclasses.replace(state, cache=fed.cache, draft_cache=fed.draft_cache)


def blank(target: Target, draft: Draft | None, first_B: jax.Array, slots: int) -> Fed:
    """Nothing has been run. first: every row's first token, which stands in no pair: some drafts want to know it."""
    batch = first_B.shape[0]
    width = target.config.hidden_size
    taps = len(draft.taps) if draft is not None else 0
    return Fed(
        cache=target.new_cache(batch, slots),
        draft_cache=None if draft is None else draft.begin(target.embed[...], draft.new_cache(batch, slots), first_B),
        hidden=jnp.zeros((batch, width), target.dtype),
        features=jnp.zeros((batch, taps * width), target.dtype),
    )


def feed(
    target: Target,
    draft: Draft | None,
    tokens_BT: jax.Array,
    following_BT: jax.Array,
    count_B: jax.Array,
    prompt_B: jax.Array,
    fed: Fed,
    empty: bool = False,
) -> Fed:
    """Runs the first `count` of each row's T tokens behind what has been run. Prompts may come in any pieces.

    following: the prompt's token after each. prompt: length of each whole prompt. What follows its last token is not known, so the
    pair of that one waits: the first cycle extends the draft with it. empty: nothing has been run yet, so the caches need not be read.
    """
    T = tokens_BT.shape[1]
    ends_B = (count_B > 0) & (fed.cache.lengths + count_B == prompt_B)
    positions = fed.cache.lengths[:, None] + jnp.arange(T, dtype=jnp.int32)[None]
    taps = draft.taps if draft is not None else ()
    mask, cache = (None, None) if empty else (causal_mask(T), fed.cache)
    out = target_model.forward(target, tokens_BT, positions, mask, cache, taps, prompt_B=prompt_B)
    draft_cache = fed.draft_cache
    if draft is not None:
        pairs = count_B - ends_B.astype(jnp.int32)
        draft_cache, _, _ = draft.extend(target.embed[...], draft_cache, out.features, following_BT, pairs, first=empty)
    at = jnp.maximum(count_B - 1, 0)[:, None, None]

    def last(new_BTX: jax.Array, old_BX: jax.Array) -> jax.Array:
        return jnp.where(ends_B[:, None], jnp.take_along_axis(new_BTX, at, axis=1)[:, 0].astype(old_BX.dtype), old_BX)

    return Fed(
        cache=append(fed.cache, out.kv, None, after(count_B, out.hidden)),
        draft_cache=draft_cache,
        hidden=last(out.hidden, fed.hidden),
        features=last(out.features, fed.features),
    )


def first_token(target: Target, request: Request, config: DecodeConfig, hidden_BD: jax.Array, features_BA: jax.Array) -> DecodeState:
    """Samples every row's first token from its last prompt token's hidden state; the state of the first cycle, without caches."""
    B, C = request.lengths.shape[0], config.steps
    logits = target_model.logits(target, hidden_BD)
    noise = position_noise(request.sampling.seeds, request.lengths, logits.shape[-1]) if config.sampled else None
    first = choose(logits, noise, request.sampling)
    finite = jnp.isfinite(jnp.max(logits, axis=-1))
    n_out = jnp.where(finite, jnp.minimum(request.limits, 1), 0)
    stopped = (n_out > 0) & jnp.any(first[:, None] == request.stops, axis=-1)
    state = DecodeState(
        cache=None,
        draft_cache=None,
        features=jnp.zeros((B, C, features_BA.shape[-1]), features_BA.dtype).at[:, 0].set(features_BA),
        tokens=jnp.zeros((B, C), jnp.int32).at[:, 0].set(first),
        count=jnp.ones((B,), jnp.int32),
        pending=first,
        done=stopped | (n_out >= request.limits) | ~finite,
        stopped=stopped,
        bad=jnp.where(finite, -1, request.lengths),
        dead=jnp.zeros((B,), bool),
        **blank_output(B, config),
    )
    return dataclasses.replace(state, out=state.out.at[:, 0].set(first), n_out=n_out)


def blank_output(batch: int, config: DecodeConfig) -> dict[str, Any]:
    """The fields of a state that say what has come out, when nothing has."""
    M = 1 if config.tree is None else config.tree.nodes
    blank = jnp.zeros((config.max_new, batch, M), jnp.int32)
    return {
        "out": jnp.zeros((batch, config.max_new + config.steps), jnp.int32),
        "n_out": jnp.zeros((batch,), jnp.int32),
        "accepted": jnp.zeros((batch, config.max_new), jnp.int32),
        "cycles": jnp.zeros((batch,), jnp.int32),
        "trees": (blank, blank, blank.astype(jnp.float32)) if config.record else None,
    }


def cycle(target: Target, draft: Draft | None, request: Request, config: DecodeConfig, state: DecodeState) -> DecodeState:
    """Draft a tree per row, check it in one target pass, keep what stands."""
    sampling, C = request.sampling, config.steps
    base = state.cache.lengths  # the absolute position of the pending token
    noise = None
    if config.sampled:
        # Every device makes all of it: cheaper than bringing together what the draft's ids ask for.
        noise = position_noise(sampling.seeds, base[:, None] + jnp.arange(1, C + 1)[None], target.config.vocab_size)

    draft_cache, dead, levels = state.draft_cache, state.dead, []
    if draft is None or config.tree is None:
        tree = root_only(state.pending)
    else:
        draft_cache, tree, levels, failed = _draft(target, draft, sampling, config, state, noise)
        dead = dead | (failed & ~state.done)

    positions = base[:, None] + tree.depths
    out = target_model.forward(target, tree.tokens, positions, tree.mask, state.cache, draft.taps if draft is not None else ())
    logits = target_model.logits(target, out.hidden)
    walked = walk(tree, logits, _decide(draft, sampling, config, base, tree, noise, levels, logits.shape[-1]), C)
    return _commit(request, state, draft_cache, dead, walked, out, tree)


def _draft(
    target: Target, draft: Draft, sampling: Sampling, config: DecodeConfig, state: DecodeState, noise_BCV: jax.Array | None
) -> tuple[Any, DraftTree, list[jax.Array], jax.Array]:
    """(draft cache with the last cycle's real pairs, the tree, finite logits per level, rows whose draft gave a non-finite logit)."""
    assert config.tree is not None
    embed = target.embed[...]
    cache, logits, carry = draft.extend(embed, state.draft_cache, state.features, state.tokens, state.count)
    failed = [jnp.any(~jnp.isfinite(logits), axis=-1)]
    base = state.cache.lengths
    ids = draft.target_ids
    rank_noise = None
    if noise_BCV is not None and config.rule == "rejection":
        # A chain sampled from q needs noise of its own: independent of the noise that decides.
        depth, U = config.tree.depth, ids.shape[0]
        rank_noise = position_noise(sampling.seeds, base[:, None] + jnp.arange(1, depth + 1)[None], U, stream=2)
    elif noise_BCV is not None and config.rule == "coupled" and config.coupled_draft:
        # Not for "siblings": it draws from what refused candidates leave, with noise that must know nothing of the candidates.
        rank_noise = constrain(noise_BCV[:, :, ids], "rows", None, "draft_vocab")

    levels: list[jax.Array] = []

    def score(level: int, raw: jax.Array) -> jax.Array:
        finite = jnp.where(jnp.isfinite(raw), raw, -1e9)
        if level > 0:
            failed.append(jnp.any(~jnp.isfinite(raw), axis=(1, 2)))
        levels.append(finite)
        if rank_noise is None:
            return jax.nn.log_softmax(finite, axis=-1)
        hot = (sampling.temperature > 0)[:, None, None]
        heat = jnp.where(hot, sampling.temperature[:, None, None], 1.0)
        return jax.nn.log_softmax(finite / heat + jnp.where(hot, rank_noise[:, level][:, None], 0.0), axis=-1)

    rule: ScoreRule = score
    pool, _ = grow(draft, embed, cache, logits, carry, config.tree, rule)
    bad = failed[0]
    for more in failed[1:]:
        bad = bad | more
    return cache, select(state.pending, pool, config.tree), levels, bad


def _decide(
    draft: Draft | None,
    sampling: Sampling,
    config: DecodeConfig,
    base: jax.Array,
    tree: DraftTree,
    noise_BCV: jax.Array | None,
    levels: list[jax.Array],
    vocab_size: int,
) -> Decide:
    """The configured verification rule over this cycle's tree."""
    if config.rule == "coupled" or noise_BCV is None or draft is None or config.tree is None:
        return coupled(tree, sampling, noise_BCV)
    width = config.tree.width
    uniforms = jnp.stack([position_uniforms(sampling.seeds, base + 1 + i, width, stream=1) for i in range(config.steps)], axis=1)
    if config.rule == "siblings":
        return siblings(tree, sampling, noise_BCV, uniforms)
    hot = (sampling.temperature > 0)[:, None]
    heat = jnp.where(hot, sampling.temperature[:, None], 1.0)
    drafted = []
    for level in levels:
        raw = level[:, 0]
        one_hot = jax.nn.one_hot(argmax(raw), raw.shape[-1], dtype=jnp.float32)
        q = jnp.where(hot, jax.nn.softmax(raw / heat, axis=-1), one_hot)
        drafted.append(jnp.zeros((raw.shape[0], vocab_size), jnp.float32).at[:, draft.target_ids].set(q))
    return rejection(tree, sampling, noise_BCV, uniforms[:, :, 0], jnp.stack(drafted, axis=1))


def _commit(
    request: Request,
    state: DecodeState,
    draft_cache: Any,
    dead: jax.Array,
    walked: Walk,
    out: target_model.TargetOutput,
    tree: DraftTree,
) -> DecodeState:
    """Cuts the walked tokens at a stop id or the limit; moves exactly the kept path into cache, output and the next features."""
    B, C = walked.tokens.shape
    step = jnp.arange(C, dtype=jnp.int32)[None, :]
    usable = jnp.where(walked.bad >= 0, walked.bad, walked.count)  # tokens chosen before any non-finite logits
    remaining = request.limits - state.n_out
    is_stop = jnp.any(walked.tokens[:, :, None] == request.stops[:, None, :], axis=-1)
    first_stop = jnp.min(jnp.where(is_stop & (step < usable[:, None]), step, C), axis=-1)
    kept = jnp.minimum(jnp.minimum(usable, first_stop + 1), remaining)
    kept = jnp.where(state.done, 0, kept)
    stopped = state.stopped | (kept > first_stop)
    broke = ~state.done & (walked.bad >= 0) & (kept == usable)
    n_out = state.n_out + kept

    last = jnp.maximum(kept - 1, 0)[:, None]
    pending = jnp.where(kept > 0, jnp.take_along_axis(walked.tokens, last, axis=1)[:, 0], state.pending)
    rows = jnp.arange(B)
    columns = state.n_out[:, None] + step
    # Rows that keep nothing still write C tokens behind their count; the buffer has room for them and nobody reads them.
    new_out = state.out.at[rows[:, None], columns].set(walked.tokens)
    accepted = state.accepted.at[rows, jnp.where(kept > 0, state.cycles, state.accepted.shape[1])].set(kept, mode="drop")
    trees = state.trees
    if trees is not None:
        at = jnp.max(state.cycles)
        scores = tree.scores if tree.scores is not None else jnp.zeros_like(trees[2][0])
        trees = (trees[0].at[at].set(tree.tokens), trees[1].at[at].set(tree.parents), trees[2].at[at].set(scores))
    return DecodeState(
        cache=append(state.cache, out.kv, walked.path, kept),
        draft_cache=draft_cache,
        features=jnp.take_along_axis(out.features, walked.path[:, :, None], axis=1),
        tokens=walked.tokens,
        count=kept,
        pending=pending,
        out=new_out,
        n_out=n_out,
        accepted=accepted,
        cycles=state.cycles + (kept > 0).astype(jnp.int32),
        done=state.done | stopped | (n_out >= request.limits) | broke,
        stopped=stopped,
        bad=jnp.where(broke, state.cache.lengths + 1 + walked.bad, state.bad),
        dead=dead,
        trees=trees,
    )
