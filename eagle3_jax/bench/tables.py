"""The tables of a benchmark, and figures with their intervals as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from eagle3_jax.bench.benchmark import PLAIN, ModeResult
from eagle3_jax.bench.evaluate import Interval, Percentiles
from eagle3_jax.bench.latency import Bursts
from eagle3_jax.bench.phases import Phases
from eagle3_jax.bench.throughput import Throughput, break_even, modes_in
from eagle3_jax.terminal import duration, table


def figure(value: Interval | float | None, digits: int = 2) -> str:
    """A figure, with its interval in brackets where it has one; "-" for none."""
    if value is None:
        return "-"
    if not isinstance(value, Interval):
        return f"{value:.{digits}f}"
    interval = f" [{value.low:.{digits}f}, {value.high:.{digits}f}]" if value.low is not None else ""
    return f"{value.value:.{digits}f}{interval}"


def rates(values: Sequence[float | None]) -> str:
    return " ".join(figure(value) for value in values) or "-"


def comparison_table(plain: ModeResult, fast: ModeResult) -> str:
    """Plain and speculative decoding of the same prompts, a figure per line."""
    cost = f" = {fast.cycle_cost:.2f} plain steps" if fast.cycle_cost is not None else ""
    rows = [
        ["", PLAIN, fast.mode],
        ["tokens", str(plain.tokens), str(fast.tokens)],
        ["target passes after the prompt", str(plain.cycles), str(fast.cycles)],
        ["acceptance length (tokens per pass)", figure(plain.acceptance_length), figure(fast.acceptance_length)],
        ["drafts accepted, by position", "-", rates(fast.per_position)],
        ["tokens/s, the prompt's pass included", figure(plain.tokens_per_second, 1), figure(fast.tokens_per_second, 1)],
        ["time to the first token", duration(plain.first_token_seconds), duration(fast.first_token_seconds)],
        ["time of a cycle", duration(plain.cycle_seconds), duration(fast.cycle_seconds) + cost],
        ["compilation, not counted above", duration(plain.compile_seconds), duration(fast.compile_seconds)],
        ["speed-up", "1.00", figure(fast.speed_up)],
        ["speed-up after the first token", "1.00", figure(fast.decode_speed_up)],
    ]
    return table(rows, right=False)


def benchmark_table(modes: Sequence[ModeResult]) -> str:
    """One line per way of decoding. n-alpha stands for chains; a tree's rates per depth are in its place, in parentheses."""
    header = [
        "",
        "acceptance length",
        "tokens/s",
        "speed-up",
        "after 1st token",
        "cycle",
        "cost",
        "n-alpha 0, 1, ...",
        "same text",
        "compile",
    ]
    rows = [header]
    for mode in modes:
        rows.append(
            [
                mode.mode,
                figure(mode.acceptance_length),
                figure(mode.tokens_per_second.value, 1),
                figure(mode.speed_up),
                figure(mode.decode_speed_up.value if mode.decode_speed_up is not None else None),
                duration(mode.cycle_seconds),
                figure(mode.cycle_cost),
                rates(mode.n_alpha) if mode.is_chain or not mode.n_alpha else f"({rates(mode.n_alpha)})",
                "-" if mode.same_text is None else f"{mode.same_text}/{mode.rows}",
                duration(mode.compile_seconds),
            ]
        )
    return table(rows)


def paper_table(sets: Mapping[str, Sequence[ModeResult]]) -> str:
    """The paper's Table 1: speed-up over plain decoding and acceptance length, per set and their mean, one line per way of decoding."""
    names = [*sets, "mean"] if len(sets) > 1 else list(sets)
    rows = [["", *(cell for name in names for cell in (name, ""))], ["", *("speed-up", "tau") * len(names)]]
    for modes in zip(*sets.values(), strict=True):
        gains = [1.0 if mode.mode == PLAIN else mode.speed_up.value if mode.speed_up is not None else None for mode in modes]
        lengths: list[float | None] = [mode.acceptance_length.value for mode in modes]
        if len(sets) > 1:
            gains, lengths = [*gains, mean(gains)], [*lengths, mean(lengths)]
        cells = [cell for gain, length in zip(gains, lengths, strict=True) for cell in (f"{figure(gain)}x", figure(length))]
        rows.append([modes[0].mode, *cells])
    return table(rows)


