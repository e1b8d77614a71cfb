"""`generate`: checks the request, picks the compiled program of its shape bucket, makes one dispatch (for long ones several), reads."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from eagle3_jax.config import TargetConfig
from eagle3_jax.decoding import auto
from eagle3_jax.decoding.buckets import ONE_DISPATCH, bucket
from eagle3_jax.decoding.decode import DecodeConfig, DecodeState, Request, run
from eagle3_jax.decoding.segments import Segments, join
from eagle3_jax.drafting import Draft
from eagle3_jax.sampling import Sampling
from eagle3_jax.target import Target
from eagle3_jax.tree import Chain, Tree, TreeChoice
from eagle3_jax.verify import RULES, Rule


@dataclasses.dataclass(frozen=True)
class Output:
    """What `generate` returns.

    tokens: per row the new tokens, the first stop id included, nothing after it. finish_reasons: "stop" or "length" per row;
    "unfinished" in a stream that was looked at, or closed, before the row's end.
    accept_lengths: per row and decode cycle the tokens kept (accepted drafts + 1, after the cut); the token sampled by the
    prefill belongs to no cycle, so a row's sum is len(tokens) - 1.
    trees: per row and cycle (tokens, parents) of the drafted tree, when recorded; scores: the nodes' scores, likewise.
    """

    tokens: list[list[int]]
    finish_reasons: list[str]
    accept_lengths: list[list[int]]
    trees: list[list[tuple[list[int], list[int]]]] | None = None
    scores: list[list[list[float]]] | None = None

    @property
    def tau(self) -> float:
        """Acceptance length: tokens kept per cycle over all rows; 1.0 for plain decoding, and when no cycle ran."""
        cycles = sum(len(row) for row in self.accept_lengths)
        return sum(map(sum, self.accept_lengths)) / cycles if cycles else 1.0


class NonFiniteLogitsError(FloatingPointError):
    """The target gave NaN or infinite logits. `output` holds what every row had before that; other rows ran to their end."""

    def __init__(self, where: dict[int, int], output: Output):
        self.where, self.output = where, output
        places = ", ".join(f"row {row} at position {position}" for row, position in where.items())
        super().__init__(
            f"the target's logits are not finite: {places}; check its weights and dtype (the error's `output` holds the other rows)"
        )


def generate(
    target: Target,
    draft: Draft | None,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int] = 256,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    seed: int | Sequence[int] = 0,
    tree: TreeChoice = None,
    eos_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
    *,
    rule: Rule = "coupled",
    coupled_draft: bool = True,
    record_trees: bool = False,
) -> Output:
    """Decodes every prompt; with a draft faster, with `draft=None` plainly, and the same tokens either way.

    prompts: token ids, any lengths >= 1. Every setting is a scalar or one value per row; a scalar seed s gives row i the seed s+i.
    tree: what to draft per cycle. "auto": what pays here, plain decoding included; its first call for a target, draft and batch
    size measures the machine and stores the choice, later ones follow the acceptance they see (see `eagle3_jax.decoding.auto`). None: the
    stored choice where there is one, else a size that suits the backend. eos_token_ids: a list for all rows, a list of lists
    (one per row), None for the target's own, [] for never.
    rule: how drafts are verified (see `eagle3_jax.verify`); "rejection" is for chains. coupled_draft: rank candidates with the
    noise that will decide (temperature > 0, rule "coupled"); it changes the speed, never the tokens.
    max_new_tokens is clipped to the target's context.

    Raises ValueError naming the argument and row for anything unusable, before any work; NonFiniteLogitsError when the target
    breaks. Warns when the draft's logits are not finite: the text stays the target's, the speed is gone.
    """
    request, config = prepare(
        target, draft, prompts, max_new_tokens, temperature, top_k, top_p, seed, tree, eos_token_ids, rule, coupled_draft, record_trees
    )
    output = read(execute(target, draft, request, config))
    if draft is not None and tree == "auto":
        auto.observe(target, draft, config.tree, output.accept_lengths)
    return output


def execute(target: Target, draft: Draft | None, request: Request, config: DecodeConfig) -> DecodeState:
    """Decodes what `prepare` gives, to be read by `read`: in one program, or, what is long, in several with caches that grow."""
    if fits_one_program(request, config):
        return run(target, draft, request, config)
    segments = Segments(target, draft, request, config)
    state = join(list(segments.reports()))
    if config.keep_caches:
        cache, draft_cache = segments.caches
        state = dataclasses.replace(state, cache=cache, draft_cache=draft_cache)
    return state


def fits_one_program(request: Request, config: DecodeConfig) -> bool:
    """Whether `execute` is `decode.run`."""
    longest, most = ONE_DISPATCH
    return request.prompts.shape[1] <= longest and config.max_new <= most


def prepare(
    target: Target,
    draft: Draft | None,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: Any = 256,
    temperature: Any = 0.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    seed: Any = 0,
    tree: TreeChoice = None,
    eos_token_ids: Any = None,
    rule: Rule = "coupled",
    coupled_draft: bool = True,
    record_trees: bool = False,
) -> tuple[Request, DecodeConfig]:
    """The checked arguments of the decode program: arrays padded to the bucket's shapes, and the program's key.

    Where the tree is None it decodes plainly, also when a draft was given: that is a choice too.
    """
    c = target.config
    rows = check_prompts(prompts, c)
    B = len(rows)
    lengths = np.array([len(row) for row in rows], np.int32)
    wanted = _per_row("max_new_tokens", max_new_tokens, B, int, lambda v: v >= 0, "must be an int >= 0")
    limits = np.minimum(np.array(wanted, np.int64), c.max_position - lengths).astype(np.int32)
    temperatures = _per_row("temperature", temperature, B, float, lambda v: math.isfinite(v) and v >= 0, "must be a finite number >= 0")
    top_ks = _per_row("top_k", top_k, B, int, lambda v: v >= 0, "must be an int >= 0 (0 is off)")
    top_ps = _per_row("top_p", top_p, B, float, lambda v: 0 < v <= 1, "must lie in (0, 1] (1 is off)")
    seeds = _seeds(seed, B)
    stops = _stops(eos_token_ids, B, c)
    if rule not in RULES:
        raise ValueError(f"rule {rule!r} is unknown; one of {', '.join(RULES)}")
    shape = _tree(tree, target, draft, B, rule)

    # By what was asked, not by what the context leaves: otherwise a prompt near the context's end would be a program of its own.
    max_new = bucket(min(max(wanted), c.max_position), 16)
    config = DecodeConfig(
        tree=shape,
        slots=0,
        max_new=max_new,
        sampled=any(t > 0 for t in temperatures),
        rule=rule,
        coupled_draft=coupled_draft,
        record=record_trees,
    )
    T = bucket(int(lengths.max()), 16)
    # A walk of C tokens is written behind the last kept one whatever is accepted, so the cache must reach that far; and a draft may
    # hold the first token beside its pairs.
    slots = -(-max(T + 1, min(T + max_new, c.max_position) + config.steps) // 64) * 64
    padded = np.zeros((B, T), np.int32)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    width = bucket(max(len(ids) for ids in stops), 4)
    # Not jnp.asarray, which compiles a program for every new shape.
    request = Request(
        prompts=jax.device_put(padded),
        lengths=jax.device_put(lengths),
        limits=jax.device_put(limits),
        stops=jax.device_put(np.array([list(ids) + [-1] * (width - len(ids)) for ids in stops], np.int32)),
        sampling=Sampling(
            temperature=jax.device_put(np.array(temperatures, np.float32)),
            top_k=jax.device_put(np.array([min(k, 2**31 - 1) for k in top_ks], np.int32)),
            top_p=jax.device_put(np.array(top_ps, np.float32)),
            seeds=jax.device_put(np.array([[s >> 32, s & 0xFFFFFFFF] for s in seeds], np.uint32)),
        ),
    )
    return request, dataclasses.replace(config, slots=slots)


def read(state: DecodeState) -> Output:
    """The program's result as lists; raises and warns as `generate` says."""
    kept = dataclasses.replace(state, cache=None, draft_cache=None, features=None, tokens=None, count=None, pending=None)
    told: DecodeState = jax.device_get(kept)
    output = collect(told)
    judge(told, output)
    return output


