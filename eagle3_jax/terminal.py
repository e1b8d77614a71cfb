"""Text laid out for a terminal or a pipe: two texts beside each other, rows in columns, seconds for a person."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence


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
