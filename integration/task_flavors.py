"""Flavors of llama3 for the tasks: `task_<layers>x<width>`, 1 to 8 layers, width 64, 128 or 256.

Two heads, a SwiGLU of four times the width, all weights N(0, 0.02): the models on which the paper
of PaTH compares attentions (`task_1x64` for flip_flop, `task_2x256` for mqrar). The vocabulary is
the dataset's.
"""

from dataclasses import replace

from torchtitan.models.llama3 import TransformerModelArgs

from path_backend.integration.model import PathArgs, args_with_attention

LAYERS = range(1, 9)
WIDTHS = (64, 128, 256)
WEIGHT_STD = 0.02


def task_flavors() -> dict[str, PathArgs]:
    """Arguments of every flavor by its name."""
    return {f"task_{layers}x{width}": _args(layers, width) for layers in LAYERS for width in WIDTHS}


def _args(layers: int, width: int) -> PathArgs:
    stock = TransformerModelArgs(
        dim=width,
        n_layers=layers,
        n_heads=2,
        # llama3 takes 2/3 of four times the width, times this, rounded up to a multiple of the next
        ffn_dim_multiplier=1.5,
        multiple_of=width,
    )
    return replace(args_with_attention(stock), weight_std=WEIGHT_STD)
