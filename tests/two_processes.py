"""One of two processes of a tiny training on a mesh over both: two_processes.py PORT PROCESS FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np

from eagle3_jax.training.checkpoint import Checkpoints
from eagle3_jax.training.distributed import is_first, join_processes, wait_for_all


def main(port: str, process: int, folder: Path) -> None:
    join_processes(f"localhost:{port}", 2, process)
    from test_mesh_training import CONFIG, run, source

    from eagle3_jax.sharding import make_mesh
    from eagle3_jax.training.batches import Cursor
    from eagle3_jax.training.placing import own_rows

    assert jax.device_count() == 4, jax.devices()
    held = own_rows(CONFIG.rows, make_mesh(2, 2, 1))
    assert held == [4 * process + i for i in range(4)]
    batches = source()
    rows, _ = next(batches.plan(Cursor()))
    assert batches.build(rows, held).tokens.shape == (4, CONFIG.row_tokens)
    checkpoints = Checkpoints(folder / "checkpoints", {})
    params, losses = run((2, 2, 1), held_out=True, checkpoints=checkpoints, checkpoint_every=5)
    checkpoints.close()
    if is_first():
        np.savez(folder / "result.npz", losses=np.asarray(losses), **params)  # pyright: ignore[reportArgumentType]
    wait_for_all("end")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
