"""Synthetic tasks that ask for what a position encoding must carry: state, and order of events.

Each task turns random words into sequences (torch only); `Stream` numbers them, keeps those of
training and evaluation apart, and needs neither files nor state. Vocabularies are a task's own.
"""

from path_backend.tasks.a5_word_problem import A5WordProblem
from path_backend.tasks.flip_flop import FlipFlop
from path_backend.tasks.mqrar import Mqrar
from path_backend.tasks.stream import IGNORE_INDEX, Stream, Task

__all__ = ["IGNORE_INDEX", "A5WordProblem", "FlipFlop", "Mqrar", "Stream", "Task"]
