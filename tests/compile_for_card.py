"""Compiles the kernels of one call for a card that need not be there, and prints what they take.

    python tests/compile_for_card.py 89 '{"D": 128, "gate": true, "dtype": "bfloat16"}'

The first argument is the compute capability, the second the keywords of make_inputs. A line per
kernel: its name and its shared memory in KiB. Nothing runs: a launch ends with the binary.
"""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "0"

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from path_backend.kernels import launch
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


def compile_call(capability, **case):
    """{kernel: KiB of shared memory} of forward and backward; the largest of all versions."""
    driver.set_active(Card(capability))
    torch.cuda.get_device_capability = lambda *_: divmod(capability, 10)
    shared, compiled = {}, JITFunction.run

    def run(self, *args, grid, warmup, **options):
        kernel = compiled(self, *args, grid=grid, warmup=True, **options)
        name = self.fn.__name__
        shared[name] = max(kernel.metadata.shared / 1024, shared.get(name, 0))

    JITFunction.run = run
    inputs = make_inputs(2000, **case).map(torch.detach)
    out, lse = launch.attention_forward(*inputs, 1.0)
    launch.attention_backward(torch.zeros_like(out), *inputs, out, lse, 1.0)
    return shared


if __name__ == "__main__":
    case = json.loads(sys.argv[2])
    case["dtype"] = getattr(torch, case["dtype"])
    for name, size in compile_call(int(sys.argv[1]), **case).items():
        print(name, size)
