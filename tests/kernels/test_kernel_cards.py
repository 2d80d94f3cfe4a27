"""Kernels compiled for a card that is not there: nothing runs, but they must fit.

They are tuned for 227 KiB of shared memory; the smallest cards (sm_86, 89, 120) have 99.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from path_backend.kernels import backend
from path_backend.testing import make_inputs

pytest.importorskip("triton")

from path_backend.kernels import config  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]

FOR_CARD = dict(D=128, H=1, gate=True, documents=True, dtype="bfloat16")


def numbers_for_card(capability, *options, tmp_path, **case):
    """{kernel: number} as tests/compile_for_card.py prints them."""
    done = subprocess.run(
        [sys.executable, "tests/compile_for_card.py", capability, json.dumps(case), *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    numbers = {name: float(number) for name, number in map(str.split, done.stdout.splitlines())}
    assert len(numbers) >= 4
    return numbers


@pytest.mark.parametrize(
    "case",
    [dict(), dict(w=None), dict(w=None, D=256), dict(w=None, dtype="float32")],
    ids=["path_fox", "fox", "fox-256", "fox-fp32"],
)
def test_kernels_fit_the_shared_memory_of_smaller_cards(case, tmp_path):
    """Catches a launch that a card refuses, and instructions that only Hopper has."""
    sizes = numbers_for_card("89", tmp_path=tmp_path, **{**FOR_CARD, **case})
    assert not {name: size for name, size in sizes.items() if size > 99}


def test_older_cards_take_the_torch_form(monkeypatch):
    """Catches kernels that ptxas refuses: they use instructions of capability 8.0."""
    inputs = make_inputs(3, dtype=torch.float16)
    assert backend.unsupported_reason(inputs) is None
    monkeypatch.setattr(config, "capability", lambda: (7, 5))
    assert "capability 8.0" in backend.unsupported_reason(inputs)


@pytest.mark.parametrize("capability", ["80", "90"])
def test_groups_of_heads_and_lengths_share_their_kernels(capability, tmp_path):
    """Catches a kernel compiled anew because the first number of a head lies at another address, or
    because a length, or a stride that depends on it, is a multiple of 16.
    """
    case = {**FOR_CARD, "B": 2, "HQ": 6, "H": 3}
    versions = numbers_for_card(capability, "--versions", tmp_path=tmp_path, **case)
    assert len(versions) == 14
    assert not {name: number for name, number in versions.items() if number > 1}
