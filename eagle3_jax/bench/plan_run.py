"""eagle3-bench --plan: counts acceptance on prompts, measures the machine, explains the choice and keeps it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from eagle3_jax.bench import plan_show
from eagle3_jax.bench.replay import largest_tree, replay
from eagle3_jax.decoding.auto import measured, plan_file
from eagle3_jax.decoding.generate import generate
from eagle3_jax.drafting import Draft
from eagle3_jax.layout import layout_of, why_plain
from eagle3_jax.target import Target
from eagle3_jax.tuning.plan import MARGIN, Plan
from eagle3_jax.tuning.survival import Survival


def tune(
    target: Target,
    draft: Draft,
    sets: Mapping[str, Sequence[Sequence[int]]],
    batch: int,
    options: Mapping[str, Any],
    *,
    seed: int = 0,
    title: str = "",
    plot: Path | None = None,
    say: Callable[[str], None] = print,
) -> Plan:
    """Tells `say` what every size of tree would bring at this batch size, and stores the choice for tree="auto" and None.

    sets: prompts by name to count acceptance on; none: what came with the head, or was counted before, stands. options: of `generate`.
    plot: a PNG of the tuning table.
    """
    survival = count_acceptance(target, draft, sets, batch, options, seed) if sets else None
    auto = measured(target, draft, batch, survival)
    costs, plan = auto.stored.costs, auto.plan(chains_only=options.get("rule") == "rejection")
    source = auto.survival.source if auto.counted else f"not counted for this draft, so those of a typical head: {auto.survival.source}"
    reason = why_plain(target) if layout_of(target) == "plain" else None
    say(f"weights in memory: {layout_of(target)}{f' ({reason})' if reason else ''}")
    say(f"passes at batch {costs.batch}, by tokens or nodes per row\n\n{plan_show.passes_table(costs)}\n")
    say(f"acceptance: {auto.survival.cycles} cycles; {source}\n\n{plan_show.candidates_table(plan)}\n")
    say(f"speed-up over plain decoding by size of tree\n\n{plan_show.tuning_table(plan)}\n")
    best, chosen = plan.best_tree, plan.chosen
    beaten = f" ({best.name} would run at {best.speed_up:.2f} of plain speed; a tree must promise {1 + MARGIN:.2f})"
    say(f"chosen: {chosen.name}{beaten if chosen.tree is None else ''}\nkept in {plan_file(target, draft, batch)}")
    if plot is not None:
        plan_show.save_tuning_png(plot, plan, f"{title}: predicted speed-up, batch {costs.batch}")
        say(f"drawn in {plot}")
    return plan


def count_acceptance(
    target: Target, draft: Draft, sets: Mapping[str, Sequence[Sequence[int]]], batch: int, options: Mapping[str, Any], seed: int = 0
) -> Survival:
    """The draft's acceptance on these prompts, from one run with a large tree, under a progress bar."""
    recorded = largest_tree(draft)
    rows = [row for own in sets.values() for row in own]
    outputs = []
    with tqdm(total=len(rows), desc="counting acceptance", unit="answer", dynamic_ncols=True, disable=None) as bar:
        for start in range(0, len(rows), batch):
            some = rows[start : start + batch]
            seeds = [(seed + start + i) % 2**64 for i in range(len(some))]
            outputs.append(generate(target, draft, some, seed=seeds, tree=recorded, record_trees=True, **options))
            bar.update(len(some))
    heat, most = options.get("temperature", 0.0), options.get("max_new_tokens", 256)
    return replay(outputs, recorded, f"{', '.join(sets)}: {len(rows)} prompts, T = {heat:g}, at most {most} tokens each")
