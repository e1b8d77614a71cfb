"""Run by `test_speculators.py` in an environment that has the `speculators` package: HEAD NUMBERS.npz SAVED.

Loads the head as that package does, runs two training-time-test steps over the numbers' features and tokens, adds the logits of both to
the file, and saves the head again with the package's own writer.
"""

from __future__ import annotations

import os
import sys

import numpy as np


def main(folder: str, numbers: str, saved: str) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel.from_pretrained(folder, config=config).eval()
    given = dict(np.load(numbers))
    logits: list[np.ndarray] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output[0].detach().float().numpy()))
    features, tokens = torch.tensor(given["features"])[None], torch.tensor(given["tokens"]).long()[None]
    with torch.no_grad():
        model(hidden_states=features, input_ids=tokens, document_ids=torch.zeros_like(tokens), ttt_steps=2)
    np.savez(numbers, **given, logits=np.stack(logits))
    model.save_pretrained(saved)


if __name__ == "__main__":
    main(*sys.argv[1:])
