"""Compiles the kernels of a decode step for a card that need not be there, and prints what they
take: a line per kernel, its name and its shared memory in KiB. Nothing runs.

    python tests/inference/compile_decode.py 90 '{"gate": true, "dtype": "bfloat16"}'

The first argument is the compute capability, the second the keywords of make_inputs, and "n", the
tokens of the step. With --versions: in how many versions steps of different caches compile each.
"""

import json
import os
import sys
from collections import defaultdict

os.environ["TRITON_INTERPRET"] = "0"

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from path_backend.inference import CacheSpec, PathCache
from path_backend.kernels import decode_launch
from path_backend.testing import make_inputs


class Card:
    """What the launchers and the compiler ask of a driver."""

    def __init__(self, capability: int):
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def step(n, capacity, **case):
    """One launch of everything."""
    inputs = make_inputs(n, **case).map(torch.detach)
    B, _, HQ, D = inputs.q.shape
    spec = CacheSpec(
        HQ,
        inputs.k.shape[2],
        D,
        inputs.v.shape[3],
        inputs.q.dtype,
        reflections=inputs.w is not None,
        forget_gate=inputs.log_gate is not None,
        capacity=capacity,
    )
    cache = PathCache(spec, B)
    decode_launch.step(
        cache.tensors,
        *inputs,
        0.1,
        tokens=spec.group,
        open_room=spec.open_room,
        documents=inputs.document_start is not None,
        closing=True,
        prune=spec.prune_margin,
    )


def compile_step(n=1, **case):
    """{kernel: KiB of shared memory}."""
    shared, compiled = {}, JITFunction.run

    def run(self, *args, grid, warmup, **options):
        kernel = compiled(self, *args, grid=grid, warmup=True, **options)
        shared[self.fn.__name__] = kernel.metadata.shared / 1024

    JITFunction.run = run
    step(n, 4096, **case)
    return shared


def count_versions(**case):
    """{kernel: versions} over rows, tokens of a step and capacities; nothing is compiled."""
    versions, launched = defaultdict(set), JITFunction.run
    JITFunction.run = lambda self, *args, grid, warmup, **options: launched(
        self, *args, grid=grid, warmup=True, **options
    )

    def stop(*, key, fn, **_):
        versions[fn.name].add(key)
        return True

    knobs.runtime.jit_cache_hook = stop
    for n, rows, capacity in ((1, 1, 4096), (2, 3, 4160), (3, 16, 8192)):
        step(n, capacity, **{**case, "B": rows})
    return {name: len(keys) for name, keys in versions.items()}


if __name__ == "__main__":
    capability = int(sys.argv[1])
    driver.set_active(Card(capability))
    torch.cuda.current_device = lambda: 0
    case = json.loads(sys.argv[2])
    case = {"D": 128, "H": 2, "HQ": 8, **case, "dtype": getattr(torch, case["dtype"])}
    count = count_versions if "--versions" in sys.argv else compile_step
    for name, number in count(**case).items():
        print(name, number)
