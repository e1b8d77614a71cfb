"""A benchmark that decodes plainly and speculatively in turns, in one process, with compilation apart."""

from __future__ import annotations

import dataclasses
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any

import jax
import numpy as np

from eagle3_jax.bench.evaluate import (
    Acceptance,
    Interval,
    Percentiles,
    acceptance,
    acceptance_length,
    add_acceptance,
    bootstrap,
    n_alpha_intervals,
)
from eagle3_jax.decoding.auto import resolve
from eagle3_jax.decoding.decode import DecodeConfig, Request, run
from eagle3_jax.decoding.generate import Output, execute, fits_one_program, prepare, read
from eagle3_jax.decoding.segments import CYCLES
from eagle3_jax.decoding.warmup import warm_segments
from eagle3_jax.drafting import Draft
from eagle3_jax.target import Target
from eagle3_jax.tree import Chain, Tree, TreeChoice
from eagle3_jax.tree_names import parse_tree, tree_name
from eagle3_jax.verify import Rule

PLAIN = "plain"


@dataclasses.dataclass(frozen=True)
class Sample:
    """One batch of prompts decoded one way.

    prompts: their indices. tokens, finish_reasons, accept_lengths: per row, as in `Output`.
    seconds: the whole call, once per repeat. first_token_seconds: the same program told to stop after the prefill's token.
    """

    mode: str
    prompts: list[int]
    tokens: list[list[int]]
    finish_reasons: list[str]
    accept_lengths: list[list[int]]
    seconds: list[float]
    first_token_seconds: float

    @property
    def output(self) -> Output:
        return Output(self.tokens, self.finish_reasons, self.accept_lengths)


