"""Run a function on every rank of a group of processes on this machine.

    outcomes = on_ranks(2, function, *arguments)    # function(group, *arguments) on each rank

An outcome is what the function returned, or the exception that it raised. Processes start as
those of trainer.py, and meet in a file. backend="nccl" gives each a GPU, as there.
"""

import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
from trainer import start_method, take_gpu  # a test session has one server to fork from

DEADLINE = 120.0  # seconds, of one call
TIMEOUT = 60.0  # seconds, of one collective


def on_ranks(ranks, function, *arguments, timeout=TIMEOUT, backend="gloo"):
    """The outcome of every rank. Raises AssertionError if one does not end."""
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            start_method.Process(
                target=_rank_main,
                args=(Path(folder), rank, ranks, timeout, backend, function, arguments),
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + DEADLINE
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
        assert not hanging, f"ranks {hanging} did not end"
        paths = [Path(folder, f"outcome_{rank}") for rank in range(ranks)]
        codes = [process.exitcode for process in processes]
        assert all(path.exists() for path in paths), f"a rank died, exit codes {codes}"
        return [torch.load(path, weights_only=False) for path in paths]


def _rank_main(folder, rank, ranks, timeout, backend, function, arguments):
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "nccl":
        take_gpu(rank, ranks)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout)
    )
    dist.barrier()  # a rank that is done must not leave while others still connect
    try:
        outcome = function(dist.group.WORLD, *arguments)
    except Exception as error:
        outcome = error
    torch.save(outcome, folder / f"writing_{rank}")
    (folder / f"writing_{rank}").rename(folder / f"outcome_{rank}")
    # Ranks end together, unless some failed: then the others must not wait for them.
    if not isinstance(outcome, Exception):
        dist.destroy_process_group()
