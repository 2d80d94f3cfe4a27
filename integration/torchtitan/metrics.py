"""Statistics of PaTH while it trains, in torchtitan's own logger (TensorBoard, W&B).

Per layer and log step, of the last micro-batch: `beta_mean`; `beta_clipped`, the share of betas
that the contraction clip lowered; `eigenvalue_min`, the smallest 1 - beta |w|^2; `gate_mean`, the
mean forget gate. Layers write them into a buffer on their device; only a log step reads it.
"""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.tools import utils

from path_backend.layers.elementwise import BETA_STATS, GATE_STATS

_STATS = (*BETA_STATS, *GATE_STATS)
_MINIMUM = _STATS.index("eigenvalue_min")


def watch(processor: MetricsProcessor, n_layers: int) -> MetricsProcessor:
    """Make `processor.log` add the statistics of the model parts that the trainer gives it."""
    stock_log = processor.log

    @functools.wraps(stock_log)
    def log(step, *args, extra_metrics=None, **kwargs):
        collected = collect(processor.model_parts, n_layers)
        stock_log(step, *args, extra_metrics={**(extra_metrics or {}), **collected}, **kwargs)

    processor.log = log
    return processor


def collect(model_parts: list[nn.Module], n_layers: int) -> dict[str, float]:
    """`path/<statistic>/layer_<i>` of every layer over all ranks; every rank must call it.

    Each rank fills the rows of the layers that it holds, so that pipeline stages, heads of tensor
    parallel ranks and batches of data parallel ranks meet in two reductions of a small table.
    """
    total = torch.zeros(2, n_layers, len(_STATS), device=utils.device_type)  # sum, count
    smallest = torch.full((n_layers,), float("inf"), device=utils.device_type)
    for part in model_parts:
        for name, block in part.layers.items():
            path = block.attention.path
            for stat, value in zip(path.stat_names, path.stats, strict=True):
                total[0, int(name), _STATS.index(stat)] = value
                total[1, int(name), _STATS.index(stat)] = 1
                if stat == "eigenvalue_min":
                    smallest[int(name)] = value
    dist.all_reduce(total)
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    mean = total[0] / total[1]
    mean[:, _MINIMUM] = smallest
    found = total[1].bool().tolist()
    return {
        f"path/{stat}/layer_{layer}": value
        for layer, values in enumerate(mean.tolist())
        for column, (stat, value) in enumerate(zip(_STATS, values, strict=True))
        if found[layer][column]
    }
