#!python
"""eagle3-train: train an EAGLE-3 head for a target on conversations, and write it in the official dialect."""

from __future__ import annotations

import argparse
import sys

import jax

from eagle3_jax.attention import IMPLEMENTATIONS
from eagle3_jax.commands import Formatter, Parser, positive, run_command, tree_argument, use_compilation_cache
from eagle3_jax.losses import ROW_LOSSES
from eagle3_jax.train import STARTS, TrainJob, train
from eagle3_jax.trainer import COMPUTE_TYPES, OPTIMIZERS, SCHEDULES, TrainConfig
from eagle3_jax.tree_names import SYNTAX
from eagle3_jax.ttt import RECIPES, recipe

PROG = "eagle3-train"
EXAMPLES = """examples:
  eagle3-train --target smollm2-135m --data responses.jsonl.gz --out run --steps 1500
  eagle3-train --target smollm2-135m --data responses.jsonl.gz --out run --steps 1500 --resume
  eagle3-train --target ./Llama-3.1-8B-Instruct --data prepared --out run --draft-vocab 32000 --row-tokens 2048 --row-slots 1536 \\
      --max-tokens 2048 --recipe official --peak-lr 5e-5 --clip 0.5
"""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog=PROG, description=__doc__, epilog=EXAMPLES, formatter_class=Formatter)
    job, default = parser.add_argument_group("what"), TrainConfig()
    job.add_argument("--target", required=True, help="the target: folder, hub id, .gguf file, or built-in name")
    job.add_argument(
        "--data", required=True, help="conversations (JSONL, plain or gzip; Parquet), or a folder written by eagle3-data prepare"
    )
    job.add_argument("--out", required=True, help="folder of the run: features, checkpoints, log.jsonl, and the result in head/")
    job.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out")
    job.add_argument(
        "--draft-vocab", type=positive, default=TrainJob.draft_vocab, help="tokens the head can propose, the most frequent of the answers"
    )
    job.add_argument(
        "--taps", type=int, nargs="+", help="target blocks whose input the head reads, counted from 0; unset: 2, middle, last but two"
    )
    job.add_argument("--max-tokens", type=positive, default=TrainJob.max_tokens, help="tokens per example; longer ones are cut")
    job.add_argument("--hold-out", type=int, default=TrainJob.hold_out, help="examples at the end of the data kept for measuring; 0: none")
    job.add_argument(
        "--start",
        choices=STARTS,
        default=TrainJob.start,
        help="target-head: output head and last norm begin as the target's",
    )
    job.add_argument("--limit", type=positive, help="examples to use; unset: all")
    recipes = parser.add_argument_group("recipe")
    recipes.add_argument("--recipe", choices=sorted(RECIPES), default="aligned", help="which slots are scored, and how")
    recipes.add_argument("--ttt-steps", type=positive, help="steps the head is unrolled; unset: the recipe's")
    recipes.add_argument("--loss", choices=sorted(ROW_LOSSES), help="between the target's distribution and the head's; unset: the recipe's")
    recipes.add_argument("--decay", type=float, help="factor from one unrolled step's loss to the next; unset: the recipe's")
    how = parser.add_argument_group("optimization")
    how.add_argument("--steps", type=positive, default=default.steps, help="optimizer updates")
    how.add_argument("--rows", type=positive, default=default.rows, help="packed rows per micro-batch")
    how.add_argument("--row-tokens", type=positive, default=default.row_tokens, help="tokens per packed row")
    how.add_argument("--row-slots", type=positive, default=default.row_slots, help="scored tokens per packed row")
    how.add_argument("--accumulate", type=positive, default=default.accumulate, help="micro-batches per update")
    how.add_argument("--optimizer", choices=OPTIMIZERS, default=default.optimizer, help="muon: for the inner matrices, adamw for the rest")
    how.add_argument("--peak-lr", type=float, default=default.peak_lr, help="learning rate after the warm-up")
    how.add_argument("--warmup", type=int, default=default.warmup, help="updates of rising learning rate")
    how.add_argument("--lr-decay", type=int, help="updates at the end over which the rate falls; unset: all after the warm-up")
    how.add_argument("--schedule", choices=SCHEDULES, default=default.schedule, help="how the rate falls: along a half cosine or a line")
    how.add_argument("--floor", type=float, default=default.floor, help="learning rate at the end, as a share of the peak")
    how.add_argument("--clip", type=float, default=default.clip, help="largest global norm of the gradient")
    how.add_argument("--weight-decay", type=float, default=default.weight_decay, help="AdamW weight decay")
    how.add_argument("--seed", type=int, default=default.seed, help="of the initial weights and of the order of examples")
    step = parser.add_argument_group("how a step is computed")
    step.add_argument(
        "--online",
        action="store_true",
        help="run the target within each step, from token ids; unset: its features are computed once and kept on disk",
    )
    step.add_argument(
        "--compute-dtype",
        choices=("auto", *COMPUTE_TYPES),
        default="auto",
        help="type of activations and products; parameters and optimizer are float32; auto: float32 on CPUs, bfloat16 elsewhere",
    )
    step.add_argument(
        "--attention",
        choices=IMPLEMENTATIONS,
        default=default.attention,
        help="the target's causal pass of an online step: XLA, or a library's kernel for the GPU or TPU at hand",
    )
    step.add_argument("--remat", action="store_true", help="recompute the head's layer in the backward pass: less memory, more work")
    watch = parser.add_argument_group("checkpoints and measuring")
    watch.add_argument("--checkpoint-every", type=positive, default=TrainJob.checkpoint_every, help="updates between checkpoints")
    watch.add_argument(
        "--evaluate-every", type=positive, default=TrainJob.evaluate_every, help="updates between measurements on the held-out examples"
    )
    watch.add_argument("--keep", type=positive, default=TrainJob.keep, help="newest checkpoints to keep, besides the best")
    watch.add_argument(
        "--decode-every",
        type=int,
        default=TrainJob.decode_every,
        help="updates between decodes of held-out prompts; the head of the best acceptance length is the result; 0: never",
    )
    watch.add_argument("--decode-prompts", type=positive, default=TrainJob.decode_prompts, help="held-out prompts to decode")
    watch.add_argument("--decode-tokens", type=positive, default=TrainJob.decode_tokens, help="tokens to decode for each")
    watch.add_argument("--decode-tree", type=tree_argument, help=f"what is drafted then: {SYNTAX}; unset: a size that suits the backend")
    watch.add_argument("--tensorboard", action="store_true", help="write event files to tensorboard/ in --out")
    watch.add_argument("--wandb", metavar="PROJECT", help="report to this project of Weights & Biases")
    watch.add_argument(
        "--no-compilation-cache", action="store_true", help="compile anew instead of keeping programs in the user's cache folder"
    )
    watch.add_argument("--traceback", action="store_true", help="show where in the code an error arose")
    return parser.parse_args(argv)