def mean(values: Sequence[float | None]) -> float | None:
    """The plain mean, None when one is missing."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def percentiles(value: Percentiles | None) -> list[str]:
    """Three cells of seconds."""
    return [duration(x) for x in (value.p50, value.p90, value.p99)] if value is not None else ["-", "-", "-"]


def latency_table(modes: Sequence[ModeResult], bursts: Mapping[str, Bursts | None]) -> str:
    """Percentiles of the time to the first token, per token, and between bursts where those were timed; memory beside plain decoding's."""
    header = ["", "1st token p50", "p90", "p99", "per token p50", "p90", "p99"]
    if bursts:
        header += ["gap p50", "p90", "p99", "tokens a burst p50", "p90", "p99"]
    rows = [[*header, "memory", "added"]]
    plain = next((mode.memory_bytes for mode in modes if mode.mode == PLAIN), None)
    for mode in modes:
        cells = [mode.mode, *percentiles(mode.first_token), *percentiles(mode.token)]
        if bursts:
            found = bursts.get(mode.mode)
            sizes = [f"{x:.0f}" for x in (found.tokens.p50, found.tokens.p90, found.tokens.p99)] if found is not None else ["-"] * 3
            cells += [*percentiles(found.gap_seconds if found is not None else None), *sizes]
        added = None if plain is None or mode.memory_bytes is None or mode.mode == PLAIN else mode.memory_bytes - plain
        rows.append([*cells, size(mode.memory_bytes), size(added)])
    return table(rows)


def size(count: int | None) -> str:
    """Bytes for a person: "640 kB", "540 MB"."""
    if count is None:
        return "-"
    return f"{count / 1e3:.0f} kB" if abs(count) < 1e6 else f"{count / 1e6:.0f} MB" if abs(count) < 1e10 else f"{count / 1e9:.1f} GB"


def throughput_table(found: Sequence[Throughput]) -> str:
    """The paper's Tables 3 and 5: a column per batch, a line per way of decoding, and where the gain of drafting ends."""
    batches = sorted({t.batch for t in found})
    at = {(t.mode, t.batch): t for t in found}
    rows = [["batch", *map(str, batches), "gain ends at"]]
    plain = [at[PLAIN, b].tokens_per_second for b in batches]
    rows.append([f"{PLAIN}, tokens/s", *(figure(rate, 1) for rate in plain), ""])
    if len(batches) > 1 and plain[0]:
        rows.append([f"{PLAIN}, over batch {batches[0]}", *(f"{figure(rate / plain[0])}x" for rate in plain), ""])
    for mode in modes_in(found):
        ends = break_even(found, mode)
        last = f"above {batches[-1]}" if ends is None else f"below {batches[0]}" if ends == 0.0 else f"{ends:.0f}"
        rows.append([f"{mode}, tokens/s", *(figure(at[mode, b].tokens_per_second, 1) for b in batches), ""])
        rows.append([f"{mode}, speed-up", *(f"{figure(at[mode, b].speed_up)}x" for b in batches), last])
    return table(rows)


def phases_table(found: Sequence[Phases]) -> str:
    """Where a cycle's time goes, one line per way of decoding; shares of the cycle in brackets."""
    rows = [["", "cycle", "draft", "verify", "commit", "rest"]]
    for p in found:
        parts = [f"{1e3 * x:.2f} ms [{x / p.whole:.0%}]" for x in (p.draft, p.verify, p.commit, p.rest)]
        rows.append([p.mode, duration(p.whole), *parts])
    return table(rows)