def collect(told: DecodeState) -> Output:
    """What a state on the host says, as lists."""
    rows = range(len(told.n_out))
    trees = scores = None
    if told.trees is not None:
        tokens, parents, values = told.trees
        scores = [[values[i, b].tolist() for i in range(told.cycles[b])] for b in rows]
        trees = [[(tokens[i, b].tolist(), parents[i, b].tolist()) for i in range(told.cycles[b])] for b in rows]
    return Output(
        tokens=[told.out[b, : told.n_out[b]].tolist() for b in rows],
        finish_reasons=[finish_reason(told, b) for b in rows],
        accept_lengths=[told.accepted[b, : told.cycles[b]].tolist() for b in rows],
        trees=trees,
        scores=scores,
    )


def finish_reason(told: DecodeState, row: int) -> str:
    """Why the row ended, or "unfinished"."""
    return "stop" if told.stopped[row] else "length" if told.done[row] else "unfinished"


def judge(told: DecodeState, output: Output) -> None:
    """Raises NonFiniteLogitsError for a broken target; warns of a dead draft."""
    rows = range(len(told.n_out))
    broken = {b: int(told.bad[b]) for b in rows if told.bad[b] >= 0}
    if broken:
        raise NonFiniteLogitsError(broken, output)
    dead = [b for b in rows if told.dead[b]]
    if dead:
        warnings.warn(
            f"the draft is dead: its logits are not finite (rows {dead}); the text is the target's, without speed-up", stacklevel=4
        )


