"""Time spent on compiling, told apart from the time of the work itself."""

from __future__ import annotations

import time

import jax


class CompileClock:
    """Seconds that this process has spent on tracing and compiling since the clock was made, so that they can be told apart."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration_secs: float, **_: str | int) -> None:
        if not event.startswith("/jax/core/compile/"):
            return
        end = time.perf_counter()
        start = end - duration_secs
        # A step reports when it ends; those inside it have reported before.
        while self._spans and self._spans[-1][0] >= start:
            self._spans.pop()
        self._spans.append((start, end))

    @property
    def seconds(self) -> float:
        return sum(end - start for start, end in self._spans)
