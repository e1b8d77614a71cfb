"""A whole training run in one call: conversations in, a head in the official dialect out."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from eagle3_jax import vocab
from eagle3_jax.config import DraftConfig
from eagle3_jax.data import Report, encode_all, load_prepared, order, read_records
from eagle3_jax.decoding.generate import generate
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.panels import in_plain
from eagle3_jax.params import initialize
from eagle3_jax.sharding import place
from eagle3_jax.target import Target
from eagle3_jax.tokenizer import load_tokenizer
from eagle3_jax.training.batches import BatchSource, TokenExamples
from eagle3_jax.training.checkpoint import CheckpointError, Checkpoints
from eagle3_jax.training.distributed import is_first, wait_for_all
from eagle3_jax.training.features import FeatureCache, Selection, identity, open_cache, select, write_cache
from eagle3_jax.training.fit import fit
from eagle3_jax.training.flops import peak_flops, step_flops
from eagle3_jax.training.placing import check_rows
from eagle3_jax.training.reporting import Reporter
from eagle3_jax.training.trainer import TrainConfig
from eagle3_jax.training.ttt import Frozen
from eagle3_jax.training.writers import JsonLines, TensorBoard, WeightsAndBiases, Writer
from eagle3_jax.tree import Chain, Tree
from eagle3_jax.tree_names import tree_name
from eagle3_jax.weights import load_draft, load_target, save_head
from eagle3_jax.weights.dialects import suited
from eagle3_jax.weights.model_card import model_card

STARTS = ("random", "target-head")
"""What a head may begin as, beside an existing head."""
CACHES = ("features", "held_out")
"""Where a run that is not online keeps what the target knows about its examples."""
DRAFT_VOCAB = 8192
"""U of a new head, where nothing else is asked for."""


@dataclasses.dataclass(frozen=True)
class TrainJob:
    """Where a run reads and writes, and what it does around the training proper.

    target: folder, hub id, .gguf file or built-in name. data: prepared data (a folder) or conversations (a file). out: folder of the run:
    `features`, `held_out`, `checkpoints`, `log.jsonl`, and `head`, the result. draft_vocab: U, None: `DRAFT_VOCAB`. taps: entering-block
    ids, None: the default; an existing head brings its own of both. max_tokens: longer examples are cut. hold_out: the last so many
    usable examples are never trained on. limit: examples read. features_from: folders of earlier runs with the same target and taps; the
    features that they have of the same examples are taken over.
    start: "random"; "target-head": output head and last norm begin as the target's kept rows and norm, all else random; or the folder, hub
    id or built-in name of an existing head, which is trained further.
    decode_every: updates between decodes of the first `decode_prompts` held-out prompts, `decode_tokens` tokens each, drafted as
    `decode_tree` says; the head of the best acceptance length is the result. 0: never. tensorboard: event files in `out`/tensorboard.
    wandb: project of Weights & Biases to report to.
    """

    target: str
    data: str
    out: str
    draft_vocab: int | None = None
    taps: tuple[int, ...] | None = None
    max_tokens: int = 640
    hold_out: int = 64
    limit: int | None = None
    features_from: tuple[str, ...] = ()
    checkpoint_every: int = 200
    evaluate_every: int = 100
    keep: int = 2
    resume: bool = False
    start: str = "random"
    decode_every: int = 0
    decode_prompts: int = 8
    decode_tokens: int = 64
    decode_tree: Chain | Tree | None = None
    tensorboard: bool = False
    wandb: str | None = None

    def __post_init__(self) -> None:
        if self.start not in STARTS and (self.draft_vocab or self.taps):
            raise ValueError(f"start {self.start}: an existing head brings its draft vocabulary and taps along; leave both unset")
        if self.decode_every and not self.hold_out:
            raise ValueError("decoding held-out prompts needs some: hold_out is 0")

    def known(self) -> list[FeatureCache]:
        """The caches of `features_from`. Raises CacheError naming a folder that has none."""
        found = []
        for run in map(Path, self.features_from):
            own = [run / name for name in CACHES if (run / name).is_dir()]
            found += [open_cache(folder, partial_ok=True) for folder in own or [run]]
        return found


def train(job: TrainJob, config: TrainConfig, mesh: Mesh | None = None) -> Path:
    """Encodes, caches the target's features, trains, exports; returns the head's folder.

    Every stage that an earlier run of the same job finished is taken over. mesh: what the steps run on; with several processes each calls
    this, and `job.out` is a folder that all of them see. Raises ValueError or OSError with a message for the user.
    """
    out = Path(job.out)
    check_rows(config.rows, mesh)
    if config.online and job.features_from:
        raise ValueError("features_from: an online run reads no features; leave one of the two out")
    if jax.process_count() > 1 and (mesh is None or job.decode_every):
        raise ValueError("a run of several processes needs a mesh over them all, and cannot decode held-out prompts (decode_every)")
    checkpoints_at = out / "checkpoints"
    if not job.resume and checkpoints_at.is_dir() and any(checkpoints_at.iterdir()):
        raise CheckpointError(f"{checkpoints_at}: holds a run already; continue it with --resume, or name another --out")
    # Where it is to be dealt out over devices, no single one may have to hold it first.
    with contextlib.nullcontext() if mesh is None else jax.default_device(jax.local_devices(backend="cpu")[0]):
        target = load_target(job.target, dtype=config.compute, layout="auto" if mesh is None else "plain")
        # float32 whatever the target's type: these are the weights that learn.
        given = None if job.start in STARTS else load_draft(job.start, target, layout="plain")
    training, held_out = select_examples(job, config)
    draft, frozen = beginning(target, training, config, start=job.start, given=given, draft_vocab=job.draft_vocab, taps=job.taps)
    draft_config, kept = draft.config, np.asarray(draft.d2t[...])
    dialect = suited(draft_config).name  # asked now: a head that no file can hold must not be trained first
    features = identity(target, draft_config.taps, training, job.max_tokens)
    known = job.known()
    alone = jax.process_count() == 1
    if alone or config.online:
        target = place(target, mesh)
    decoding = decoding_target(job, target, mesh) if job.decode_every else target
    sources: dict[str, BatchSource] = {}
    for name, chosen in zip(CACHES, (training, held_out), strict=True):
        if not chosen.examples:
            continue
        if config.online:
            tqdm.write(f"{name}: {chosen.report()}; the target runs within each step")
        elif is_first():
            cache_features(target, draft_config.taps, chosen, out / name, job.max_tokens, known)
        wait_for_all(name)
        sources[name] = batch_source(TokenExamples(chosen) if config.online else out / name, config)
        if left_out := sources[name].left_out:
            tqdm.write(f"{name}: {left_out} examples are left out, with more scored tokens than the {config.row_slots} of a row")
    about = {
        "train": dataclasses.asdict(config),
        "draft": dataclasses.asdict(draft_config),
        "start": job.start,
        "vocabulary": hashlib.sha256(kept.tobytes()).hexdigest(),
        "features": features,
    }
    out.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(checkpoints_at, about, job.keep, say=tqdm.write)
    if checkpoints.latest is not None:
        checkpoints.check(checkpoints.latest)
    reporter = Reporter(
        config.steps,
        checkpoints.latest or 0,
        writers=open_writers(job, about, checkpoints.latest or 0) if is_first() else [],
        flops=step_flops(draft_config, config, target.config if config.online else None).total,
        peak=peak_flops(config.compute),
    )
    figures: list[float] = []
    try:
        trained = fit(
            draft,
            frozen,
            sources["features"],
            config,
            target=target if config.online else None,
            reporter=reporter,
            checkpoints=checkpoints,
            checkpoint_every=job.checkpoint_every,
            held_out=sources["held_out"].once if held_out.examples else None,
            evaluate_every=job.evaluate_every,
            decode=decoder(decoding, held_out, job, figures) if job.decode_every else None,
            decode_type=decoding.dtype.name,
            decode_every=job.decode_every or config.steps,
            resume=job.resume,
            mesh=mesh,
        )
    finally:
        reporter.close()
        checkpoints.close()
    card = head_card(job, config, draft_config, len(training.examples), len(held_out.examples), figures)
    if is_first():
        save_head(trained, out / "head", overwrite=True, dialect=dialect, target_name=job.target, card=card)
    wait_for_all("head")
    return out / "head"


def head_card(job: TrainJob, config: TrainConfig, draft: DraftConfig, training: int, held_out: int, figures: Sequence[float]) -> str:
    """The card of the run's head; `figures`: acceptance lengths of the decodes of this process, of whose best the head is."""
    tree = "default tree" if job.decode_tree is None else f"`{tree_name(job.decode_tree)}`"
    prompts = f"{job.decode_prompts} held-out prompts, {job.decode_tokens} tokens each"
    return model_card(
        draft,
        suited(draft).name,
        target_name=job.target,
        data=f"{training:,} conversations of `{Path(job.data).name}`; {held_out:,} more were held out.",
        recipe=f"`{config.recipe.name}`, {config.recipe.steps} unrolled steps, decay {config.recipe.decay:g}; {config.steps:,} updates of "
        f"{config.rows * config.accumulate} rows of {config.row_tokens} tokens, {config.optimizer}, peak learning rate {config.peak_lr:g}, "
        f"seed {config.seed}, start {job.start}.",
        acceptance=[f"{max(figures):.3f} tokens per cycle, {tree}, temperature 0, {prompts}."] if figures else [],
    )


