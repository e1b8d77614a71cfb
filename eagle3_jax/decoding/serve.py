"""Many prompts through a fixed number of rows: a row whose answer has ended takes the next prompt, the others go on undisturbed.

Shapes are few: prompts come in widths of a short list, cycles some at a time, and the caches grow in few steps. Every row decodes by its
own seed and absolute positions, so an answer does not depend on which prompts share the batch, on their order, or on which row it came
to (but for ties that rounding decides, as between any two batch shapes).
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.decoding.buckets import bucket
from eagle3_jax.decoding.decode import DecodeConfig, DecodeState, Request, prefill
from eagle3_jax.decoding.generate import check_prompts, prepare
from eagle3_jax.decoding.segments import advance, grown, split
from eagle3_jax.drafting import Draft
from eagle3_jax.sharding import on_mesh_of
from eagle3_jax.target import Target
from eagle3_jax.tree import TreeChoice
from eagle3_jax.verify import Rule

BROKEN = "broken"
"""Finish reason of an answer during which the target's logits were not finite; its tokens are those before that."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A prompt to answer. key: the caller's own name for it; prompt: token ids; seed: 0 .. 2**64-1."""

    key: Any
    prompt: Sequence[int]
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Answer:
    """As one row of `generate`'s output. finish_reason: "stop", "length" or BROKEN."""

    job: Job
    tokens: list[int]
    finish_reason: str
    accept_lengths: list[int]


@dataclasses.dataclass
class _Row:
    """What the host knows of an answer on its way."""

    job: Job
    limit: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    accept_lengths: list[int] = dataclasses.field(default_factory=list)


