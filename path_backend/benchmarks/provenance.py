"""The origin of a measurement: day, command, cards, versions, commit, NVLink multicast."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


def disable_multicast() -> None:
    """NVLink multicast off in what this process starts, where its environment does not say."""
    for name, value in NO_MULTICAST.items():
        os.environ.setdefault(name, value)


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def commit() -> str:
    """The checkout's commit, "+" if files differ from it; "unknown" outside of one."""
    path = Path(__file__).resolve()
    git = ["git", "-C", str(path.parent)]
    try:
        # An installed copy may lie in someone else's checkout.
        ours = subprocess.run([*git, "ls-files", "--error-unmatch", path.name], capture_output=True)
        name = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        )
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True)
    except OSError:
        return "unknown"
    if ours.returncode or name.returncode:
        return "unknown"
    return name.stdout.strip() + ("+" if changed.stdout else "")


def preamble(program: str) -> Iterator[str]:
    """Yields the lines above the results of a module, or of a script by its path."""
    yield datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    program = program if program.endswith(".py") else f"-m {program}"
    yield f"command: python {program} {shlex.join(sys.argv[1:])}"
    gpus = torch.cuda.device_count()
    yield f"device: {f'{gpus} x {torch.cuda.get_device_name()}' if gpus else 'none with CUDA'}"
    versions = [f"torch {torch.__version__}, CUDA {torch.version.cuda}"]
    versions += [f"{package} {version(package)}" for package in ("triton", "fla-core")]
    yield ", ".join([*versions, f"Python {sys.version.split()[0]}"])
    yield f"commit: {commit()}"
    if settings := [f"{x}={os.environ[x]}" for x in NO_MULTICAST if x in os.environ]:
        yield f"environment: {' '.join(settings)}"
