"""Is a head read as it was made? The usual silent faults, tried on real text: taps one off, another rotary base, another residual.

A head that is read wrongly still gives the right text, only slowly, so nothing announces it. Here the target writes a few answers, and
every reading of the head is scored on them by the training-time unroll: step s is right where the draft, fed its own states, chooses the
target's token. That is what a chain would accept at every position of those answers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax import target as target_model
from eagle3_jax.bench.evaluate import acceptance
from eagle3_jax.config import DraftConfig, RopeConfig
from eagle3_jax.decoding.generate import generate
from eagle3_jax.draft import Eagle3Draft, reread, table
from eagle3_jax.panels import in_plain
from eagle3_jax.target import Target
from eagle3_jax.training.trainer import Fixed, eval_step, split
from eagle3_jax.training.ttt import Batch, Frozen, recipe, scored
from eagle3_jax.tree import Chain

DEAD, WEAK = 1.05, 1.3
"""Acceptance lengths below which a head does nothing, or next to nothing."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """One way to read the head. accuracy[s]: step s right, of `slots` slots; survival[s]: that and every step before."""

    name: str
    taps: tuple[int, ...]
    rope_theta: float
    norm_before_residual: bool
    slots: int
    accuracy: tuple[float, ...]
    survival: tuple[float, ...]

    @property
    def acceptance_length(self) -> float:
        """Tokens a chain of this many steps keeps per cycle, were every position a cycle's start."""
        return 1.0 + sum(self.survival)


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """decoded: acceptance length of real decoding with the head as it was loaded; per_position: chance that draft i stands there.

    verdict: "good", "weak", "misread" (another reading is clearly better: `best`) or "dead"; advice: what to do, in a sentence or two.
    """

    decoded: float
    per_position: tuple[float | None, ...]
    tokens: int
    readings: tuple[Reading, ...]
    verdict: str
    best: str
    advice: str


def neighbours(config: DraftConfig, target_rope: RopeConfig) -> dict[str, DraftConfig]:
    """The readings to try, by name: as given first, then one change each."""
    L, found = config.target_num_layers or 10**9, {"as given": config}
    for step, name in ((-1, "one lower"), (1, "one higher")):
        taps = tuple(k + step for k in config.taps)
        if min(taps) >= 0 and max(taps) < L:
            found[f"taps {name}: {' '.join(map(str, taps))}"] = dataclasses.replace(config, taps=taps)
    ropes = {"rotary base 10000": RopeConfig(), f"the target's rotary embedding (base {target_rope.theta:g})": target_rope}
    tried = [config.rope]
    for name, rope in ropes.items():
        if rope not in tried:
            tried.append(rope)
            found[name] = dataclasses.replace(config, rope=rope)
    flipped = not config.norm_before_residual
    found[f"norm_before_residual {str(flipped).lower()}"] = dataclasses.replace(config, norm_before_residual=flipped)
    return found


def diagnose(
    target: Target,
    draft: Eagle3Draft,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int = 64,
    steps: int = 3,
    eos_token_ids: Sequence[int] | None = None,
) -> Diagnosis:
    """Decodes the prompts (token ids) greedily with a chain of `steps`, scores every reading on the answers, and says what it means.

    Raises ValueError when no answer is long enough to score (`steps` + 1 tokens).
    """
    out = generate(target, draft, prompts, max_new_tokens=max_new_tokens, tree=Chain(steps), eos_token_ids=eos_token_ids)
    readings = neighbours(draft.config, target.config.rope)
    batch, features = _answers(target, prompts, out.tokens, sorted({k for c in readings.values() for k in c.taps}), steps)
    scores = [_score(name, reread(draft, config), target, batch, features, steps) for name, config in readings.items()]
    per_position = acceptance(out, steps).per_position
    verdict, best, advice = judge(scores)
    return Diagnosis(float(out.tau), tuple(per_position), sum(map(len, out.tokens)), tuple(scores), verdict, best, advice)