class Server:
    """Answers the prompts given to `submit`, shortest first, `batch` at a time.

        server = Server(target, draft, batch=32, max_new_tokens=512, temperature=0.7)
        server.submit(Job("a", ids, seed=1))
        for answers in server.run():  # more may be submitted meanwhile
            ...

    admit: prompts that are run together into free rows; None: 1 on a CPU, an eighth of the batch on an accelerator.
    cycles: of one dispatch, after which ended answers leave.
    Further settings as in `generate`, the same for every prompt. Raises ValueError for unusable ones.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | None = None,
        *,
        batch: int = 32,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        tree: TreeChoice = None,
        eos_token_ids: Sequence[int] | None = None,
        rule: Rule = "coupled",
        coupled_draft: bool = True,
        admit: int | None = None,
        cycles: int = 8,
    ):
        on_cpu = jax.default_backend() == "cpu"
        self.admit = admit if admit is not None else 1 if on_cpu else max(1, batch // 8)
        sizes = {"batch": batch, "max_new_tokens": max_new_tokens, "admit": self.admit, "cycles": cycles}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} {value}: must be at least 1")
        request, config = prepare(
            target, draft, [[0]] * batch, max_new_tokens, temperature, top_k, top_p, 0, tree, eos_token_ids, rule, coupled_draft
        )
        # Where no tree pays, a draft that was given is not asked.
        self.draft = draft if config.tree is not None else None
        self.target, self.batch, self.max_new = target, batch, max_new_tokens
        self.cycles = np.int32(cycles)
        self.config = dataclasses.replace(config, slots=0, max_new=cycles * config.steps + 1)
        self.request = jax.tree.map(np.array, request)
        self.request = dataclasses.replace(self.request, prompts=np.zeros((batch, 0), np.int32), limits=np.zeros(batch, np.int32))
        self.rows: list[_Row | None] = [None] * batch
        self.waiting: list[tuple[int, int, Job]] = []
        self.submitted = 0
        self.tokens = 0
        """Tokens brought so far, by all rows."""
        self._kept = self._cycles = 0
        self.dead_draft = False
        """The draft gave logits that are not finite: the text is the target's, without speed-up."""
        self._state: DecodeState | None = None
        self._firsts: list[tuple[list[int], DecodeState]] = []

    def submit(self, job: Job) -> None:
        """Puts a prompt into the queue. Raises ValueError when it is empty, too long for the context, or holds an unknown id."""
        check_prompts([job.prompt], self.target.config)
        heapq.heappush(self.waiting, (len(job.prompt), self.submitted, job))
        self.submitted += 1

    @property
    def running(self) -> int:
        """Answers on their way."""
        return sum(row is not None for row in self.rows)

    @property
    def tau(self) -> float:
        """Acceptance length so far: tokens kept per cycle and row; 1.0 before the first."""
        return self._kept / self._cycles if self._cycles else 1.0

    def run(self) -> Iterator[list[Answer]]:
        """Yields after every dispatch the answers that have ended (often none), until nothing runs or waits.

        The next dispatch is on its way while the caller looks at them.
        """
        report = None
        while True:
            answers = self._collect(report) if report is not None else []
            self._refill()
            report = self._dispatch() if self.running else None
            yield answers
            if report is None and not self.waiting:
                return

    def _refill(self) -> None:
        """Gives free rows to waiting prompts, `admit` at a time; fewer only when no more wait, or nothing runs."""
        free = [b for b, row in enumerate(self.rows) if row is None]
        while free and self.waiting:
            count = min(self.admit, len(self.waiting), self.batch)
            if len(free) < count:
                return
            self._admit([heapq.heappop(self.waiting)[2] for _ in range(count)], free[:count])
            free = free[count:]

    def _admit(self, jobs: Sequence[Job], places: Sequence[int]) -> None:
        """Runs the prompts and puts them into their rows. A group smaller than `admit` is filled up with its first prompt, again."""
        context = self.target.config.max_position
        for job, b in zip(jobs, places, strict=True):
            self.rows[b] = _Row(job, min(self.max_new, context - len(job.prompt)))
            self.request.lengths[b] = len(job.prompt)
            self.request.sampling.seeds[b] = (job.seed >> 32, job.seed & 0xFFFFFFFF)
        spare = self.admit - len(jobs)
        jobs, places = [*jobs, *[jobs[0]] * spare], [*places, *[places[0]] * spare]
        state = self._reserve(max(len(job.prompt) for job in jobs))
        width = prompt_width(max(len(job.prompt) for job in jobs))
        prompts = np.zeros((self.admit, width), np.int32)
        for i, job in enumerate(jobs):
            prompts[i, : len(job.prompt)] = job.prompt
        limits = np.array([row.limit for b in places if (row := self.rows[b])], np.int32)
        request = jax.tree.map(lambda x: x[np.array(places)], self.request)
        request = dataclasses.replace(request, prompts=prompts, limits=limits)
        new, report = opened(self.target, self.draft, request, dataclasses.replace(self.config, slots=state.cache.slots))
        self._state = placed(state, new, np.array(places, np.int32))
        self._firsts.append((places[: self.admit - spare], report))

    def _reserve(self, prompt: int) -> DecodeState:
        """The state, with caches that hold such a prompt, its answer, and what a pass writes behind it. They never shrink."""
        longest = bucket(prompt, 128)
        answered = max(longest, min(longest + self.max_new, self.target.config.max_position))
        slots = -(-(answered + self.config.steps) // 64) * 64
        if self._state is None:
            config = dataclasses.replace(self.config, slots=slots)
            request = dataclasses.replace(self.request, prompts=np.zeros((self.batch, 1), np.int32))
            return idle(self.target, self.draft, request, config)
        if self._state.cache.slots < slots:
            cache, draft_cache = grown((self._state.cache, self._state.draft_cache), slots)
            return dataclasses.replace(self._state, cache=cache, draft_cache=draft_cache)
        return self._state

    def _dispatch(self) -> DecodeState:
        """Sends the next cycles on their way; what will have come out, not waited for."""
        # A row that has just been admitted has brought its first token, though the host has not seen it yet.
        admitted = {b for places, _ in self._firsts for b in places}
        for b, row in enumerate(self.rows):
            self.request.limits[b] = 0 if row is None else row.limit - len(row.tokens) - (b in admitted)
        request = jax.tree.map(np.copy, self.request)  # the program may still read it when the host writes the next one
        self._state, report = advance(self.target, self.draft, request, self.config, self._state, self.cycles)
        return report

    def _collect(self, report: DecodeState) -> list[Answer]:
        """Waits for the report, hands its tokens to their rows, and frees the rows that are done."""
        told, firsts = jax.device_get((report, [first for _, first in self._firsts]))
        admitted, self._firsts = self._firsts, []
        for (places, _), first in zip(admitted, firsts, strict=True):
            for i, b in enumerate(places):
                self._note(b, first, i)
        answers = []
        self.dead_draft |= bool(np.any(told.dead))
        for b, row in enumerate(self.rows):
            if row is None:
                continue
            self._note(b, told, b)
            if told.done[b]:
                reason = BROKEN if told.bad[b] >= 0 else "stop" if told.stopped[b] else "length"
                answers.append(Answer(row.job, row.tokens, reason, row.accept_lengths))
                self.rows[b] = None
        return answers

    def _note(self, b: int, report: DecodeState, i: int) -> None:
        row = self.rows[b]
        assert row is not None
        row.tokens += report.out[i, : report.n_out[i]].tolist()
        accepted = report.accepted[i, : report.cycles[i]].tolist()
        row.accept_lengths += accepted
        self.tokens += int(report.n_out[i])
        self._kept += sum(accepted)
        self._cycles += len(accepted)


def prompt_width(tokens: int) -> int:
    """The least of 32, 48, 64, 96, 128, 192, ... that holds so many tokens."""
    whole = bucket(tokens, 32)
    return whole * 3 // 4 if whole > 32 and tokens <= whole * 3 // 4 else whole


@partial(jax.jit, static_argnames=("config",))
def opened(target: Target, draft: Draft | None, request: Request, config: DecodeConfig) -> tuple[DecodeState, DecodeState]:
    """Program: prompts are run and every row's first token is sampled; as `advance` gives it."""
    with on_mesh_of(target):
        return split(prefill(target, draft, request, config))


def idle(target: Target, draft: Draft | None, request: Request, config: DecodeConfig) -> DecodeState:
    """Rows that have nothing to do: zeros of the shapes that `opened` would give, all done."""
    shapes, _ = jax.eval_shape(partial(opened, config=config), target, draft, request)
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return dataclasses.replace(state, done=jnp.ones_like(state.done))


@partial(jax.jit, donate_argnames=("state",))
def placed(state: DecodeState, new: DecodeState, rows_R: jax.Array) -> DecodeState:
    """Program: `state` with its rows `rows` [R] replaced, in place, by the R rows of `new`, whole: nothing of who was there before is left.

    Every array of a state has the batch as its first axis. A row named twice must be given the same twice.
    """

    def put(old: jax.Array, fresh: jax.Array) -> jax.Array:
        for r in range(fresh.shape[0]):
            old = jax.lax.dynamic_update_slice_in_dim(old, fresh[r : r + 1].astype(old.dtype), rows_R[r], axis=0)
        return old

    return jax.tree.map(put, state, new)
