#!python
"""eagle3-train: train an EAGLE-3 head for a target on conversations, and write it in the official dialect."""

from __future__ import annotations

import argparse
import os
import sys

import jax

from eagle3_jax.attention import IMPLEMENTATIONS
from eagle3_jax.commands import Formatter, Parser, positive, run_command, tree_argument, use_compilation_cache
from eagle3_jax.config import DraftConfig
from eagle3_jax.pods.topology import topology_devices
from eagle3_jax.shapes import SHAPES, target_shape
from eagle3_jax.sharding import make_mesh, named_mesh, parse_mesh, row_shards
from eagle3_jax.training.distributed import is_first, join_processes
from eagle3_jax.training.losses import ROW_LOSSES
from eagle3_jax.training.train import DRAFT_VOCAB, STARTS, TrainJob, train
from eagle3_jax.training.trainer import COMPUTE_TYPES, OPTIMIZERS, SCHEDULES, TrainConfig
from eagle3_jax.training.ttt import RECIPES, recipe
from eagle3_jax.tree_names import SYNTAX

PROG = "eagle3-train"
EXAMPLES = """examples:
  eagle3-train --target smollm2-135m --data responses.jsonl.gz --out run --steps 1500
  eagle3-train --target smollm2-135m --data responses.jsonl.gz --out run --steps 1500 --resume
  eagle3-train --target smollm2-135m --data more.jsonl.gz --out run2 --start run/head --peak-lr 1e-3
  eagle3-train --target ./Llama-3.1-8B-Instruct --data prepared --out run --draft-vocab 32000 --row-tokens 2048 --row-slots 1536 \\
      --max-tokens 2048 --recipe official --peak-lr 5e-5 --clip 0.5
  eagle3-train --target ./Llama-3.1-8B-Instruct --data prepared --out run --online --mesh fsdp=16 --distributed
  eagle3-train --plan v5e:4x4 --target llama-3.1-8b --online --draft-vocab 32000 --row-tokens 2048 --row-slots 2048 --libtpu ./libtpu
"""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog=PROG, description=__doc__, epilog=EXAMPLES, formatter_class=Formatter)
    job, default = parser.add_argument_group("what"), TrainConfig()
    job.add_argument("--target", help="the target: folder, hub id, .gguf file, or built-in name")
    job.add_argument("--data", help="conversations (JSONL, plain or gzip; Parquet), or a folder written by eagle3-data prepare")
    job.add_argument("--out", help="folder of the run: features, checkpoints, log.jsonl, and the result in head/")
    job.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out")
    job.add_argument(
        "--draft-vocab",
        type=positive,
        help=f"tokens the head can propose, the most frequent of the answers; unset: {DRAFT_VOCAB}, or --start's",
    )
    job.add_argument(
        "--taps", type=int, nargs="+", help="target blocks whose input the head reads, counted from 0; unset: 2, middle, last but two"
    )
    job.add_argument("--max-tokens", type=positive, default=TrainJob.max_tokens, help="tokens per example; longer ones are cut")
    job.add_argument("--hold-out", type=int, default=TrainJob.hold_out, help="examples at the end of the data kept for measuring; 0: none")
    job.add_argument(
        "--start",
        metavar=f"{{{','.join(STARTS)},HEAD}}",
        default=TrainJob.start,
        help="target-head: output head and last norm begin as the target's; HEAD: train an existing head further (folder, hub id, or "
        "built-in name)",
    )
    job.add_argument("--limit", type=positive, help="examples to use; unset: all")
    job.add_argument(
        "--features-from",
        nargs="+",
        metavar="RUN",
        help="folders of earlier runs: the features that they have of the same examples, for the same target and taps, are taken over",
    )
    recipes = parser.add_argument_group("recipe")
    recipes.add_argument("--recipe", choices=sorted(RECIPES), default="aligned", help="which slots are scored, and how")
    recipes.add_argument("--ttt-steps", type=positive, help="steps the head is unrolled; unset: the recipe's")
    recipes.add_argument("--loss", choices=sorted(ROW_LOSSES), help="between the target's distribution and the head's; unset: the recipe's")
    recipes.add_argument("--decay", type=float, help="factor from one unrolled step's loss to the next; unset: the recipe's")
    how = parser.add_argument_group("optimization")
    how.add_argument("--steps", type=positive, default=default.steps, help="optimizer updates")
    how.add_argument(
        "--rows", type=positive, help=f"packed rows per micro-batch, over all devices; unset: {default.rows}, on a mesh one per data x fsdp"
    )
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
        help="type of activations and products; parameters and optimizer are float32; auto: float32 on CPUs, bfloat16 elsewhere; on a CPU "
        "that multiplies bfloat16 numbers by itself (AVX512-BF16) bfloat16 is 1.6 times as fast",
    )
    step.add_argument(
        "--attention",
        choices=IMPLEMENTATIONS,
        default=default.attention,
        help="the target's causal pass of an online step: XLA, or a library's kernel for the GPU or TPU at hand",
    )
    step.add_argument("--remat", action="store_true", help="recompute the head's layer in the backward pass: less memory, more work")
    devices = parser.add_argument_group("several devices")
    devices.add_argument(
        "--mesh",
        metavar="AXES",
        help="such as data=2,fsdp=4 (their product: all devices): data and fsdp split the rows, fsdp the parameters too, tensor the heads, "
        "feed-forward width and vocabulary; unset: one device, with --distributed data over all",
    )
    devices.add_argument("--distributed", action="store_true", help="this is one of several processes; a TPU pod and SLURM say which")
    devices.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0, where nothing else says so")
    devices.add_argument("--processes", type=positive, metavar="N", help="how many processes there are")
    devices.add_argument("--process", type=int, metavar="I", help="which one this is, from 0")
    devices.add_argument(
        "--plan",
        metavar="TOPOLOGY",
        help="instead of training, compile the step for TPUs such as v5e:4x4 or v5p:4x4x4, which need not be there, and show its memory, "
        f"products and traffic; --target is then {', '.join(SHAPES)}, or a folder with a config.json",
    )
    devices.add_argument("--libtpu", metavar="FOLDER", help="where pip install --target FOLDER libtpu put it; unset: installed beside JAX")
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
    if args.plan is not None:
        plan(args)
        return
    missing = [f"--{name}" for name in ("target", "data", "out") if getattr(args, name) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)}: needed")
    if args.distributed:
        join_processes(args.coordinator, args.processes, args.process)
        if not is_first():
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # one process reports
    if not args.no_compilation_cache:
        use_compilation_cache()
    mesh = named_mesh(parse_mesh(args.mesh)) if args.mesh else make_mesh(data=jax.device_count()) if args.distributed else None
    backend = "bfloat16" if jax.default_backend() != "cpu" else "float32"
    job = TrainJob(
        target=args.target,
        data=args.data,
        out=args.out,
        draft_vocab=args.draft_vocab,
        taps=tuple(args.taps) if args.taps else None,
        max_tokens=args.max_tokens,
        hold_out=args.hold_out,
        limit=args.limit,
        features_from=tuple(args.features_from or ()),
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
    print(f"head written to {train(job, train_config(args, row_shards(mesh), backend), mesh)}")


def plan(args: argparse.Namespace) -> None:
    """The step of these options on the topology: its memory, products and traffic."""
    from eagle3_jax.pods.tpu_plan import plan_table, training_plan, training_shape

    target = target_shape(args.target or "llama-3.1-8b")
    draft = DraftConfig.for_target(target, args.draft_vocab or DRAFT_VOCAB, tuple(args.taps) if args.taps else None)
    devices, chip = topology_devices(args.plan, args.libtpu)
    mesh = named_mesh(parse_mesh(args.mesh) if args.mesh else training_shape(len(devices)), devices)
    config = train_config(args, row_shards(mesh), "bfloat16")
    name = f"{'online' if config.online else 'offline'} step, {config.rows * config.accumulate} x {config.row_tokens} tokens, {args.plan}"
    result = training_plan(target, draft, config, mesh, chip, name)
    print(plan_table([result]))
    print(f"\ncompiled in {result.compile_seconds:.0f} s; TFLOP and collectives are of one update; bytes are those of one device's arrays")


def train_config(args: argparse.Namespace, row_parts: int, accelerated: str) -> TrainConfig:
    """The options that decide what training computes. accelerated: the compute type that "auto" means."""
    changes = {key: value for key, value in (("steps", args.ttt_steps), ("decay", args.decay), ("loss", args.loss)) if value is not None}
    return TrainConfig(
        recipe=recipe(args.recipe, **changes),
        steps=args.steps,
        rows=args.rows or (row_parts if row_parts > 1 else TrainConfig.rows),
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
        compute=accelerated if args.compute_dtype == "auto" else args.compute_dtype,
        online=args.online,
        attention=args.attention,
        remat=args.remat,
    )


if __name__ == "__main__":
    sys.exit(run_command(PROG, main, parse()))
