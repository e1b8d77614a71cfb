"""From nothing to a head that speeds up decoding: a tiny real target, text it wrote itself, a few minutes of training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from training_set import Tokens

from eagle3_jax.config import DraftConfig
from eagle3_jax.decoding.generate import generate
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.training.batches import BatchSource
from eagle3_jax.training.features import open_cache, select, write_cache
from eagle3_jax.training.fit import fit
from eagle3_jax.training.reporting import Reporter
from eagle3_jax.training.train import fresh_draft, frozen_tables
from eagle3_jax.training.trainer import TrainConfig
from eagle3_jax.training.ttt import recipe
from eagle3_jax.tree import Chain
from eagle3_jax.weights import load_target

TAPS, LENGTH, BOS = (1, 2, 4), 192, 1


@pytest.mark.slow
def test_a_head_trained_for_minutes_passes_an_acceptance_length_of_1_5(shared_data: Path, tmp_path: Path) -> None:
    target = load_target(shared_data / "stories260k")
    stories = [
        story
        for seed in range(0, 512, 64)
        for story in generate(target, None, [[BOS]] * 64, max_new_tokens=LENGTH - 1, temperature=0.8, seed=seed, eos_token_ids=[]).tokens
    ]
    examples = [Tokens(np.asarray([BOS, *s], np.int32), np.asarray([0] + [1] * len(s), np.int32)) for s in stories]
    training, held_out = examples[:-32], examples[-32:]
    write_cache(target, TAPS, select(training, LENGTH), tmp_path / "features", max_tokens=LENGTH)

    config = TrainConfig(
        recipe=recipe("aligned", steps=4), steps=400, rows=8, row_tokens=LENGTH, row_slots=LENGTH, peak_lr=4e-3, warmup=20, seed=0
    )
    kept = np.arange(target.config.vocab_size, dtype=np.int32)
    draft = fresh_draft(DraftConfig.for_target(target.config, len(kept), TAPS), kept, config.seed)
    source = BatchSource(
        lambda: open_cache(tmp_path / "features"), config.recipe, seed=0, rows=config.rows, width=config.row_tokens, slots=config.row_slots
    )
    reporter = Reporter(config.steps, every=100)
    trained = fit(draft, frozen_tables(target, kept), source, config, reporter=reporter)
    reporter.close()

    prompts = [list(map(int, example.ids[:24])) for example in held_out]

    def tau(head: Eagle3Draft) -> float:
        return generate(target, head, prompts, max_new_tokens=96, temperature=0.0, tree=Chain(4), eos_token_ids=[]).tau

    untrained, reached = tau(draft), tau(trained)
    print(f"acceptance length {untrained:.3f} untrained, {reached:.3f} trained")
    assert untrained < 1.2  # the measure itself can tell a dead head
    assert reached > 1.5
