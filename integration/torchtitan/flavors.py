"""Flavors of llama3 beside torchtitan's own.

`task_<layers>x<width>`, 1 to 8 layers, width 64, 128 or 256, for the tasks: two heads, a SwiGLU of
four times the width, all weights N(0, 0.02), as the models on which the paper of PaTH compares
attentions (`task_1x64` for flip_flop, `task_2x256` for mqrar). `task_<layers>x<width>x4` has four
heads. The vocabulary is the dataset's.

`30M` and `760M` for text. The vocabulary of `30M` is that of this package's tokenizer. `760M` is
the size at which the paper compares attentions on text; it gives the size alone, and the shape here
is the usual one, with a vocabulary of 32,000. Parameters of PaTH come on top.
"""

from dataclasses import replace

from torchtitan.models.llama3 import TransformerModelArgs

from path_backend.integration.torchtitan.model import PathArgs, args_with_attention

LAYERS = range(1, 9)
WIDTHS = (64, 128, 256)
HEADS = {"": 2, "x4": 4}  # by the end of the name
WEIGHT_STD = 0.02
TEXT = {
    "30M": TransformerModelArgs(dim=512, n_layers=8, n_heads=8, vocab_size=2048),
    "760M": TransformerModelArgs(dim=1536, n_layers=24, n_heads=24, vocab_size=32000),
}


def flavors() -> dict[str, PathArgs]:
    """Arguments of every flavor by its name."""
    tasks = {
        f"task_{layers}x{width}{suffix}": _task(layers, width, heads)
        for layers in LAYERS
        for width in WIDTHS
        for suffix, heads in HEADS.items()
    }
    return tasks | {name: args_with_attention(args) for name, args in TEXT.items()}


def _task(layers: int, width: int, heads: int) -> PathArgs:
    stock = TransformerModelArgs(
        dim=width,
        n_layers=layers,
        n_heads=heads,
        # llama3 takes 2/3 of four times the width, times this, rounded up to a multiple of the next
        ffn_dim_multiplier=1.5,
        multiple_of=width,
    )
    return replace(args_with_attention(stock), weight_std=WEIGHT_STD)
