"""Compiles the kernels of one call for a card that need not be there, and says what they take.

    python tests/compile_for_card.py 89 '{"D": 128, "gate": true, "dtype": "bfloat16"}'
    python tests/compile_for_card.py 90 --ptx build/ptx
    python tests/compile_for_card.py --compare build/ptx ../other-checkout/build/ptx

The first argument is the compute capability, the second the keywords of make_inputs. A line per
kernel: its name and its shared memory in KiB. Nothing runs: a launch ends with the binary.

--versions: a kernel's name and in how many versions calls in groups of one head compile it.
--ptx FOLDER: writes what every kernel compiles to, for the given call or for all of CASES, without
names and line numbers; of the whole operator, of a segment, and of a pair of segments.
--compare: two such folders, launch by launch. Exit status 1 if any kernel differs.
"""

import argparse
import json
import os
import re
import sys
from collections import defaultdict
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"
os.environ["TRITON_DISABLE_LINE_INFO"] = "1"

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from path_backend.arguments import CrossSegment, SegmentEnds
from path_backend.kernels import backend, config
from path_backend.testing import make_inputs

SCALE = 1.0

# Widths, dtypes, groups of heads, gate and documents in turn, with and without reflections.
CASES = [
    dict(zip(("D", "dtype", "HQ", "H", "gate", "documents"), values, strict=True)) | path
    for path, values in [
        ({}, (64, "bfloat16", 2, 2, False, False)),
        ({}, (64, "bfloat16", 4, 2, True, True)),
        ({}, (128, "bfloat16", 4, 2, False, False)),
        ({}, (128, "bfloat16", 2, 2, True, False)),
        ({}, (128, "bfloat16", 4, 2, True, True)),
        ({}, (128, "float16", 2, 2, True, True)),
        ({}, (64, "float16", 4, 2, False, True)),
        ({}, (64, "float32", 4, 2, True, False)),
        ({}, (128, "float32", 2, 2, False, True)),
        ({"w": None}, (64, "bfloat16", 4, 2, True, True)),
        ({"w": None}, (128, "bfloat16", 4, 2, False, False)),
        ({"w": None}, (128, "bfloat16", 2, 2, True, False)),
        ({"w": None}, (64, "float16", 2, 2, False, True)),
        ({"w": None}, (128, "float32", 4, 2, True, True)),
    ]
]


class Card:
    """A driver, as far as the launchers and the compiler ask for one."""

    def __init__(self, capability: int):
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def use_card(capability):
    driver.set_active(Card(capability))
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda *_: divmod(capability, 10)


def detached_inputs(T, dtype, **case):
    return make_inputs(T, dtype=getattr(torch, dtype), **case).map_floating(torch.detach)


def call(inputs):
    """Forward and backward of the operator."""
    out, lse = backend.attention_forward(inputs, SCALE)
    backend.attention_backward(torch.zeros_like(out), inputs, out, lse, SCALE)


def call_segment(inputs):
    """Forward and backward of a segment; the products' gradients are summed in parts."""
    config.PRODUCT_ROWS, rows = 64, config.PRODUCT_ROWS
    out, lse, ends = backend.segment_forward(inputs, SCALE)
    d_ends = SegmentEnds(*(None if x is None else x.float() for x in ends))
    out = out.to(inputs.q.dtype)
    backend.segment_backward(torch.zeros_like(out), inputs, out, lse, SCALE, d_ends)
    config.PRODUCT_ROWS = rows


def call_pair(inputs):
    """Forward and backward of the inputs' queries on their keys, as of two segments."""
    gate = None if inputs.log_gate is None else inputs.log_gate.mT
    pair = CrossSegment(inputs.q, inputs.k, inputs.v, gate, gate, inputs.document_start)
    out = torch.zeros(*inputs.q.shape[:3], inputs.v.shape[3])
    lse = out.new_full(out.shape[:3], float("-inf")).mT.contiguous()
    backend.cross_segment_forward(pair, SCALE, out, lse)
    d_out = torch.zeros_like(out, dtype=inputs.q.dtype)
    backend.cross_segment_backward(d_out, pair, lse, lse, SCALE)


