"""Milliseconds of every product of a target's pass and nothing else, by the rows that are multiplied: in panels, and as XLA has them.

    python tests/benchmarks/products.py

Both layouts in turns, the median of nine. The floor of few rows is the weights' bytes over the memory's rate; of many, the operations over
the processor's (`eagle3_jax.training.flops.measured_peak`).
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import jax.numpy as jnp

import eagle3_jax as e3
from eagle3_jax.layers import linear
from eagle3_jax.params import is_matrix, named_variables
from eagle3_jax.training.flops import measured_peak


@jax.jit
def products(weights: list, rows: jax.Array) -> jax.Array:
    """rows [M, 1] stand for inputs of every width; one product waits for the other, as in a pass."""
    for weight in weights:
        y = linear(jnp.broadcast_to(rows, (len(rows), weight.shape[0])), weight)
        rows = rows + 1e-9 * y.reshape(len(rows), -1)[:, :1]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 9, 12, 16, 60])
    args = parser.parse_args()
    weights = {}
    for layout in ("panels", "plain"):
        target = e3.load_target(args.target, layout=layout)
        found = {name: v.get_value() for name, v in named_variables(target) if is_matrix(name, v)}
        if target.config.tie_embeddings:
            found["embed"] = found["embed"].T
        weights[layout] = list(found.values())
    count = sum(weight.size for weight in weights["plain"])
    print(f"{count * 4 / 1e6:.0f} MB of weights; measured peak {measured_peak('float32', 2048, 5) / 1e9:.0f} GFLOP/s")
    for m in args.rows:
        rows, seconds = jnp.ones((m, 1)), {layout: [] for layout in weights}
        for _ in range(10):
            for layout, given in weights.items():
                begun = time.perf_counter()
                jax.block_until_ready(products(given, rows))
                seconds[layout].append(time.perf_counter() - begun)
        panels, plain = (1e3 * statistics.median(s[1:]) for s in seconds.values())
        print(f"{m:3} rows: {panels:6.1f} ms in panels, {plain:6.1f} ms plain, {2 * count * m / panels / 1e6:4.0f} GFLOP/s", flush=True)


if __name__ == "__main__":
    main()