def open_writers(job: TrainJob, about: dict[str, Any], resume_at: int) -> list[Writer]:
    """The records' destinations that the job asks for, JSON lines always; those behind the step gone on from are dropped."""
    out = Path(job.out)
    writers: list[Writer] = [JsonLines(out / "log.jsonl", resume_at)]
    if job.tensorboard:
        writers.append(TensorBoard(out / "tensorboard"))
    if job.wandb is not None:
        writers.append(WeightsAndBiases(job.wandb, about, out))
    return writers


def decoding_target(job: TrainJob, target: Target, mesh: Mesh | None) -> Target:
    """The target that held-out prompts are decoded with: a CPU decodes in float32, whatever it trains in, since its passes of few tokens
    in bfloat16 take many times as long."""
    if jax.default_backend() != "cpu" or target.dtype == jnp.float32:
        return target
    return place(load_target(job.target, layout="auto" if mesh is None else "plain"), mesh)


def decoder(target: Target, held_out: Selection, job: TrainJob, figures: list[float]) -> Callable[[Eagle3Draft], float]:
    """The acceptance length of a greedy decode of the first held-out prompts: each example up to its first answer.

    Every figure is added to `figures` too.
    """
    prompts = [ids[: int(np.argmax(response > 0))].tolist() for ids, response in held_out.examples]
    prompts = [prompt for prompt in prompts if prompt][: job.decode_prompts]
    if not prompts:
        raise ValueError("no held-out example has a prompt before its answer, so none can be decoded")

    def decode(draft: Eagle3Draft) -> float:
        figures.append(generate(target, draft, prompts, job.decode_tokens, tree=job.decode_tree).tau)
        return figures[-1]

    return decode


