"""Compiles the kernels of one call for a card that need not be there, and prints what they take.

    python tests/compile_for_card.py 89 '{"D": 128, "gate": true, "dtype": "bfloat16"}'

The first argument is the compute capability, the second the keywords of make_inputs. A line per
kernel: its name and its shared memory in KiB. Nothing runs: a launch ends with the binary. With
--versions, its name and in how many versions calls in groups of one head compile it; nothing is
compiled.
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

from path_backend.kernels import backend, config
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


def call(capability, T, **case):
    driver.set_active(Card(capability))
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda *_: divmod(capability, 10)
    inputs = make_inputs(T, **case).map_floating(torch.detach)
    out, lse = backend.attention_forward(*inputs, 1.0)
    backend.attention_backward(torch.zeros_like(out), *inputs, out, lse, 1.0)


def compile_call(capability, **case):
    """{kernel: KiB of shared memory} of forward and backward; the largest of all versions."""
    shared, compiled = {}, JITFunction.run

    def run(self, *args, grid, warmup, **options):
        kernel = compiled(self, *args, grid=grid, warmup=True, **options)
        name = self.fn.__name__
        shared[name] = max(kernel.metadata.shared / 1024, shared.get(name, 0))

    JITFunction.run = run
    call(capability, 2000, **case)
    return shared


def count_versions(capability, **case):
    """{kernel: versions} over lengths and groups of one head, at any alignment."""
    versions, launched = defaultdict(set), JITFunction.run
    JITFunction.run = lambda self, *args, grid, warmup, **options: launched(
        self, *args, grid=grid, warmup=True, **options
    )

    def stop(*, key, fn, **_):
        versions[fn.name].add(key)
        return True

    knobs.runtime.jit_cache_hook = stop
    config.SCRATCH_BYTES = 1
    for T in (300, 301, 320):
        call(capability, T, **case)
    return {name: len(keys) for name, keys in versions.items()}


if __name__ == "__main__":
    case = json.loads(sys.argv[2])
    case["dtype"] = getattr(torch, case["dtype"])
    count = count_versions if "--versions" in sys.argv else compile_call
    for name, number in count(int(sys.argv[1]), **case).items():
        print(name, number)
