"""The attentions that a job can name: one table, from which every other list of them derives.

TOML choices, the layer's options, refusals, experiments, reports and the documents' tables read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Variant:
    """Describes one value of `[model] attention`.

    name is the value; label names it in tables; text describes it in a sentence. reflections,
    forget_gate and stick_breaking are options of `PathAttention`.
    """

    name: str
    label: str
    text: str
    reflections: bool = False
    forget_gate: bool = False
    stick_breaking: bool = False

    @property
    def is_stock(self) -> bool:
        """Whether the host's own attention runs."""
        return self.name == DEFAULT

    @property
    def options(self) -> dict[str, Any]:
        """Returns the options of `PathAttention` that make this attention."""
        return {
            "reflections": self.reflections,
            "forget_gate": self.forget_gate,
            "stick_breaking": self.stick_breaking,
        }

    @property
    def takes_rope(self) -> bool:
        """Whether the host's rotation may be multiplied in, by `[model.path] rope`."""
        return self.reflections or self.forget_gate

    @property
    def takes_segments(self) -> bool:
        """Whether sequences may lie on several ranks (context parallelism)."""
        return not self.stick_breaking


DEFAULT = "default"
VARIANTS = {
    variant.name: variant
    for variant in (
        Variant(DEFAULT, "RoPE (`default`)", "the model's own attention"),
        Variant("path", "`path`", "PaTH", reflections=True),
        Variant(
            "path_fox", "`path_fox`", "PaTH with a forget gate", reflections=True, forget_gate=True
        ),
        Variant(
            "fox",
            "`fox`",
            "the forget gate alone, without positions or reflections",
            forget_gate=True,
        ),
        Variant("nope", "`nope`", "a baseline: no positions at all"),
        Variant(
            "stick_breaking",
            "`stick_breaking`",
            "a baseline: stick-breaking attention in plain torch, memory quadratic in the length",
            stick_breaking=True,
        ),
    )
}
"""Attentions by name, in the order of tables."""