def check_prompts(prompts: Sequence[Sequence[int]], config: TargetConfig) -> list[list[int]]:
    """The prompts as lists of int. Raises ValueError naming the row that is empty, holds an unknown id, or fills the context."""
    rows = [[int(t) for t in row] for row in prompts]
    if not rows:
        raise ValueError("prompts: no prompt given")
    for i, row in enumerate(rows):
        if not row:
            raise ValueError(f"prompts: row {i} is empty; a prompt needs at least one token")
        wrong = next((t for t in row if not 0 <= t < config.vocab_size), None)
        if wrong is not None:
            raise ValueError(f"prompts: row {i} holds id {wrong}, outside the target's vocabulary of {config.vocab_size}")
        if len(row) >= config.max_position:
            raise ValueError(
                f"prompts: row {i} has {len(row)} tokens, which leaves no room for one more in the context of {config.max_position}"
            )
    return rows


def _per_row(name: str, value: Any, batch: int, kind: type, valid: Any, rule: str) -> list[Any]:
    many = isinstance(value, (list, tuple, np.ndarray))
    values = list(value) if many else [value] * batch
    if len(values) != batch:
        raise ValueError(f"{name}: {len(values)} values for {batch} rows")
    out = []
    for i, v in enumerate(values):
        try:
            converted = kind(v)
            good = not isinstance(v, bool) and converted == v and valid(converted)
        except (TypeError, ValueError, OverflowError):
            good, converted = False, None
        if not good:
            raise ValueError(f"{name}: {v!r}{f' (row {i})' if many else ''} {rule}")
        out.append(converted)
    return out


def _seeds(seed: Any, batch: int) -> list[int]:
    rule = "must be an int in 0 .. 2**64-1"
    seeds = _per_row("seed", seed, batch, int, lambda v: 0 <= v < 2**64, rule)
    return seeds if isinstance(seed, (list, tuple, np.ndarray)) else [(seeds[0] + i) % 2**64 for i in range(batch)]


def _stops(eos: Any, batch: int, config: TargetConfig) -> list[tuple[int, ...]]:
    if eos is None:
        return [config.eos_token_ids] * batch
    rows = list(eos)
    if rows and isinstance(rows[0], (list, tuple, np.ndarray)):
        if len(rows) != batch:
            raise ValueError(f"eos_token_ids: {len(rows)} lists for {batch} rows")
    else:
        rows = [rows] * batch
    stops = [tuple(int(t) for t in row) for row in rows]
    for i, ids in enumerate(stops):
        wrong = next((t for t in ids if not 0 <= t < config.vocab_size), None)
        if wrong is not None:
            raise ValueError(f"eos_token_ids: id {wrong} (row {i}) is outside the target's vocabulary of {config.vocab_size}")
    return stops


def _tree(tree: TreeChoice, target: Target, draft: Draft | None, batch: int, rule: Rule) -> Tree | None:
    if tree is not None and tree != "auto" and not isinstance(tree, (Chain, Tree)):
        raise ValueError(f'tree: {tree!r} is neither a Chain nor a Tree nor "auto"')
    if draft is None:
        return None
    chosen = auto.resolve(target, draft, tree, batch, chains_only=rule == "rejection")
    if chosen is None:
        return None
    shape = chosen.tree
    candidates = draft.target_ids.shape[0]
    if shape.width > candidates:
        raise ValueError(f"tree: width {shape.width} exceeds the draft vocabulary of {candidates}")
    if rule == "rejection" and shape.width != 1:
        raise ValueError('tree: rule "rejection" is right only for chains, whose tokens are sampled from the draft; use Chain(n)')
    return shape
