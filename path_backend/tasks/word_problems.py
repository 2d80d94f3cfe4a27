"""Word problems of two groups of permutations of five objects: the product of all so far.

    tokens    start   g_1   g_2         g_3
    labels    .       g_1   g_2 g_1     g_3 g_2 g_1     products: g_1 acts first

The label at every permutation is the product up to it. A sequence of n + 1 tokens is a word of n.

`A5WordProblem` draws from the 60 even permutations. A5 is the smallest group that is not solvable:
its word problem is complete for NC1 (Barrington 1989), and a transformer of fixed depth with RoPE
is in TC0 (Merrill and Sabharwal 2023). `S5Swaps` draws from the 10 swaps of two objects, and the
product is one of the 120 elements of S5. That task the paper of PaTH proves one layer to solve: a
swap is a reflection, I - 2 w w^T with w = (e_a - e_b) / sqrt(2). An even permutation is a product
of 0, 2 or 4 swaps, and a layer has one reflection for each token and head.

The first token is the same for all, as in the public code of Merrill, Petty and Sabharwal, The
Illusion of State (2024): a query that attends to it sees the product of everything since. The paper
leaves open from which side elements act; the other side is the same task with every element
inverted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from typing import ClassVar

import torch

from path_backend.tasks.stream import IGNORE_INDEX, below

Permutation = tuple[int, ...]


@dataclass(frozen=True)
class _WordProblem:
    name: ClassVar[str]
    group: ClassVar[Callable[[], list[Permutation]]]  # what products are
    letters: ClassVar[Callable[[], list[Permutation]]]  # what words are made of

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """An element is named by the images of 0..4: "12034" takes 0 to 1, 1 to 2, 2 to 0."""
        return (*("".join(map(str, element)) for element in type(self).group()), "start")

    def check_length(self, length: int) -> None:
        if length < 3:
            raise ValueError(f"{self.name} needs a length of at least 3 tokens, got {length}")

    def sequences(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels, int64 [N, T] each, from random words int64 [N, T]."""
        group, letters = type(self).group(), type(self).letters()
        product = _products(type(self).group).to(words.device)
        ids = torch.tensor([group.index(letter) for letter in letters], device=words.device)
        factors = ids[below(words[:, 1:], len(ids))]
        # Products of 1, 2, 4, .. factors that end here, until they reach the first one.
        products, span = factors.clone(), 1
        while span < factors.shape[1]:
            products[:, span:] = product[products[:, span:], products[:, :-span]]
            span *= 2
        start = torch.full_like(words[:, :1], len(group))
        nothing = torch.full_like(start, IGNORE_INDEX)
        return torch.cat([start, factors], dim=1), torch.cat([nothing, products], dim=1)


def _inversions(p: Permutation) -> int:
    return sum(p[i] > p[j] for j in range(len(p)) for i in range(j))


@cache
def _s5() -> list[Permutation]:
    """In lexical order: the identity is the first."""
    return list(permutations(range(5)))


@cache
def _a5() -> list[Permutation]:
    return [p for p in _s5() if _inversions(p) % 2 == 0]


@cache
def _swaps() -> list[Permutation]:
    return [p for p in _s5() if sum(image != place for place, image in enumerate(p)) == 2]


@cache
def _products(group: Callable[[], list[Permutation]]) -> torch.Tensor:
    """products[a, b] int64: first b, then a."""
    elements = group()
    number = {element: i for i, element in enumerate(elements)}
    return torch.tensor([[number[tuple(a[x] for x in b)] for b in elements] for a in elements])


class A5WordProblem(_WordProblem):
    """Words of all 60 even permutations."""

    name, group, letters = "a5_word_problem", staticmethod(_a5), staticmethod(_a5)


class S5Swaps(_WordProblem):
    """Words of the 10 swaps; their products are the 120 permutations."""

    name, group, letters = "s5_swaps", staticmethod(_s5), staticmethod(_swaps)
