"""Numbered samples of a task: sample i of a stream is a pure function of the stream and of i.

Random words come from a counter, not from a generator with a state: SplitMix64's output function
(Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) of the
stream's key, the sample's number and the token's place. So any sample can be drawn at any time, on
any rank and any device, and the bits do not depend on the version of torch.

A hash of a sequence's tokens decides whether it belongs to training or to evaluation, one sequence
in eight; a stream draws again until it has one of its part. So no evaluation sequence is ever
trained on, whatever the seeds, even where a task has few sequences.
"""

import hashlib
from dataclasses import dataclass
from typing import Protocol

import torch

IGNORE_INDEX = -100  # label where nothing is asked, as in torch's cross_entropy
HELD_OUT = 8  # one sequence in this many is for evaluation
MAX_DRAWS = 1000  # of one sample; a part that exists is missed with a chance of (7/8)**1000

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # SplitMix64's increment


class Task(Protocol):
    """Describes a task to a stream."""

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Name of every token; a token's id is its place."""

    def check_length(self, length: int) -> None:
        """Raise ValueError if there is no sequence of this many tokens."""

    def sequences(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels, int64 [N, T] each, from random words int64 [N, T].

        labels[n, t] is what a model should say having read tokens[n, : t + 1], or IGNORE_INDEX.
        """


@dataclass(frozen=True)
class Stream:
    """Endless samples of `length` tokens, of one part: training, or held out for evaluation.

    Streams that differ in `name` or `seed` draw independently; `seed` is any integer.
    """

    task: Task
    length: int
    name: str
    held_out: bool
    seed: int = 0

    def __post_init__(self) -> None:
        self.task.check_length(self.length)

    def samples(
        self, first: int, count: int, device: torch.device | str = "cpu"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels of samples first, .., first + count - 1: int64 [count, length] each.

        Raises ValueError if the task has no sequence of this length in the stream's part.
        """
        index = torch.arange(first, first + count, device=device)
        tokens = index.new_empty(count, self.length)
        labels = index.new_empty(count, self.length)
        missing = torch.arange(count, device=device)
        for draw in range(MAX_DRAWS):
            words = random_words(self._key, index[missing], draw, self.length)
            drawn, asked = self.task.sequences(words)
            right = is_held_out(drawn) == self.held_out
            tokens[missing[right]] = drawn[right]
            labels[missing[right]] = asked[right]
            missing = missing[~right]
            if not len(missing):
                return tokens, labels
        raise ValueError(
            f"{self.name} must have sequences to draw, got none in {MAX_DRAWS} draws of "
            f"{self.length} tokens ({'held-out' if self.held_out else 'training'} part): "
            "a longer one has more"
        )

    @property
    def _key(self) -> int:
        digest = hashlib.sha256(f"{self.name} {self.seed}".encode()).digest()
        return int.from_bytes(digest[:8], "little", signed=True)


def random_words(key: int, index: torch.Tensor, draw: int, count: int) -> torch.Tensor:
    """int64 [N, count] of 64 random bits each, for sample numbers `index` [N]."""
    seeds = _mix(_mix(index * _GOLDEN + key) + draw * 2 + 1)
    place = torch.arange(1, count + 1, device=index.device)
    return _mix(seeds[:, None] + place * _GOLDEN)


def uniform(words: torch.Tensor) -> torch.Tensor:
    """float64 in [0, 1) from the upper 53 bits; the lower 11 stay for something else."""
    return _shift(words, 11).double() * 2.0**-53


def below(words: torch.Tensor, limit: int) -> torch.Tensor:
    """int64 in [0, limit), uniform up to limit / 2**63."""
    return _shift(words, 1) % limit


def is_held_out(tokens: torch.Tensor) -> torch.Tensor:
    """Whether each sequence of tokens int64 [N, T] is for evaluation, bool [N]."""
    weights = _mix(torch.arange(1, tokens.shape[1] + 1, device=tokens.device) * _GOLDEN)
    return below(_mix(((tokens + 1) * weights).sum(1)), HELD_OUT) == 0


def _mix(words: torch.Tensor) -> torch.Tensor:
    """SplitMix64's output function; int64 products wrap, as its unsigned ones do."""
    words = (words ^ _shift(words, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    words = (words ^ _shift(words, 27)) * (0x94D049BB133111EB - 2**64)
    return words ^ _shift(words, 31)


def _shift(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift to the right: int64's own keeps the sign."""
    return (words >> bits) & (2 ** (64 - bits) - 1)
