"""The table of attention variants: what each is made of, and what follows from that.

Adding an attention adds one record here. The choices of the TOML key `[model] attention`, the
checks of a job, the layers of a model, its metrics and the names in tests derive from it. This
module imports neither torch nor torchtitan.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Variant:
    """One value of `[model] attention`."""

    name: str
    """The value in a TOML file."""

    label: str
    """The name in tables and pictures."""

    description: str
    """One sentence for the documentation."""

    reflections: bool = False
    """Whether w and beta exist: accumulated Householder reflections between query and key."""

    forget_gate: bool = False
    """Whether the logits carry a sum of log forget gates."""

    stick_breaking: bool = False
    """Whether stick-breaking weights replace the softmax; there are no kernels for them."""

    context_parallel: bool = True
    """Whether a sequence may be spread over ranks."""

    stock: bool = False
    """Whether this is the attention that the model has without this package."""

    def parts(self) -> dict[str, bool]:
        """Returns the arguments of `PathAttention` that make this variant."""
        return {
            "reflections": self.reflections,
            "forget_gate": self.forget_gate,
            "stick_breaking": self.stick_breaking,
        }


_TABLE = (
    Variant(
        "default",
        "RoPE (`default`)",
        "The model's own attention.",
        stock=True,
    ),
    Variant(
        "path",
        "`path`",
        "PaTH: data-dependent reflections accumulate between query and key.",
        reflections=True,
    ),
    Variant(
        "path_fox",
        "`path_fox`",
        "PaTH with the forget gate of the Forgetting Transformer.",
        reflections=True,
        forget_gate=True,
    ),
    Variant(
        "fox",
        "`fox`",
        "The forget gate of the Forgetting Transformer alone.",
        forget_gate=True,
    ),
    Variant(
        "nope",
        "`nope`",
        "Softmax attention without any positions, a baseline.",
    ),
    Variant(
        "stick_breaking",
        "`stick_breaking`",
        "Stick-breaking weights replace the softmax, a baseline in plain torch of T^2 memory.",
        stick_breaking=True,
        context_parallel=False,
    ),
)

VARIANTS = {variant.name: variant for variant in _TABLE}
NAMES = tuple(VARIANTS)
