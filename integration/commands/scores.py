"""Scores that tables and pictures read from the lines of results."""

from typing import Any

from path_backend.layers.variants import VARIANTS

ATTENTIONS = tuple(VARIANTS)
LABELS = {name: variant.label for name, variant in VARIANTS.items()}
SUCCESS = 0.9  # of a word problem: accuracy at a length that counts as solved

Results = list[dict[str, Any]]


def by_attention(results: Results) -> list[tuple[str, Results]]:
    """Returns the runs of each attention that has any, in the order of the variants."""
    groups = {a: [run for run in results if run["attention"] == a] for a in ATTENTIONS}
    return [(attention, runs) for attention, runs in groups.items() if runs]


def depths(runs: Results) -> list[int]:
    """Returns the numbers of layers that ran, in order."""
    return sorted({run["layers"] for run in runs})


def by_depth(runs: Results) -> dict[int, Results]:
    """Returns the runs of each number of layers."""
    return {depth: [run for run in runs if run["layers"] == depth] for depth in depths(runs)}


def error_by_position(run: dict[str, Any]) -> list[float]:
    """Returns the share of errors after each token of a word, None at the first.

    Nothing is asked at the first token, `start`, so that the index is the length of the word.
    """
    return next(iter(run["sets"].values()))["error_by_position"]


def solves(run: dict[str, Any], length: int) -> bool:
    """Returns whether a run was asked for words of a length and solves them."""
    errors = error_by_position(run)
    return length < len(errors) and 1 - errors[length] >= SUCCESS


def longest_word(run: dict[str, Any]) -> int:
    """Returns the greatest length up to which a run solves every one."""
    length = 0
    while solves(run, length + 1):
        length += 1
    return length


def smallest_depths(results: Results) -> dict[str, dict[int, int | None]]:
    """Returns, for each attention and length, the fewest layers of a run that solves it, or None.

    Lengths start at 2 and end with the longest that the attention was asked for.
    """
    found: dict[str, dict[int, int | None]] = {}
    for attention, runs in by_attention(results):
        longest = max(len(error_by_position(run)) for run in runs) - 1
        for length in range(2, longest + 1):
            solved = [run["layers"] for run in runs if solves(run, length)]
            found.setdefault(attention, {})[length] = min(solved, default=None)
    return found


def text_rows(run: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of the held-out modules, one for each length."""
    return next(iter(run["perplexity"].values()))
