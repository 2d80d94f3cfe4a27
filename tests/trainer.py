"""Start the stock trainer on n ranks of this machine and read back what it logged.

    run = train(folder, "--model.attention=path", ranks=2)
    run.loss, run.grad_norm   # one value per step, fp32, from TensorBoard

Each rank executes `torchtitan.train` as `__main__`, as torchrun makes it, in a process forked from
a server that has torch and torchtitan imported, which saves seconds per run; CUDA does not survive
a fork, so on GPUs each process is new. Ranks meet in a file. More ranks than GPUs share them.
"""

import multiprocessing
import os
import runpy
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from path_backend.benchmarks.provenance import disable_multicast

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
TINY = TESTS / "tiny.toml"
TIMEOUT = 240.0  # seconds, of one run if not said

start_method = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
# Nothing of path_backend.integration: a stock run must not meet it.
start_method.set_forkserver_preload(
    [
        "torchtitan.train",
        "torchtitan.models.llama3",
        "torchtitan.models.qwen3",
        "path_backend.layers.attention",
    ]
)


class TrainerError(AssertionError):
    """A rank failed or ran out of time; the message ends with its output."""


@dataclass(frozen=True)
class Run:
    """A finished run: what torchtitan logged, by name and step, and the output of rank 0."""

    folder: Path
    scalars: dict[str, dict[int, float]]
    output: str

    @property
    def loss(self) -> list[float]:
        return list(self.scalars["loss_metrics/global_avg_loss"].values())

    @property
    def grad_norm(self) -> list[float]:
        return list(self.scalars["grad_norm"].values())

    @property
    def tokens_seen(self) -> list[float]:
        return list(self.scalars["n_tokens_seen"].values())

    @property
    def validation_loss(self) -> list[float]:
        return list(self.scalars["validation_metrics/loss"].values())


def train(
    folder: Path,
    *overrides: str,
    ranks: int = 1,
    config: Path = TINY,
    timeout: float = TIMEOUT,
) -> Run:
    """Run the trainer with a TOML file and command line overrides; outputs go to `folder`.

    Raises TrainerError if a rank fails or runs for more than `timeout` seconds. Training again
    into the same folder resumes from its checkpoint, as torchtitan does, and the result holds the
    later run's scalars.
    """
    attempt = len(list(folder.glob("attempt_*")))
    logs = folder / f"attempt_{attempt}"
    logs.mkdir(parents=True)
    arguments = [
        f"--job.config_file={config}",
        f"--job.dump_folder={folder}",
        f"--metrics.save_tb_folder={logs.name}/tb",
        *overrides,
    ]
    processes = [
        start_method.Process(target=_rank_main, args=(rank, ranks, logs, arguments))
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            process.start()
        _wait(processes, logs, timeout)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    from path_backend.integration.data.scalars import read_scalars

    return Run(folder, read_scalars(logs / "tb"), _output(logs, 0))


def take_gpu(rank: int, ranks: int) -> int:
    """Make the rank's GPU the current one, without NVLink multicast, and return its number.

    NCCL refuses ranks that share a GPU, unless each is a host of its own; they meet over sockets.
    """
    disable_multicast()
    gpus = torch.cuda.device_count()
    if ranks > gpus:
        os.environ |= {
            "NCCL_HOSTID": str(rank),
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_IB_DISABLE": "1",
            "NCCL_MNNVL_ENABLE": "0",
        }
    torch.cuda.set_device(rank % gpus)
    return rank % gpus


def _rank_main(rank: int, ranks: int, logs: Path, arguments: list[str]) -> None:
    with open(logs / f"rank_{rank}.log", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    local_rank = take_gpu(rank, ranks) if torch.cuda.is_available() else rank
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(ranks),
    }
    import torch.distributed as dist
    import torchtitan.train  # noqa: F401
    from torchtitan.config import ConfigManager

    torch.set_num_threads(1)
    # with GPUs what torchtitan makes for CPU offload
    backend = "cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo"
    # torchtitan keeps a process group that it finds; a port could be taken by another test.
    store = dist.FileStore(str(logs / "store"), ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    time.sleep = lambda seconds: None  # the trainer's rank 0 sleeps two seconds at its end
    os.chdir(ROOT)  # paths in TOML files start here
    sys.path.insert(0, str(TESTS))  # for custom_import of what lies here
    # The default of this function is sys.argv at the time of its import, that is, of the server.
    ConfigManager.parse_args.__defaults__ = (arguments,)
    del sys.modules["torchtitan.train"]  # preloaded: runpy would warn
    runpy.run_module("torchtitan.train", run_name="__main__")


def _wait(processes: list, logs: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while any(process.is_alive() for process in processes):
        failed = [r for r, process in enumerate(processes) if process.exitcode]
        if failed or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    # A rank that failed explains more than those that wait for it.
    for rank, process in sorted(enumerate(processes), key=lambda item: item[1].exitcode is None):
        if process.exitcode != 0:
            code = process.exitcode
            reason = f"did not end in {timeout:g} s" if code is None else f"exit {code}"
            raise TrainerError(f"rank {rank}: {reason}\n{_output(logs, rank)[-6000:]}")


def _output(logs: Path, rank: int) -> str:
    path = logs / f"rank_{rank}.log"  # a rank may end before it has one
    return path.read_text(errors="replace") if path.exists() else ""
