"""Several processes as one run: who they are, and what only one of them does."""

from __future__ import annotations

import jax


def join_processes(coordinator: str | None = None, processes: int | None = None, process: int | None = None) -> None:
    """Joins this process to the others of the run, before anything else touches JAX; `jax.devices()` are then those of all of them.

    coordinator: HOST:PORT of process 0, the same everywhere; processes: how many; process: which one this is, from 0. All three, or none:
    then a TPU pod, SLURM, Open MPI or Kubernetes says so itself. Raises ValueError when they are incomplete or nothing says so.
    """
    given = {"--coordinator": coordinator, "--processes": processes, "--process": process}
    missing = [name for name, value in given.items() if value is None]
    if missing and len(missing) < len(given):
        raise ValueError(f"{', '.join(missing)}: missing; coordinator, number of processes and this one's number go together")
    if processes is not None and process is not None and not 0 <= process < processes:
        raise ValueError(f"--process {process}: must lie in 0..{processes - 1}")
    try:
        jax.distributed.initialize(coordinator, processes, process)
    except (ValueError, RuntimeError) as error:
        hint = "" if coordinator else "; no TPU pod, SLURM, Open MPI or Kubernetes tells them of each other here: name them"
        raise ValueError(f"the processes did not find each other: {error}{hint}") from None


def is_first() -> bool:
    """Whether this process is the one that writes files of the run and reports on it."""
    return jax.process_index() == 0


def wait_for_all(what: str) -> None:
    """Returns when every process has come here; `what` names the place and must be the same for all."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(what)
