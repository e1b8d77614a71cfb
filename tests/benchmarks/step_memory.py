"""Memory of the compiled training step at LLaMA-3.1-8B widths, from the program's own analysis: no weights, no data.

python tests/benchmarks/step_memory.py --tokens 4096 8192 16384
"""

from __future__ import annotations

import argparse
import time

import jax
import jax.numpy as jnp

from eagle3_jax.config import DraftConfig
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.params import fill, named_variables
from eagle3_jax.shapes import LLAMA_31_8B
from eagle3_jax.training.trainer import Fixed, TrainConfig, new_state, split, train_step
from eagle3_jax.training.ttt import Batch, Frozen, recipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384], help="lengths of the one row")
    parser.add_argument("--ttt-steps", type=int, default=7)
    parser.add_argument("--draft-vocab", type=int, default=32000)
    parser.add_argument("--remat", action="store_true", help="recompute the head's layer in the backward pass")
    args = parser.parse_args()
    draft_config = DraftConfig.for_target(LLAMA_31_8B, args.draft_vocab)
    before = None
    for T in args.tokens:
        config = TrainConfig(recipe=recipe("aligned", steps=args.ttt_steps), rows=1, row_tokens=T, row_slots=T, remat=args.remat)
        begun = time.perf_counter()
        memory = compiled(draft_config, config).memory_analysis()
        size = memory.temp_size_in_bytes
        growth = "" if before is None else f", {size / before:.2f} times the one before"
        before = size
        print(f"T {T}: {size / 2**30:.2f} GiB of temporaries{growth} (compiled in {time.perf_counter() - begun:.0f} s)", flush=True)


def compiled(draft_config: DraftConfig, config: TrainConfig) -> jax.stages.Compiled:
    """The step for one row, lowered from shapes alone."""

    def shapes() -> tuple:
        draft = Eagle3Draft(draft_config)
        values = {name: jnp.zeros(v.get_value().shape, v.get_value().dtype) for name, v in named_variables(draft)}
        params, variables = split(fill(draft, values), config.recipe)
        embed = jnp.zeros((LLAMA_31_8B.vocab_size, LLAMA_31_8B.hidden_size), jnp.bfloat16)
        frozen = Frozen(embed, jnp.zeros((LLAMA_31_8B.hidden_size, draft_config.draft_vocab_size), jnp.bfloat16))
        return new_state(params, config), Fixed(frozen, variables)

    state, fixed = jax.eval_shape(shapes)
    T, D = config.row_tokens, LLAMA_31_8B.hidden_size
    row = lambda *tail, dtype=jnp.int32: jax.ShapeDtypeStruct((1, 1, T, *tail), dtype)  # noqa: E731
    batch = Batch(
        tokens=row(),
        positions=row(),
        features=row(D * len(draft_config.taps), dtype=jnp.bfloat16),
        hidden=row(D, dtype=jnp.bfloat16),
        argmax=row(),
        response=row(),
        segments=row(),
        valid=row(dtype=jnp.bool_),
        slots=row(),
    )  # type: ignore[arg-type]
    return train_step.lower(draft_config, config, state, fixed, batch).compile()


if __name__ == "__main__":
    main()
