"""Synthetic tasks that ask for what a position encoding must carry: state, and order of events.

Each task turns random words into sequences (torch only); `Stream` numbers them, keeps those of
training and evaluation apart, and needs neither files nor state. Vocabularies are a task's own.
"""

from path_backend.tasks.flip_flop import FlipFlop
from path_backend.tasks.mqrar import Mqrar
from path_backend.tasks.stream import IGNORE_INDEX, Stream, Task
from path_backend.tasks.word_problems import A5WordProblem, S5Swaps

__all__ = ["IGNORE_INDEX", "A5WordProblem", "FlipFlop", "Mqrar", "S5Swaps", "Stream", "Task"]