def compile_only(seen):
    """From here on a launch ends with seen(kernel's name, its binary)."""
    compiled = JITFunction.run

    def run(self, *args, grid, warmup, **options):
        seen(self.fn.__name__, compiled(self, *args, grid=grid, warmup=True, **options))

    JITFunction.run = run


def shared_memory(case):
    """{kernel: KiB of shared memory} of forward and backward; the largest of all versions."""
    sizes = defaultdict(float)

    def seen(name, binary):
        sizes[name] = max(binary.metadata.shared / 1024, sizes[name])

    compile_only(seen)
    call(detached_inputs(2000, **case))
    return sizes


def count_versions(case):
    """{kernel: versions} over lengths and groups of one head, at any alignment."""
    versions = defaultdict(set)
    compile_only(lambda name, binary: None)

    def stop(*, key, fn, **_):
        versions[fn.name].add(key)
        return True

    knobs.runtime.jit_cache_hook = stop
    config.SCRATCH_BYTES = 1
    for T in (300, 301, 320):
        call(detached_inputs(T, **case))
    return {name: len(keys) for name, keys in versions.items()}


def body(ptx):
    """The instructions of a kernel, without comments, with parameters numbered as they are used.

    A parameter that nothing reads makes no difference.
    """
    lines = [line.split("//")[0].rstrip() for line in ptx.splitlines()]
    name = re.search(r"\.entry (\w+)\(", ptx)[1]
    start = next(i for i, line in enumerate(lines) if line == "{")
    limits = [line for line in lines[:start] if line.startswith((".maxn", ".reqn", ".minn"))]
    text = "\n".join(line for line in [*limits, *lines[start:]] if line)
    numbers = {}
    text = re.sub(
        rf"\b{name}_param_(\d+)\b",
        lambda match: f"param_{numbers.setdefault(match[1], len(numbers))}",
        text,
    )
    return text.replace(name, "kernel") + "\n"


def write_ptx(capability, cases, folder):
    """Files FOLDER/capability/case/call/NN-kernel.ptx, numbered in the order of the launches."""
    CUDABackend.make_cubin = lambda *_: b""  # ptxas takes most of the time and is not needed
    launched = []
    compile_only(lambda name, binary: launched.append((name, body(binary.asm["ptx"]))))
    for case in cases:
        words = ",".join(f"{name}={value}" for name, value in case.items())
        for what in (call, call_segment, call_pair):
            at = folder / str(capability) / words / what.__name__
            at.mkdir(parents=True)
            launched.clear()
            what(detached_inputs(2000, **case))
            for i, (name, text) in enumerate(launched):
                (at / f"{i:02}-{name}.ptx").write_text(text)


def compare(a, b):
    """Prints how many launches of the two folders compile to the same instructions, and which do
    not. Returns whether all do.
    """
    same, different = 0, []
    calls = {x.relative_to(root) for root in (a, b) for x in root.glob("*/*/*")}
    for at in sorted(calls):
        files = [sorted((root / at).glob("*.ptx")) for root in (a, b)]
        if len(files[0]) != len(files[1]) or not files[0]:
            different.append(f"{at}: {len(files[0])} and {len(files[1])} launches")
            continue
        for x, y in zip(*files, strict=True):
            if x.read_text() == y.read_text():
                same += 1
            else:
                different.append(f"{at}: {x.name} and {y.name}")
    print(f"{same} launches are the same, {len(different)} differ", *different, sep="\n")
    return same > 0 and not different


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("capability", nargs="?", type=int)
    parser.add_argument("case", nargs="?", type=json.loads, help="keywords of make_inputs")
    parser.add_argument("--versions", action="store_true")
    parser.add_argument("--ptx", type=Path, metavar="FOLDER")
    parser.add_argument("--compare", type=Path, nargs=2, metavar="FOLDER")
    args = parser.parse_args()
    if args.compare:
        sys.exit(not compare(*args.compare))
    use_card(args.capability)
    if args.ptx:
        write_ptx(args.capability, [args.case] if args.case else CASES, args.ptx)
    else:
        count = count_versions if args.versions else shared_memory
        for name, number in count(args.case).items():
            print(name, number)


if __name__ == "__main__":
    main()