def judge(readings: Sequence[Reading]) -> tuple[str, str, str]:
    """(verdict, name of the best reading, advice); the first reading is the one that was given.

    Another reading must be better at the first step by three standard errors and by 0.03, and by a twentieth in acceptance length.
    """
    given, best = readings[0], max(readings, key=lambda r: r.acceptance_length)
    a, b = given.accuracy[0], best.accuracy[0]
    error = math.sqrt((a * (1 - a) + b * (1 - b)) / max(1, given.slots))
    clear = b - a > max(3 * error, 0.03) and best.acceptance_length > 1.05 * given.acceptance_length
    if clear and best.acceptance_length >= DEAD:
        return "misread", best.name, f"This head was most likely made differently from how it is read here. {_remedy(given, best)}"
    if given.acceptance_length < DEAD:
        advice = (
            "It accepts nothing, and none of the usual faults explains it: check that it was made for this very target and chat "
            "template, that its vocabulary map is its own, and that it was trained at all."
        )
        return "dead", given.name, advice
    if given.acceptance_length < WEAK:
        return "weak", given.name, "It works a little, and no other reading is clearly better: it is hardly trained, or for other text."
    return "good", given.name, "It is read as it was made: no other reading is clearly better."


def _remedy(given: Reading, best: Reading) -> str:
    if best.taps != given.taps:
        ids = " ".join(map(str, best.taps))
        return f"Load it with taps {ids} (`eagle3-convert head ... --taps {ids} --overrule` writes that down)."
    if best.rope_theta != given.rope_theta or best.name.startswith("the target's rotary"):
        return (
            f"Load it with rotary base {best.rope_theta:g} (`eagle3-convert head ... --rope-theta {best.rope_theta:g}` writes that down)."
        )
    value = str(best.norm_before_residual).lower()
    return f"Its config is wrong about norm_before_residual (`eagle3-convert head ... --norm-before-residual {value}` corrects it)."


def _answers(
    target: Target, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], taps: Sequence[int], steps: int
) -> tuple[Batch, dict[int, Any]]:
    """The answers as one batch of the unroll without features, and the states entering each tapped block, [B, T, D] by tap."""
    rows = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    B, T = len(rows), max(map(len, rows))
    tokens, response, valid = np.zeros((B, T), np.int32), np.zeros((B, T), np.int32), np.zeros((B, T), bool)
    for b, row in enumerate(rows):
        tokens[b, : len(row)], valid[b, : len(row)] = row, True
        response[b, len(prompts[b]) : len(row)] = 1
    segments = valid.astype(np.int32)
    wanted = scored(recipe("aligned", steps=steps), response, segments, valid).any(0)
    room = int(wanted.sum(1).max(initial=0))
    if not room:
        raise ValueError("no answer is long enough to score the head on: give other prompts or more tokens")
    slots = np.full((B, room), -1, np.int32)
    for b, row in enumerate(wanted):
        slots[b, room - row.sum() :] = np.flatnonzero(row)
    positions = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
    lengths = jnp.asarray([len(prompt) for prompt in prompts], jnp.int32)
    states = _states(target, tuple(taps), jnp.asarray(tokens), jnp.asarray(positions), lengths)
    # Greedy text: inside an answer the target's choice is the next token. Hits are all that is counted, so the teacher may be empty.
    argmax = np.concatenate([tokens[:, 1:], np.full((B, 1), -1, np.int32)], axis=1)
    nothing = np.zeros((B, T, 1), np.float32)
    arrays = (tokens, positions, nothing, nothing, argmax, response, segments, valid, slots)
    return Batch(*map(jnp.asarray, arrays)), dict(zip(taps, jnp.split(states, len(taps), axis=-1), strict=True))


@partial(jax.jit, static_argnums=1)
def _states(target: Target, taps: tuple[int, ...], tokens_BT: jax.Array, positions_BT: jax.Array, prompt_B: jax.Array) -> jax.Array:
    return target_model.forward(target, tokens_BT, positions_BT, None, taps=taps, prompt_B=prompt_B).features


def _score(name: str, draft: Eagle3Draft, target: Target, batch: Batch, features: dict[int, Any], steps: int) -> Reading:
    config, rule = draft.config, recipe("aligned", steps=steps)
    params, variables = split(draft, rule)
    frozen = Frozen(table(draft, in_plain(target.embed[...])), jnp.zeros((1, config.draft_vocab_size), params["head"].dtype))
    own = dataclasses.replace(batch, features=jnp.concatenate([features[k] for k in config.taps], axis=-1))
    metrics = jax.device_get(eval_step(config, rule, params, Fixed(frozen, variables), own))
    count = metrics.slots.clip(1)
    return Reading(
        name,
        config.taps,
        config.rope.theta,
        config.norm_before_residual,
        int(metrics.slots[0]),
        tuple(float(x) for x in metrics.correct / count),
        tuple(float(x) for x in metrics.survived / count),
    )
