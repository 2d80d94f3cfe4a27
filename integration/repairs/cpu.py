"""Not reported: torchtitan does not run on a machine without an accelerator.

torchtitan asks one module (torch.cuda and its like) for its device. Without an accelerator it gets
torch.cuda, which fails at the first call; here a stand-in answers for the CPU. Nothing happens if
an accelerator is there.

Applies: torchtitan 0.2.2, machines without an accelerator (CPU tensors, gloo collectives).

Delete: when the required torchtitan starts on a CPU by itself, this file and
`cpu.activate_without_accelerator` in job_config.py. tests/integration/test_train.py passes without
it on such a machine then.
"""

import atexit
import functools
import importlib
import os
import platform
import resource
import sys
import time
import types

import torch
from torch._utils import _get_available_device_type
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torchtitan.config import JobConfig
from torchtitan.distributed import utils as distributed
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

# Modules that copied `device_type` and `device_module` from torchtitan.tools.utils on import.
_COPIES = (
    "torchtitan.components.metrics",
    "torchtitan.distributed.utils",
    "torchtitan.distributed.parallel_dims",
    "torchtitan.tools.profiling",
)


class CpuDevice:
    """The part of torch.cuda's interface that torchtitan uses, for the CPU."""

    def __getattr__(self, name: str):
        return getattr(torch.cpu, name)

    def set_device(self, device) -> None:
        pass

    def current_device(self) -> int:
        return 0  # a barrier takes it as a device index

    def get_device_name(self, device=None) -> str:
        return platform.processor() or platform.machine()

    def get_device_properties(self, device=None) -> types.SimpleNamespace:
        pages, page_size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        return types.SimpleNamespace(total_memory=pages * page_size)

    def memory_stats(self, device=None) -> dict[str, int]:
        unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak}

    def reset_peak_memory_stats(self, device=None) -> None:
        pass

    def empty_cache(self) -> None:
        pass


def activate_without_accelerator() -> None:
    """Put `CpuDevice` where torchtitan looks its device up, unless there is an accelerator."""
    if _get_available_device_type() is not None or utils.device_type == "cpu":
        return
    device = CpuDevice()
    for name in ("torchtitan.tools.utils", *_COPIES):
        module = importlib.import_module(name)
        for attribute, value in (("device_type", "cpu"), ("device_module", device)):
            if hasattr(module, attribute):
                setattr(module, attribute, value)
    FSDPModule.set_gradient_divide_factor = _without_premultiplied_sum(
        FSDPModule.set_gradient_divide_factor
    )
    distributed.init_distributed = _without_second_backend(distributed.init_distributed)
    # Memory is pinned for an accelerator; without one PyTorch refuses to.
    CPUOffloadPolicy.__init__.__defaults__ = (False,)
    # A gloo thread drops the tensors of its last collective under the GIL. If the interpreter is
    # gone by then, the process aborts (one run in fifteen on a busy machine): let it go first.
    atexit.register(time.sleep, 0.5)


def use_native_precision(job_config: JobConfig) -> None:
    """Trains in fp32 where the job asks for bf16 and the CPU only emulates it, and says so.

    Emulated products are some 50 times slower than those of fp32.
    """
    training = job_config.training
    if utils.device_type != "cpu" or training.mixed_precision_param != "bfloat16":
        return
    if not multiplies_bfloat16():
        training.mixed_precision_param = "float32"
        logger.warning(
            'training.mixed_precision_param is "float32" here: this CPU emulates bfloat16'
        )


def multiplies_bfloat16() -> bool:
    """Whether the CPU has instructions for products of bfloat16, as far as torch knows."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return True
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def _without_second_backend(init_distributed):
    """CPU offload adds a gloo backend for the CPU to the accelerator's: here gloo is the first."""

    @functools.wraps(init_distributed)
    def init(comm_config, enable_cpu_backend=False, **options) -> int:
        return init_distributed(comm_config, enable_cpu_backend=False, **options)

    return init


def _without_premultiplied_sum(set_gradient_divide_factor):
    """gloo has no PREMUL_SUM, which FSDP2 would use for a custom factor."""

    @functools.wraps(set_gradient_divide_factor)
    def set_factor(module, factor: float) -> None:
        module.set_force_sum_reduction_for_comms(True)
        set_gradient_divide_factor(module, factor)

    return set_factor
