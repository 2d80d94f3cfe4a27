"""The word problem of A5, the even permutations of five objects: the product of all so far.

    tokens    g_1   g_2         g_3             each uniform over the 60 elements
    labels    g_1   g_2 g_1     g_3 g_2 g_1     products: g_1 acts first

The label at every token is the product up to it, one of 60. A5 is the smallest group that is not
solvable: its word problem is complete for NC1 (Barrington 1989), and a transformer of fixed depth
with RoPE is in TC0 (Merrill and Sabharwal 2023). The paper of PaTH leaves open from which side
elements act; the other side is the same task with every element inverted.
"""

from dataclasses import dataclass
from functools import cache
from itertools import permutations

import torch

from path_backend.tasks.stream import below


@dataclass(frozen=True)
class A5WordProblem:
    @property
    def vocabulary(self) -> tuple[str, ...]:
        """An element is named by the images of 0..4: "12034" takes 0 to 1, 1 to 2, 2 to 0."""
        return tuple("".join(map(str, element)) for element in _elements())

    def check_length(self, length: int) -> None:
        if length < 2:
            raise ValueError(f"a5_word_problem needs a length of at least 2 tokens, got {length}")

    def sequences(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels, int64 [N, T] each, from random words int64 [N, T]."""
        product = _products().to(words.device)
        tokens = below(words, len(product))
        # Products of 1, 2, 4, .. tokens that end here, until they reach the first one.
        labels, span = tokens.clone(), 1
        while span < tokens.shape[1]:
            labels[:, span:] = product[labels[:, span:], labels[:, :-span]]
            span *= 2
        return tokens, labels


@cache
def _elements() -> list[tuple[int, ...]]:
    """The 60 even permutations of 0..4, in lexical order: the identity is the first."""
    return [p for p in permutations(range(5)) if _inversions(p) % 2 == 0]


def _inversions(p: tuple[int, ...]) -> int:
    return sum(p[i] > p[j] for j in range(len(p)) for i in range(j))


@cache
def _products() -> torch.Tensor:
    """products[a, b] int64 [60, 60]: first b, then a."""
    elements = _elements()
    number = {element: i for i, element in enumerate(elements)}
    return torch.tensor([[number[tuple(a[x] for x in b)] for b in elements] for a in elements])
