"""Pictures of the experiments' results; they need matplotlib."""

from importlib import import_module
from pathlib import Path
from typing import Any

from path_backend.integration.commands import results as store
from path_backend.integration.commands.scores import (
    ATTENTIONS,
    LABELS,
    SUCCESS,
    Results,
    by_attention,
    by_depth,
    depths,
    error_by_position,
    smallest_depths,
    text_rows,
)

LINES = (":", "-.", "--", "-")  # of one to four layers


def accuracy(results: Results, path: Path) -> None:
    """Draws mean accuracy over the length, and its range over seeds.

    Each attention has a colour, each depth a line style.
    """
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(8, 3.6))
    for attention, runs in by_attention(results):
        for depth, seeds in by_depth(runs).items():
            accuracies = [[1 - error for error in error_by_position(run)[1:]] for run in seeds]
            by_length = list(zip(*accuracies, strict=True))
            lengths = range(1, len(by_length) + 1)
            style = _style(attention) | {"ls": LINES[(depth - 1) % len(LINES)]}
            style["label"] += f", {depth} {'layers' if depth > 1 else 'layer'}"
            axis.plot(lengths, [sum(a) / len(a) for a in by_length], **style)
            ranges = [*map(min, by_length)], [*map(max, by_length)]
            axis.fill_between(lengths, *ranges, color=style["color"], alpha=0.2, lw=0)
    axis.axhline(SUCCESS, color="0.6", lw=1, ls=":")
    _finish_words(figure, axis, path, results, "accuracy")


def smallest(results: Results, path: Path) -> None:
    """Draws the smallest depth over the length, up to the last one that a depth solves."""
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(8, 3.6))
    for attention, found in smallest_depths(results).items():
        solved = {length: depth for length, depth in found.items() if depth is not None}
        apart = 0.05 * ATTENTIONS.index(attention)  # so that equal depths do not hide each other
        axis.step(
            solved.keys(), [d + apart for d in solved.values()], where="mid", **_style(attention)
        )
        if solved:
            last = max(solved)
            axis.plot(last, solved[last] + apart, "o", color=_style(attention)["color"])
    axis.set_yticks(range(1, 1 + max(depths(results))))
    axis.xaxis.get_major_locator().set_params(integer=True)
    _finish_words(figure, axis, path, results, f"layers to reach {SUCCESS:.0%}")


def _finish_words(figure: Any, axis: Any, path: Path, results: Results, label: str) -> None:
    trained = results[0]["job"]["seq_len"] - 1
    axis.axvline(trained, color="0.6", lw=1, ls=":")
    axis.set_xlabel(f"permutations (trained on up to {trained})")
    axis.set_ylabel(label)
    _finish(figure, axis, path)


def length_extrapolation(results: Results, path: Path) -> None:
    """Draws the loss by position on the documents that fill the longest length that any fills.

    It is the mean over seeds, with its range.
    """
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(8, 3.6))
    for attention, runs in by_attention(results):
        rows = [[row for row in text_rows(run) if row["documents"]][-1] for run in runs]
        losses = list(zip(*(row["loss_by_position"] for row in rows), strict=True))
        positions = [rows[0]["bucket"] * (i + 0.5) for i in range(len(losses))]
        style = _style(attention)
        axis.plot(positions, [sum(seeds) / len(seeds) for seeds in losses], "-", **style)
        ranges = [*map(min, losses)], [*map(max, losses)]
        axis.fill_between(positions, *ranges, color=style["color"], alpha=0.2, lw=0)
    trained = results[0]["job"]["seq_len"]
    axis.axvline(trained, color="0.6", lw=1, ls=":")
    axis.set_xscale("log", base=2)
    axis.set_xlabel(f"position (trained on {trained})")
    axis.set_ylabel("loss, nats per token")
    _finish(figure, axis, path)


def _pyplot() -> Any:
    import_module("matplotlib").use("Agg")
    return import_module("matplotlib.pyplot")


def _style(attention: str) -> dict[str, str]:
    return {
        "color": f"C{ATTENTIONS.index(attention)}",
        "label": LABELS[attention].replace("`", ""),
    }


def _finish(figure: Any, axis: Any, path: Path) -> None:
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
    figure.tight_layout()
    figure.savefig(path, dpi=150)


PICTURES = {
    "s5_swaps": accuracy,
    "a5_word_problem": smallest,
    "length_extrapolation": length_extrapolation,
}


def draw(folder: Path) -> None:
    """Draws every picture that has results, beside them."""
    for experiment, picture in PICTURES.items():
        if results := store.load(folder, experiment):
            picture(results, folder / f"{experiment}.png")