def select_examples(job: TrainJob, config: TrainConfig) -> tuple[Selection, Selection]:
    """(training, held-out) examples: the last `hold_out` usable ones are held out, the others shuffled by the seed."""
    if os.path.isdir(job.data):
        examples: Sequence[Any] = list(load_prepared(job.data))[: job.limit]
    else:
        report = Report()
        records = tqdm(read_records(job.data), desc="encoding", unit=" conversations", disable=None)
        examples = list(encode_all(load_tokenizer(job.target), records, report))[: job.limit]
        print(report, flush=True)
    everything = select(examples, min(job.max_tokens, config.row_tokens))
    usable = everything.examples
    if not usable:
        raise ValueError(f"{job.data}: nothing to learn from, no two neighbouring tokens of one answer ({everything.report()})")
    if len(usable) <= job.hold_out:
        raise ValueError(f"{job.data}: {len(usable)} usable examples, no more than the {job.hold_out} held out")
    cut = len(usable) - job.hold_out
    shuffled = [usable[int(i)] for i in order(config.seed, 0, cut)]
    return dataclasses.replace(everything, examples=shuffled), Selection(usable[cut:], 0, 0)


def beginning(
    target: Target,
    training: Selection,
    config: TrainConfig,
    *,
    start: str,
    given: Eagle3Draft | None,
    draft_vocab: int | None = None,
    taps: tuple[int, ...] | None = None,
) -> tuple[Eagle3Draft, Frozen]:
    """The draft before the first update, and what belongs to its vocabulary.

    start, draft_vocab, taps: as in `TrainJob`. given: the head that `start` names, None where it names none.
    """
    size = target.config.vocab_size
    if given is not None:
        kept = np.asarray(given.d2t[...])
        counts = vocab.count_tokens((_Labelled(*example) for example in training.examples), size)
        print(f"draft vocabulary of {start}: {vocab.coverage(counts, kept):.2%} of the response tokens", flush=True)
        draft, frozen = given, frozen_tables(target, kept)
    else:
        kept = draft_vocabulary(training, size, draft_vocab or DRAFT_VOCAB)
        draft = fresh_draft(DraftConfig.for_target(target.config, len(kept), taps), kept, config.seed)
        frozen = frozen_tables(target, kept)
        if start == "target-head":
            start_from_target(draft, target, frozen)
    if not config.recipe.train_head:
        take_head(draft, frozen)
    return draft, frozen


