"""A function over many items in several processes: results in order, few items in flight, nothing started for small sets."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

SMALL = 2000
"""Items done here before any process is started: starting one takes seconds, in which a conversation takes about a millisecond."""
CHUNK = 128

_function: Callable[[Any], Any]


def ordered_map(
    function: Callable[[Item], Result], items: Iterable[Item], processes: int = 1, *, small: int = SMALL, chunk: int = CHUNK
) -> Iterator[Result]:
    """function(item) of every item, in order. With several processes, function, items and results must be picklable.

    The processes are started afresh (not forked: a fork of a process with threads, as JAX has, can hang), each once it is needed; at
    most four chunks for each wait there. What `function` raises is raised here.
    """
    items = iter(items)
    yield from map(function, items if processes <= 1 else islice(items, small))
    first = list(islice(items, chunk))
    if not first:
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, _set_function, (function,))
    waiting: deque[Future[list[Result]]] = deque([pool.submit(_run, first)])
    try:
        while waiting:
            while len(waiting) < 4 * processes and (more := list(islice(items, chunk))):
                waiting.append(pool.submit(_run, more))
            yield from waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _set_function(function: Callable[[Any], Any]) -> None:
    global _function
    _function = function


def _run(items: list[Any]) -> list[Any]:
    return [_function(item) for item in items]
