"""Where a measurement comes from: day, command, card, versions, commit."""

from __future__ import annotations

import datetime
import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch


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


def preamble(module: str) -> Iterator[str]:
    """What stands above the results of `python -m <module>`."""
    yield datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    yield f"command: python -m {module} {' '.join(sys.argv[1:])}"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none with CUDA"
    yield f"device: {device}"
    versions = [f"torch {torch.__version__}, CUDA {torch.version.cuda}"]
    versions += [f"{package} {version(package)}" for package in ("triton", "fla-core")]
    yield ", ".join([*versions, f"Python {sys.version.split()[0]}"])
    yield f"commit: {commit()}"
