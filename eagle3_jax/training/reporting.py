"""Training's numbers as people watch them: a bar on a terminal, lines in a log, records for the writers."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
from tqdm import tqdm

from eagle3_jax.training.trainer import Evaluation, StepMetrics
from eagle3_jax.training.writers import Writer


class Reporter:
    """Takes the metrics of finished updates. Metrics are read when the next update is already under way.

    writers: where records go besides. every: updates per log line. flops: operations of one update, and peak: those the machine could do
    in a second; with both, the share of the peak is shown.
    """

    def __init__(
        self,
        total_steps: int,
        first_step: int = 0,
        *,
        writers: Sequence[Writer] = (),
        every: int = 10,
        flops: float | None = None,
        peak: float | None = None,
    ):
        self._writers = writers
        self._every = every
        self._flops_share = flops / peak if flops and peak else None
        self._terminal = sys.stderr.isatty()
        self._bar = tqdm(total=total_steps, initial=first_step, unit="step", dynamic_ncols=True, disable=not self._terminal)
        self._total = total_steps
        self._last = time.perf_counter()
        # (number, time) of the first update shown: the time left is reckoned from there, without the compilation.
        self._first: tuple[int, float] | None = None
        self._pending: tuple[int, int, StepMetrics] | None = None

    def step(self, number: int, tokens: int, metrics: StepMetrics) -> None:
        """Update `number` (1 is the first) was dispatched with `tokens` tokens; those of the one before are read and shown."""
        previous, self._pending = self._pending, (number, tokens, metrics)
        if previous is not None:
            self._show(*previous)

    def flush(self) -> None:
        """Reads and shows the last update."""
        if self._pending is not None:
            self._show(*self._pending)
            self._pending = None

    def _show(self, number: int, tokens: int, metrics: StepMetrics) -> None:
        values = jax.device_get(metrics)
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        per_step = values.per_step
        slots = per_step.slots.clip(1)
        self._first = self._first or (number, now)
        left = (now - self._first[1]) / max(1, number - self._first[0]) * (self._total - number)
        record = {
            "step": number,
            "loss": float(values.total),
            "loss_per_step": [round(float(x), 5) for x in per_step.loss],
            "accuracy": [round(float(x), 4) for x in per_step.correct / slots],
            "survival": [round(float(x), 4) for x in per_step.survived / slots],
            "slots": int(per_step.slots[0]),
            "tokens": tokens,
            "tokens_per_second": round(tokens / max(seconds, 1e-9), 1),
            "learning_rate": float(values.learning_rate),
            "gradient_norm": float(values.gradient_norm),
        }
        if self._flops_share is not None:
            record["utilization"] = round(self._flops_share / max(seconds, 1e-9), 4)
        self.write(record)
        line = (
            f"loss {record['loss']:.3f} accuracy {' '.join(f'{x:.3f}' for x in record['accuracy'])} "
            f"survival {record['survival'][-1]:.3f} {record['tokens_per_second']:.0f} tokens/s"
        )
        if self._flops_share is not None:
            line += f" {record['utilization']:.0%} of peak"
        self._bar.set_postfix_str(line, refresh=False)
        self._bar.update(1)
        if not self._terminal and (number % self._every == 0 or number == self._total):
            more = f"lr {record['learning_rate']:.2e} gradient {record['gradient_norm']:.2e}, {_duration(left)} left"
            print(f"step {number}/{self._total} {line} {more}", flush=True)

    def evaluation(self, number: int, result: Evaluation) -> None:
        """Held-out numbers after update `number`."""
        self.write({"step": number, "held_out": result._asdict()})
        parts = (f"{name} {' '.join(f'{x:.4f}' for x in values)}" for name, values in result._asdict().items())
        self.say(f"step {number} held out: {', '.join(parts)}")

    def decoded(self, number: int, accept_length: float) -> None:
        """What the decoder accepts with the head as it is after update `number`."""
        self.write({"step": number, "decoded": {"acceptance_length": accept_length}})
        self.say(f"step {number} decoded: acceptance length {accept_length:.3f}")

    def say(self, line: str) -> None:
        """A line that does not disturb the bar."""
        tqdm.write(line) if self._terminal else print(line, flush=True)

    def write(self, record: dict[str, Any]) -> None:
        for writer in self._writers:
            writer.write(record)

    def close(self) -> None:
        self.flush()
        self._bar.close()
        for writer in self._writers:
            writer.close()


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
