"""Texts and figures for a terminal or a pipe: two texts beside each other, and the tables of a benchmark."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from eagle3_jax.benchmark import PLAIN, ModeResult
from eagle3_jax.evaluate import Interval


def display_width(text: str) -> int:
    """Columns that a terminal uses: wide characters take two, combining ones none."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def wrap(text: str, width: int) -> list[str]:
    """Lines of at most `width` columns; line breaks and indents kept, long words broken. Tabs become four spaces."""
    lines = []
    for paragraph in text.expandtabs(4).splitlines() or [""]:
        line, used = "", 0
        for word in _words(paragraph):
            columns = display_width(word)
            if used + columns > width and used > 0 and line.strip():
                lines.append(line.rstrip())
                line, used, word = "", 0, word.lstrip()
                columns = display_width(word)
            while columns > width:
                head = _fitting(word, width - used)
                lines.append(line + head)
                line, used, word = "", 0, word[len(head) :]
                columns = display_width(word)
            line, used = line + word, used + columns
        lines.append(line.rstrip())
    return lines


def _words(text: str) -> list[str]:
    """Pieces that end where a space begins: each word carries the spaces in front of it."""
    words, word = [], ""
    for previous, c in zip(" " + text, text, strict=False):
        if c == " " and previous != " " and word:
            words.append(word)
            word = ""
        word += c
    return [*words, word] if word else words


def _fitting(word: str, width: int) -> str:
    used = 0
    for i, c in enumerate(word):
        used += display_width(c)
        if used > width:
            return word[: max(i, 1)]
    return word


def pad(text: str, width: int) -> str:
    return text + " " * max(0, width - display_width(text))


def side_by_side(left: str, right: str, titles: tuple[str, str], width: int) -> str:
    """Two texts in columns of one table `width` wide, each under its title."""
    column = (width - 3) // 2
    a, b = wrap(left, column), wrap(right, column)
    rule = "─" * (column + 1)
    lines = [f"{pad(titles[0], column)} │ {titles[1]}", f"{rule}┼{rule}"]
    for i in range(max(len(a), len(b))):
        lines.append(f"{pad(a[i] if i < len(a) else '', column)} │ {b[i] if i < len(b) else ''}".rstrip())
    return "\n".join(lines)


def table(rows: Sequence[Sequence[str]], right: bool = True) -> str:
    """Rows in aligned columns, the first column to the left, the others to the right (or left)."""
    widths = [max(display_width(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [pad(row[0], widths[0])]
        for cell, width in zip(row[1:], widths[1:], strict=True):
            cells.append(" " * (width - display_width(cell)) + cell if right else pad(cell, width))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def duration(seconds: float | None) -> str:
    """Seconds for a person: "12 ms", "0.53 s", "14 s"."""
    if seconds is None:
        return "-"
    if seconds < 0.1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"


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


def mean_table(sets: Sequence[Sequence[ModeResult]]) -> str:
    """One line per way of decoding: plain means over the sets of acceptance length, speed-up and tokens/s."""
    rows = [["", "acceptance length", "tokens/s", "speed-up", "after 1st token"]]
    for modes in zip(*sets, strict=True):
        means = [
            [mode.acceptance_length.value for mode in modes],
            [mode.tokens_per_second.value for mode in modes],
            [mode.speed_up.value for mode in modes if mode.speed_up is not None],
            [mode.decode_speed_up.value for mode in modes if mode.decode_speed_up is not None],
        ]
        cells = [sum(values) / len(values) if len(values) == len(modes) else None for values in means]
        rows.append([modes[0].mode, figure(cells[0]), figure(cells[1], 1), figure(cells[2]), figure(cells[3])])
    return table(rows)
