"""Which sizes arrays come in. Every size is a shape and every shape a program, so there are few of them, known beforehand."""

from __future__ import annotations

from eagle3_jax.decoding.decode import DecodeConfig

WIDTHS = (32, 128, 512)
"""Tokens of a prompt that one program runs at once."""

SMALLEST, SLACK = 256, 128
"""Cache buckets hold a power of two from SMALLEST on, and SLACK slots more: a prompt of whole chunks and some cycles fit the same one."""

ONE_DISPATCH = WIDTHS[-1], 1024
"""Padded prompt and new tokens up to which a request is one program: beyond, its caches had better grow than be allocated at once."""


def slot_buckets(config: DecodeConfig, context: int) -> list[int]:
    """Sizes that a cache may have, the last one enough for the whole context."""
    slack = bucket(config.steps + 1, SLACK)
    sizes, size = [], SMALLEST
    while size < context:
        sizes.append(size + slack)
        size *= 2
    return [*sizes, min(size, -(-context // 64) * 64) + slack]


def chunk_widths(start: int, stop: int, room: int) -> list[int]:
    """Widths of the passes that run tokens start..stop-1 in caches of at most `room` slots. A pass is never wider than twice its tokens,
    but for the narrowest."""
    widths = []
    while start < stop:
        count = stop - start
        fitting = [width for width in WIDTHS if start + width < room]
        whole = max((width for width in fitting if width <= count), default=WIDTHS[0])
        width = next((width for width in fitting if count <= width < 2 * count), whole)
        widths.append(width)
        start += width
    return widths


def bucket(n: int, smallest: int) -> int:
    """The least power of two >= n and >= smallest: shapes come in few sizes, so that programs are few."""
    return max(smallest, 1 << max(0, n - 1).bit_length())


def window(config: DecodeConfig, cycles: int) -> int:
    """Size of the output buffer of one dispatch: room for that many cycles at full acceptance."""
    return bucket(cycles * config.steps + 1, 64)