@dataclasses.dataclass(frozen=True)
class ModeResult:
    """One way of decoding over all prompts; times in seconds, compilation in none of them but `compile_seconds`.

    tokens_per_second: of whole calls, prefill included. speed_up: that over plain decoding's; decode_speed_up: without the prefills.
    cycle_seconds: one pass of the loop, whatever it kept; cycle_cost: that in steps of plain decoding, so tau / cycle_cost is
    decode_speed_up at batch 1. n_alpha: per depth, with intervals over prompts; the paper's figure when the tree is a chain (`is_chain`).
    first_token, token: seconds to the first token and per token after it, percentiles over batches of prompts.
    memory_bytes: what the compiled program needs, weights included (the largest of its shapes); None where the backend does not say.
    same_text: rows whose tokens equal plain decoding's, of `rows`.
    """

    mode: str
    is_chain: bool
    rows: int
    tokens: int
    cycles: int
    acceptance_length: Interval
    n_alpha: list[float | None]
    n_alpha_intervals: list[Interval | None]
    per_position: list[float | None]
    seconds: float
    first_token_seconds: float
    cycle_seconds: float | None
    cycle_cost: float | None
    compile_seconds: float
    tokens_per_second: Interval
    decode_tokens_per_second: float | None
    speed_up: Interval | None
    decode_speed_up: Interval | None
    same_text: int | None
    first_token: Percentiles | None
    token: Percentiles | None
    memory_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """settings: the arguments; machine: backend, devices, versions; modes: one result each, plain first; samples: all that was measured."""

    settings: dict[str, Any]
    machine: dict[str, Any]
    modes: list[ModeResult]
    samples: list[Sample]

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists and numbers, ready for JSON."""
        return dataclasses.asdict(self)


def benchmark(
    target: Target,
    draft: Draft | None,
    prompts: Sequence[Sequence[int]],
    trees: Sequence[TreeChoice] = (None,),
    *,
    batch: int = 1,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    eos_token_ids: Sequence[int] | None = None,
    rule: Rule = "coupled",
    coupled_draft: bool = True,
    repeats: int = 1,
    confidence: float = 0.95,
    progress: Callable[[Sample], None] | None = None,
    programs: Programs | None = None,
    done: Sequence[Sample] = (),
) -> Benchmark:
    """Decodes every batch of prompts plainly and with each tree, in turns in this process, and compares.

    trees: what to draft, as `generate` takes it; a choice that turns out plain adds nothing; without a draft only plain decoding runs.
    Prompt i has the seed `seed` + i in every batch size. repeats: times each call is timed, of which the median counts.
    progress: called after each sample.
    programs: those of an earlier benchmark of this pair, so that a second set of prompts compiles nothing again.
    done: samples of an interrupted run with the same arguments, which are not measured again.
    Raises ValueError for anything unusable before any measurement.
    """
    if not prompts:
        raise ValueError("prompts: no prompt given")
    for name, value in (("batch", batch), ("repeats", repeats)):
        if value < 1:
            raise ValueError(f"{name}: {value} must be an int >= 1")
    modes = modes_of(target, draft, trees, batch, rule)
    options = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "eos_token_ids": eos_token_ids,
        "rule": rule,
        "coupled_draft": coupled_draft,
    }
    programs = programs if programs is not None else Programs(target, draft)
    before = dict(programs.compile_seconds)
    samples = list(finished(done, modes))
    ready = {tuple(sample.prompts) for sample in samples}
    for sample in measure(programs, prompts, modes, batch, seed, repeats, options, ready):
        samples.append(sample)
        if progress is not None:
            progress(sample)
    settings = {
        "modes": list(modes),
        "prompts": len(prompts),
        "batch": batch,
        "seed": seed,
        "repeats": repeats,
        "confidence": confidence,
        **options,
    }
    places = {mode: place for place, mode in enumerate(modes)}
    samples.sort(key=lambda sample: (sample.prompts, places[sample.mode]))
    spent = {mode: seconds - before.get(mode, 0.0) for mode, seconds in programs.compile_seconds.items()}
    return Benchmark(settings, machine(), summarise(samples, spent, confidence, programs.memory), samples)


def finished(samples: Sequence[Sample], modes: Iterable[str]) -> list[Sample]:
    """The samples of those batches of prompts that every mode has decoded, in the order of the modes."""
    by_prompts: dict[tuple[int, ...], dict[str, Sample]] = {}
    for sample in samples:
        by_prompts.setdefault(tuple(sample.prompts), {})[sample.mode] = sample
    return [found[mode] for found in by_prompts.values() if set(modes) <= set(found) for mode in modes]


def modes_of(
    target: Target, draft: Draft | None, trees: Sequence[TreeChoice], batch: int, rule: Rule = "coupled"
) -> dict[str, Chain | Tree | None]:
    """Ways of decoding by name: plain first, then every tree once, what was chosen in the place of "auto" and None."""
    modes: dict[str, Chain | Tree | None] = {PLAIN: None}
    if draft is not None:
        for tree in trees:
            chosen = resolve(target, draft, tree, batch, chains_only=rule == "rejection")
            modes[tree_name(chosen)] = chosen
    return modes


class Programs:
    """The decode programs of one target and draft, compiled once per shape, warmed by a short call, the time kept apart per mode."""

    def __init__(self, target: Target, draft: Draft | None):
        self.target, self.draft = target, draft
        self.compile_seconds: dict[str, float] = {}
        self.memory: dict[str, int] = {}
        self._compiled: dict[Any, Any] = {}

    def get(self, mode: str, request: Request, config: DecodeConfig, warm: bool = True) -> Callable[[Request], Any]:
        """A call that decodes a request of these shapes and waits for the result. warm: a new program makes a short call first."""
        draft = self.draft if config.tree is not None else None
        key = (config, tuple(x.shape for x in jax.tree.leaves(request)))
        fresh = key not in self._compiled
        if fresh:
            start = time.perf_counter()
            if fits_one_program(request, config):
                self._compiled[key] = run.lower(self.target, draft, request, config).compile()
            else:
                most = int(np.max(np.asarray(request.lengths) + np.asarray(request.limits)))
                warm_segments(self.target, draft, at_most(request, 0), config, CYCLES, most)
                self._compiled[key] = partial(execute, config=config)
            self.compile_seconds[mode] = self.compile_seconds.get(mode, 0.0) + time.perf_counter() - start
            needed = program_bytes(self._compiled[key]) if fits_one_program(request, config) else None
            if needed is not None:
                self.memory[mode] = max(needed, self.memory.get(mode, 0))
        compiled = self._compiled[key]

        def call(request: Request) -> Any:
            return jax.block_until_ready(compiled(self.target, draft, request))

        if fresh and warm:
            call(at_most(request, 4))  # the first call of a program also sets up threads and buffers
        return call


def program_bytes(compiled: Any) -> int | None:
    """Bytes a compiled program needs while it runs: arguments (the weights among them), results and scratch."""
    found = compiled.memory_analysis()
    if found is None:
        return None
    return found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes - found.alias_size_in_bytes


def at_most(request: Request, tokens: int) -> Request:
    """The request with no row longer than `tokens`: same shapes, so the same program."""
    return dataclasses.replace(request, limits=jax.numpy.minimum(request.limits, tokens))


def measure(
    programs: Programs,
    prompts: Sequence[Sequence[int]],
    modes: dict[str, Chain | Tree | None],
    batch: int,
    seed: int,
    repeats: int,
    options: dict[str, Any],
    ready: Set[tuple[int, ...]] = frozenset(),
) -> Iterator[Sample]:
    """One Sample per batch of prompts and mode; the batches in `ready` are passed over.

    Within a batch the modes take turns, in an order that is reversed every time, so that neither a slow drift of the machine nor the
    place in the order favours one.
    """
    units: list[tuple[list[int], dict[str, tuple[Request, DecodeConfig]]]] = []
    for start in range(0, len(prompts), batch):
        indices = list(range(start, min(start + batch, len(prompts))))
        if tuple(indices) in ready:
            continue
        rows, seeds = [prompts[i] for i in indices], [(seed + i) % 2**64 for i in indices]
        prepared = {}
        for name, tree in modes.items():
            draft = None if tree is None else programs.draft
            prepared[name] = prepare(programs.target, draft, rows, seed=seeds, tree=tree, **options)
        units.append((indices, prepared))
    turn = 0
    for indices, prepared in units:
        calls = {name: (programs.get(name, request, config), request) for name, (request, config) in prepared.items()}
        seconds: dict[str, list[float]] = {name: [] for name in modes}
        first: dict[str, list[float]] = {name: [] for name in modes}
        outputs: dict[str, Output] = {}
        for _ in range(repeats):
            for name in list(modes) if turn % 2 == 0 else list(reversed(modes)):
                call, request = calls[name]
                first[name].append(_timed(call, at_most(request, 1))[1])
                state, elapsed = _timed(call, request)
                seconds[name].append(elapsed)
                outputs[name] = read(state)
            turn += 1
        for name, output in outputs.items():
            yield Sample(
                name,
                indices,
                output.tokens,
                output.finish_reasons,
                output.accept_lengths,
                seconds[name],
                statistics.median(first[name]),
            )


def _timed(call: Callable[[Request], Any], request: Request) -> tuple[Any, float]:
    jax.block_until_ready(request)
    start = time.perf_counter()
    state = call(request)
    return state, time.perf_counter() - start


def summarise(
    samples: Sequence[Sample], compile_seconds: dict[str, float], confidence: float = 0.95, memory: Mapping[str, int] | None = None
) -> list[ModeResult]:
    """The results of every mode that occurs in `samples`, in their order; comparisons need the mode "plain" among them."""
    by_mode: dict[str, list[Sample]] = {}
    for sample in samples:
        by_mode.setdefault(sample.mode, []).append(sample)
    plain = by_mode.get(PLAIN)
    plain_cycle = _cycle_seconds(plain) if plain else None
    return [
        _summary(mode, own, plain, plain_cycle, compile_seconds.get(mode, 0.0), confidence, (memory or {}).get(mode))
        for mode, own in by_mode.items()
    ]


def _summary(
    mode: str,
    samples: list[Sample],
    plain: list[Sample] | None,
    plain_cycle: float | None,
    compile_seconds: float,
    confidence: float,
    memory_bytes: int | None,
) -> ModeResult:
    tree = None if mode == PLAIN else parse_tree(mode)
    assert tree != "auto"
    counts, intervals = Acceptance((), ()), []
    if tree is not None:
        depth = tree.tree.depth
        counts = add_acceptance([acceptance(sample.output, depth) for sample in samples])
        intervals = n_alpha_intervals([sample.output for sample in samples], depth, confidence)
    lengths = [row for sample in samples for row in sample.accept_lengths]
    times = [_times(sample) for sample in samples]
    totals = np.sum(times, axis=0)
    cycle = _cycle_seconds(samples)
    speed_up = decode_speed_up = same = None
    if mode != PLAIN and plain is not None:
        before = {tuple(sample.prompts): sample for sample in plain}
        pairs = [(_times(before[tuple(sample.prompts)]), own) for sample, own in zip(samples, times, strict=True)]
        speed_up = bootstrap([[*p, *own] for p, own in pairs], lambda s: _ratio(_rate(s[..., 4:]), _rate(s[..., :4])), confidence)
        if totals[2] > 0:
            decode_speed_up = bootstrap(
                [[*p, *own] for p, own in pairs], lambda s: _ratio(_decode_rate(s[..., 4:]), _decode_rate(s[..., :4])), confidence
            )
        same = sum(a == b for sample in samples for a, b in zip(sample.tokens, before[tuple(sample.prompts)].tokens, strict=True))
    return ModeResult(
        mode=mode,
        is_chain=tree is not None and tree_name(tree).startswith("chain"),
        rows=len(lengths),
        tokens=int(totals[0]),
        cycles=sum(map(len, lengths)),
        acceptance_length=acceptance_length([sample.output for sample in samples], confidence),
        n_alpha=counts.n_alpha,
        n_alpha_intervals=intervals,
        per_position=counts.per_position,
        seconds=float(totals[1]),
        first_token_seconds=statistics.fmean(sample.first_token_seconds for sample in samples),
        cycle_seconds=cycle,
        cycle_cost=cycle / plain_cycle if cycle and plain_cycle else None,
        compile_seconds=compile_seconds,
        tokens_per_second=bootstrap(times, _rate, confidence),
        decode_tokens_per_second=float(_decode_rate(totals)) if totals[2] > 0 else None,
        speed_up=speed_up,
        decode_speed_up=decode_speed_up,
        same_text=same,
        first_token=Percentiles.of([sample.first_token_seconds for sample in samples]),
        token=Percentiles.of([t[3] * len(sample.tokens) / t[2] for sample, t in zip(samples, times, strict=True) if t[2]]),
        memory_bytes=memory_bytes,
    )


def _times(sample: Sample) -> tuple[float, float, float, float]:
    """(tokens, seconds, tokens after the prefill's, seconds after the prefill) of one batch."""
    tokens, seconds = sum(map(len, sample.tokens)), statistics.median(sample.seconds)
    after = sum(max(0, len(row) - 1) for row in sample.tokens)
    # Noise can make the prefill alone slower than the whole call of a row that ends at once.
    return tokens, seconds, after, max(0.0, seconds - sample.first_token_seconds)


def _cycle_seconds(samples: Sequence[Sample]) -> float | None:
    """Seconds per pass of the decode loop, which runs as often as the longest row of a batch needs; None when it never ran."""
    passes = sum(max(map(len, sample.accept_lengths)) for sample in samples)
    return sum(_times(sample)[3] for sample in samples) / passes if passes else None


def _rate(sums: np.ndarray) -> np.ndarray:
    return _ratio(sums[..., 0], sums[..., 1])


def _decode_rate(sums: np.ndarray) -> np.ndarray:
    return _ratio(sums[..., 2], sums[..., 3])


def _ratio(a: Any, b: Any, empty: float = 0.0) -> np.ndarray:
    """a / b, and `empty` where b is 0."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.where(b > 0, a / np.where(b > 0, b, 1.0), empty)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    devices = jax.devices()
    return {
        "backend": jax.default_backend(),
        "device": devices[0].device_kind,
        "devices": len(devices),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }
