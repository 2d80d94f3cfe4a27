"""Flip-flop language modelling (Liu et al., "Exposing attention glitches", NeurIPS 2023).

    w 1 i 0 i 1 r 1 w 0 r 0      instructions at even places, each followed by a bit

`w` writes its bit, `i` is to be ignored, `r` reads: its bit repeats the last one written. A
sequence starts with `w` and ends with `r`; each instruction between is `i` with probability
p_ignore and `w` or `r` with half of the rest; bits after `w` and `i` are fair coins. Asked is the
bit after each `r`, at the `r`: labels are the next token there and nowhere else. (As the paper of
PaTH has it, loss and error count the bits after `r` only.)
"""

from dataclasses import dataclass

import torch

from path_backend.tasks.stream import IGNORE_INDEX, uniform

WRITE, READ, IGNORE, ZERO, ONE = range(5)


@dataclass(frozen=True)
class FlipFlop:
    p_ignore: float = 0.8
    """
    Probability of an instruction to be ignored, from 0 to 1. The more of them, the farther a read
    is from its write: the paper of PaTH trains with 0.8 and also tests with 0.98 and 0.1.
    """

    def __post_init__(self) -> None:
        if type(self.p_ignore) not in (int, float) or not 0 <= self.p_ignore <= 1:
            raise ValueError(
                f"flip_flop.p_ignore must be a number in [0, 1], got {self.p_ignore!r}"
            )

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return ("w", "r", "i", "0", "1")

    def check_length(self, length: int) -> None:
        if length < 4 or length % 2:
            raise ValueError(f"flip_flop needs an even length of at least 4 tokens, got {length}")

    def sequences(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels, int64 [N, T] each, from random words int64 [N, T]."""
        choice = uniform(words[:, 0::2])
        instruction = torch.where(choice < (1 + self.p_ignore) / 2, WRITE, READ)
        instruction[choice < self.p_ignore] = IGNORE
        instruction[:, 0], instruction[:, -1] = WRITE, READ
        bit = words[:, 1::2] & 1
        # The place of the last write: at a read, what the bit repeats.
        place = torch.arange(bit.shape[1], device=bit.device)
        last_write = torch.where(instruction == WRITE, place, 0).cummax(dim=1).values
        reads = instruction == READ
        bit = ZERO + torch.where(reads, bit.gather(1, last_write), bit)
        tokens = torch.stack([instruction, bit], dim=2).flatten(1)
        asked = torch.where(reads, bit, IGNORE_INDEX)
        labels = torch.stack([asked, torch.full_like(asked, IGNORE_INDEX)], dim=2).flatten(1)
        return tokens, labels