def draft_vocabulary(training: Selection, vocab_size: int, size: int) -> np.ndarray:
    """int32 [U], the target ids kept: the most frequent ones of the training responses."""
    counts = vocab.count_tokens((_Labelled(*example) for example in training.examples), vocab_size)
    kept = vocab.select_vocab(counts, size)
    print(f"draft vocabulary: {size} of {vocab_size} tokens, {vocab.coverage(counts, kept):.2%} of the response tokens", flush=True)
    return kept


def cache_features(
    target: Target, taps: tuple[int, ...], chosen: Selection, folder: Path, max_tokens: int, known: Sequence[FeatureCache] = ()
) -> None:
    """`write_cache` with a bar."""
    with tqdm(total=sum(len(ids) for ids, _ in chosen.examples), desc="features", unit=" tokens", disable=None) as bar:
        write_cache(target, taps, chosen, folder, max_tokens=max_tokens, known=known, say=tqdm.write, progress=bar.update)


def batch_source(origin: Path | TokenExamples, config: TrainConfig) -> BatchSource:
    """The batches of a finished cache's folder, or of bare token ids, in this configuration's shape."""
    return BatchSource(
        lambda: origin if isinstance(origin, TokenExamples) else open_cache(origin),
        config.recipe,
        seed=config.seed,
        rows=config.rows,
        width=config.row_tokens,
        slots=config.row_slots,
        say=tqdm.write,
    )


def fresh_draft(config: DraftConfig, kept: np.ndarray, seed: int) -> Eagle3Draft:
    """A head with random float32 weights and the given vocabulary map."""
    draft = initialize(Eagle3Draft(config), jax.random.key(seed))
    draft.d2t[...] = jnp.asarray(kept, jnp.int32)
    return draft


FLATTENING = 0.2
"""Factor on the target's last norm in a draft that starts from its head. At 1, states that are still random give overconfident logits:
SmolLM2's first loss was 46.7 instead of the 22.2 that it is with this factor, and stayed behind that of random weights."""


def take_head(draft: Eagle3Draft, frozen: Frozen) -> None:
    """Gives the draft the target's kept head rows, which is what a recipe that trains no head means by it.

    Raises ValueError for a draft whose width is not the target's.
    """
    width = frozen.teacher_head.shape[0]
    if draft.config.hidden_size != width:
        raise ValueError(f"a draft that takes the target's head must be as wide as the target ({width}), found {draft.config.hidden_size}")
    draft.head[...] = jnp.array(frozen.teacher_head, draft.dtype)


def start_from_target(draft: Eagle3Draft, target: Target, frozen: Frozen) -> None:
    """Puts the target's kept head rows and last norm into the draft: with little data, rare tokens need not be learnt from nothing."""
    take_head(draft, frozen)
    draft.norm[...] = FLATTENING * jnp.array(target.norm[...], draft.dtype)


def frozen_tables(target: Target, kept: np.ndarray) -> Frozen:
    """The embedding table and the kept columns of the target's head."""
    embed = in_plain(target.embed[...])
    head = embed[kept].T if target.config.tie_embeddings else in_plain(target.head[...])[:, kept]
    return Frozen(embed, jnp.array(head))


@dataclasses.dataclass(frozen=True)
class _Labelled:
    ids: np.ndarray
    response: np.ndarray
