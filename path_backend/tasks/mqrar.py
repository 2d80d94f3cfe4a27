"""MQRAR-N: multi-query repeated associative recall, N assignments back.

    tokens    A 1 B 2 A 3 B 4 A 5      variables at even places, each followed by its new value
    labels    . . . . 1 . 2 . 3 .      N = 1: the value that the variable had
    labels    . . . . . . . . 1 .      N = 2: the one before

Variables are assigned values again and again. Each variable token asks for the value that it was
assigned N assignments ago, the one that follows not counted; where there is none (its first N
assignments), nothing is asked. Loss and error count these answers only.

The paper of PaTH gives 32 pairs, 768 tokens and N = 1..4. It leaves open, and here is chosen: each
assignment is also a query, as in the recall task of stick-breaking attention (Tan et al. 2025) that
it extends; `pairs` is the number of variables, and values are as many tokens of their own; both are
drawn uniformly and independently, so that a variable is assigned 12 times on average.
"""

from dataclasses import dataclass

import torch

from path_backend.tasks.stream import IGNORE_INDEX, below


@dataclass(frozen=True)
class Mqrar:
    n_back: int = 1
    """
    Which assignment a variable asks for: 1 is its last one, 2 the one before it, and so on.
    """

    pairs: int = 32
    """
    Number of variables, at least 2, and of values.
    """

    def __post_init__(self) -> None:
        for key, least in (("n_back", 1), ("pairs", 2)):
            value = getattr(self, key)
            if type(value) is not int or value < least:
                raise ValueError(f"mqrar.{key} must be an integer >= {least}, got {value!r}")

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return tuple(f"{kind}{i}" for kind in ("variable", "value") for i in range(self.pairs))

    def check_length(self, length: int) -> None:
        # With one assignment more than n_back of each, some variable always has a query.
        least = 2 * (self.n_back * self.pairs + 1)
        if length < least or length % 2:
            raise ValueError(
                f"mqrar with n_back = {self.n_back}, pairs = {self.pairs} needs an even length of "
                f"at least {least} tokens, got {length}"
            )

    def sequences(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels, int64 [N, T] each, from random words int64 [N, T]."""
        variable = below(words[:, 0::2], self.pairs)
        value = self.pairs + below(words[:, 1::2], self.pairs)
        # Sorted by variable, in order of assignment, the n-th last one is n places to the left.
        grouped, place = variable.sort(dim=1, stable=True)
        back = torch.full_like(place, IGNORE_INDEX)
        earlier, later = slice(None, -self.n_back), slice(self.n_back, None)
        back[:, later] = torch.where(
            grouped[:, later] == grouped[:, earlier],
            value.gather(1, place[:, earlier]),
            IGNORE_INDEX,
        )
        asked = torch.empty_like(back).scatter_(1, place, back)
        tokens = torch.stack([variable, value], dim=2).flatten(1)
        labels = torch.stack([asked, torch.full_like(asked, IGNORE_INDEX)], dim=2).flatten(1)
        return tokens, labels