def main(args: argparse.Namespace) -> None:
    if not args.no_compilation_cache:
        use_compilation_cache()
    changes = {key: value for key, value in (("steps", args.ttt_steps), ("decay", args.decay), ("loss", args.loss)) if value is not None}
    job = TrainJob(
        target=args.target,
        data=args.data,
        out=args.out,
        draft_vocab=args.draft_vocab,
        taps=tuple(args.taps) if args.taps else None,
        max_tokens=args.max_tokens,
        hold_out=args.hold_out,
        limit=args.limit,
        checkpoint_every=args.checkpoint_every,
        evaluate_every=args.evaluate_every,
        keep=args.keep,
        resume=args.resume,
        start=args.start,
        decode_every=args.decode_every,
        decode_prompts=args.decode_prompts,
        decode_tokens=args.decode_tokens,
        decode_tree=args.decode_tree,
        tensorboard=args.tensorboard,
        wandb=args.wandb,
    )
    compute = args.compute_dtype
    if compute == "auto":
        compute = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    config = TrainConfig(
        recipe=recipe(args.recipe, **changes),
        steps=args.steps,
        rows=args.rows,
        row_tokens=args.row_tokens,
        row_slots=args.row_slots,
        accumulate=args.accumulate,
        optimizer=args.optimizer,
        peak_lr=args.peak_lr,
        warmup=args.warmup,
        decay=args.lr_decay,
        floor=args.floor,
        clip=args.clip,
        weight_decay=args.weight_decay,
        seed=args.seed,
        schedule=args.schedule,
        compute=compute,
        online=args.online,
        attention=args.attention,
        remat=args.remat,
    )
    print(f"head written to {train(job, config)}")


if __name__ == "__main__":
    sys.exit(run_command(PROG, main, parse()))
