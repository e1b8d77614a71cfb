"""A whole benchmark: sets of prompts at several temperatures, and what else was asked for; tables said, JSON and pictures written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from eagle3_jax.bench import figures as bench_figures
from eagle3_jax.bench import tables
from eagle3_jax.bench.benchmark import PLAIN, Benchmark, Programs, Sample, benchmark, modes_of
from eagle3_jax.bench.latency import Bursts, bursts
from eagle3_jax.bench.phases import Phases, phases
from eagle3_jax.bench.sample_journal import SampleJournal
from eagle3_jax.bench.throughput import PAPER_CHAINS, Throughput, rows_for, sweep
from eagle3_jax.drafting import Draft
from eagle3_jax.target import Target
from eagle3_jax.tree import Chain, Tree
from eagle3_jax.whole_file import write_json


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured beside every set at every temperature, and where it is written.

    trees ... seed: as in `benchmark`. bursts: prompts of each set that are stepped cycle by cycle at the first temperature; 0: none.
    batches: sizes of the throughput sweep, of the first set's prompts; empty: none. phases: where a cycle's time goes.
    out: the JSON file; a journal lies beside it until it is complete. figures: folder of the PNGs. resume: take the journal over.
    """

    temperatures: tuple[float, ...] = (0.0,)
    trees: tuple[Chain | Tree | None, ...] = (None,)
    batch: int = 1
    repeats: int = 1
    seed: int = 0
    bursts: int = 0
    batches: tuple[int, ...] = ()
    phases: bool = False
    out: Path = Path("bench.json")
    figures: Path | None = None
    resume: bool = False


def run_plan(
    plan: Plan,
    target: Target,
    draft: Draft | None,
    sets: Mapping[str, Sequence[Sequence[int]]],
    names: Mapping[str, Sequence[str]],
    arguments: Mapping[str, Any],
    options: Mapping[str, Any],
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measures, says and writes everything in the plan; returns what the JSON file holds.

    sets: token ids of the prompts by set; names: of the prompts. arguments: written into the file, and what a resumed run must share.
    options: `max_new_tokens`, `top_k`, `top_p`, `eos_token_ids`, `rule`, `coupled_draft`, as in `generate`.
    """
    if plan.figures is not None:
        bench_figures.new_figure(1, 1)  # without matplotlib, fail before any work
        plan.figures.mkdir(parents=True, exist_ok=True)
    journal = SampleJournal(plan.out.with_name(plan.out.name + ".journal"), arguments, plan.resume)
    try:
        whole = _measure(plan, target, draft, sets, names, arguments, options, journal, say)
    finally:
        journal.close()
    journal.finish()
    return whole


def _measure(
    plan: Plan,
    target: Target,
    draft: Draft | None,
    sets: Mapping[str, Sequence[Sequence[int]]],
    names: Mapping[str, Sequence[str]],
    arguments: Mapping[str, Any],
    options: Mapping[str, Any],
    journal: SampleJournal,
    say: Callable[[str], None],
) -> dict[str, Any]:
    modes = modes_of(target, draft, plan.trees, plan.batch, options.get("rule", "coupled"))
    programs = Programs(target, draft)
    whole: dict[str, Any] = {"arguments": dict(arguments), "results": []}
    found: dict[float, dict[str, Benchmark]] = {}
    for place, heat in enumerate(dict.fromkeys(plan.temperatures)):
        for name, prompts in sets.items():
            title = f"{name}, T={heat:g}"
            with _Bar(title, len(prompts) * len(modes), journal, title) as bar:
                result = benchmark(
                    target,
                    draft,
                    prompts,
                    plan.trees,
                    batch=plan.batch,
                    seed=plan.seed,
                    repeats=plan.repeats,
                    progress=bar.add,
                    programs=programs,
                    done=journal.samples.get(title, ()),
                    temperature=heat,
                    **options,
                )
            found.setdefault(heat, {})[name] = result
            gaps: dict[str, Bursts | None] = {}
            if plan.bursts and not place:
                chosen = prompts[: plan.bursts]
                for mode, tree in modes.items():
                    head = None if mode == PLAIN else draft
                    gaps[mode] = bursts(target, head, chosen, tree, temperature=heat, seed=plan.seed, **options)
            stepped = {mode: None if b is None else dataclasses.asdict(b) for mode, b in gaps.items()}
            whole["results"].append({"set": name, "prompts": list(names[name]), "bursts": stepped, **result.to_dict()})
            write_json(plan.out, whole)
            say(f"\n{name}: {len(prompts)} prompts, T = {heat:g}, batch {plan.batch}\n\n{tables.benchmark_table(result.modes)}")
            say(f"\n{tables.latency_table(result.modes, gaps)}")
        by_set = {name: one.modes for name, one in found[heat].items()}
        if len(sets) > 1:
            say(f"\nthe {len(sets)} sets and their mean, T = {heat:g}\n\n{tables.paper_table(by_set)}")
        if plan.figures is not None and draft is not None:
            bench_figures.sets_chart(by_set, plan.figures / f"sets-T{heat:g}.png", f", T = {heat:g}")
            bench_figures.n_alpha_chart(by_set, plan.figures / f"n-alpha-T{heat:g}.png", f", T = {heat:g}")
    first = next(iter(sets))
    heat = plan.temperatures[0]
    if plan.phases:
        parts = _phases(plan, target, draft, found[heat][first], modes, sets[first], options)
        whole["phases"] = [{**dataclasses.asdict(p), "rest": p.rest} for p in parts]
        say(f"\nwhere the time of a cycle goes, batch {plan.batch}\n\n{tables.phases_table(parts)}")
        if plan.figures is not None:
            bench_figures.phases_chart(parts, plan.figures / "cycle.png", f", batch {plan.batch}")
    if plan.batches:
        swept = _sweep(plan, target, draft, sets[first], {**options, "temperature": heat}, journal)
        whole["throughput"] = [dataclasses.asdict(t) for t in swept]
        say(f"\nthroughput after the first token, T = {heat:g}\n\n{tables.throughput_table(swept)}")
        if plan.figures is not None:
            bench_figures.throughput_chart(swept, plan.figures / "throughput.png", f", T = {heat:g}")
    write_json(plan.out, whole)
    return whole


def _phases(
    plan: Plan,
    target: Target,
    draft: Draft | None,
    result: Benchmark,
    modes: Mapping[str, Chain | Tree | None],
    prompts: Sequence[Sequence[int]],
    options: Mapping[str, Any],
) -> list[Phases]:
    slots = min(target.config.max_position, max(map(len, prompts)) + options["max_new_tokens"])
    cycles = {mode.mode: mode.cycle_seconds for mode in result.modes}
    part = partial(phases, target, draft, batch=plan.batch, slots=slots)
    return [part(mode, tree, seconds) for mode, tree in modes.items() if (seconds := cycles[mode])]


def _sweep(
    plan: Plan, target: Target, draft: Draft | None, prompts: Sequence[Sequence[int]], options: dict[str, Any], journal: SampleJournal
) -> list[Throughput]:
    """Every row runs to its full length, so that a batch stays as wide as it is called."""
    ways = 1 if draft is None else 1 + len(PAPER_CHAINS)
    units = {batch: f"throughput, batch {batch}" for batch in plan.batches}
    done = {batch: journal.samples.get(unit, ()) for batch, unit in units.items()}
    answers = sum(len(rows_for(prompts, batch)) for batch in plan.batches) * ways
    with _Bar("throughput", answers, journal, "") as bar:
        return sweep(
            target,
            draft,
            prompts,
            plan.batches,
            progress=lambda batch, sample: bar.add(sample, units[batch]),
            done=done,
            repeats=max(2, plan.repeats),
            seed=plan.seed,
            **{**options, "eos_token_ids": []},
        )


class _Bar:
    """A progress bar in answers, on a terminal only; what passes it is kept in the journal."""

    def __init__(self, title: str, answers: int, journal: SampleJournal, unit: str):
        self._bar = tqdm(total=answers, desc=title, unit="answer", dynamic_ncols=True, disable=None)
        self._journal, self._unit = journal, unit

    def add(self, sample: Sample, unit: str | None = None) -> None:
        self._journal.add(unit or self._unit, sample)
        self._bar.update(len(sample.prompts))
        self._bar.set_postfix_str(f"{sample.mode} tau {sample.output.tau:.2f}")

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
