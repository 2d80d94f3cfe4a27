"""Tables and pictures of the experiments' results.

    path-backend report                       tables to the terminal, pictures beside the results
    path-backend report --readme README.md    tables into the file, between its two marks

Errors and perplexities are those in the JSON files of `path-backend experiments`; nothing is
computed from models here. Pictures need matplotlib.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from path_backend.integration.commands.experiments import ATTENTIONS, RESULTS
from path_backend.integration.data.task_error import wilson_interval

BEGIN, END = "<!-- path-backend report: begin -->", "<!-- path-backend report: end -->"
SUCCESS = 0.9  # of a word problem: accuracy at a length that counts as solved
LINES = (":", "-.", "--", "-")  # of one to four layers
SHOWN_LENGTHS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 30, 40)
# Yang et al., PaTH Attention (NeurIPS 2025): errors in %, in distribution, sparse, dense.
PAPER_FLIP_FLOP = {
    "default": ("6.9", "40.3", "0.01"),
    "stick_breaking": ("9.6", "38.9", "0"),
    "fox": ("8.3", "36.3", "0"),
    "path": ("0", "0.0001", "0"),
}
LABELS = {
    "default": "RoPE (`default`)",
    "stick_breaking": "`stick_breaking`",
    **{name: f"`{name}`" for name in ("path", "path_fox", "fox", "nope")},
}

Results = list[dict[str, Any]]


def load(folder: Path, group: str) -> Results:
    """The results of one kind of experiment, failures left out."""
    paths = sorted((folder / group).glob("*.json"))
    return [_read(path) for path in paths if not path.name.endswith(".failed.json")]


def failures(folder: Path) -> list[dict[str, Any]]:
    """What failed and has no result since."""
    return [_read(path) for path in sorted(folder.glob("*/*.failed.json"))]


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"expected a result in JSON, got {path}: {error}") from error


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def flip_flop(results: Results) -> str:
    """Errors in %, of all seeds together and from the best seed to the worst."""
    sets = ("flip_flop_validation", "flip_flop_sparse", "flip_flop_dense")
    rows = []
    for attention, runs in _by_attention(results):
        cells = [_error([run["sets"][name] for run in runs]) for name in sets]
        paper = " / ".join(PAPER_FLIP_FLOP.get(attention, ("not given",)))
        rows.append([LABELS[attention], str(len(runs)), *cells, paper])
    header = ["error in %", "seeds", "80 % to ignore", "98 %, sparse", "10 %, dense", "paper"]
    return table(header, rows)


def _error(scores: list[dict[str, Any]]) -> str:
    predictions = sum(score["predictions"] for score in scores)
    wrong = sum(score["wrong"] for score in scores)
    if not wrong:
        return f"0 (below {_percent(wilson_interval(0, predictions)[1])})"
    shares = sorted(score["error"] for score in scores)
    spread = f" ({_percent(shares[0])} to {_percent(shares[-1])})" if len(shares) > 1 else ""
    return _percent(wrong / predictions) + spread


def word_problem(results: Results) -> str:
    """The smallest depth whose best seed reaches `SUCCESS` at each length.

    Bounds where depths did not run.
    """
    found = smallest_depths(results)
    rows = [
        [
            LABELS[attention],
            _seeds(runs),
            *(_depth_cell(found[attention], length, _depths(runs)) for length in SHOWN_LENGTHS),
        ]
        for attention, runs in _by_attention(results)
    ]
    return table(["layers, by length", "seeds", *map(str, SHOWN_LENGTHS)], rows)


def _seeds(runs: Results) -> str:
    """How many runs a depth has."""
    counts = sorted(len(seeds) for seeds in _by_depth(runs).values())
    return str(counts[0]) if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"


def _by_depth(runs: Results) -> dict[int, Results]:
    return {depth: [run for run in runs if _depth(run) == depth] for depth in _depths(runs)}


def _depth_cell(found: dict[int, int | None], length: int, ran: list[int]) -> str:
    if length not in found:
        return "not run"
    depth = found[length]
    if depth is None:
        return f"> {ran[-1]}"
    return str(depth) if depth == 1 or depth - 1 in ran else f"<= {depth}"


def smallest_depths(results: Results) -> dict[str, dict[int, int | None]]:
    """For each attention and length, the fewest layers of a run that solves it; None if none does.

    A run is asked for its accuracy at the length's last token, which `start` comes before.
    """
    depths: dict[str, dict[int, int | None]] = {}
    for attention, runs in _by_attention(results):
        longest = max(len(_by_position(run)) for run in runs) - 1
        for length in range(2, longest + 1):
            solved = [
                _depth(run)
                for run in runs
                if len(_by_position(run)) > length and 1 - _by_position(run)[length] >= SUCCESS
            ]
            depths.setdefault(attention, {})[length] = min(solved, default=None)
    return depths


def _by_position(run: dict[str, Any]) -> list[float]:
    return next(iter(run["sets"].values()))["error_by_position"]


def _depth(run: dict[str, Any]) -> int:
    return int(run["job"]["model"].split("task_")[1].split("x")[0])


def _depths(runs: Results) -> list[int]:
    return sorted({_depth(run) for run in runs})


def mqrar(results: Results) -> str:
    """Accuracies in %, mean over seeds and from the worst to the best."""
    rows = []
    for attention, runs in _by_attention(results):
        cells = []
        for n_back in (1, 2, 3, 4):
            accuracies = sorted(
                1 - run["sets"]["mqrar_validation"]["error"]
                for run in runs
                if f"--task.mqrar.n_back={n_back}" in run["trainer"]
            )
            cells.append(_range(accuracies))
        rows.append([LABELS[attention], *cells])
    return table(["accuracy in %", "N = 1", "N = 2", "N = 3", "N = 4"], rows)


def _range(shares: list[float]) -> str:
    if not shares:
        return "not run"
    mean = _percent(sum(shares) / len(shares), 1)
    if len(shares) == 1:
        return mean
    return f"{mean} ({_percent(shares[0], 1)} to {_percent(shares[-1], 1)})"


def length_extrapolation(results: Results) -> str:
    """Perplexity on the documents that fill each length, mean over seeds and lowest to highest."""
    rows, header = [], ["perplexity", "seeds"]
    for attention, runs in _by_attention(results):
        by_length = list(zip(*map(_text, runs), strict=True))
        lengths = [f"{r['length']} ({r['documents']} documents)" for r, *_ in by_length]
        header = ["perplexity", "seeds", *lengths]
        cells = [_perplexity([row["perplexity"] for row in seeds]) for seeds in by_length]
        rows.append([LABELS[attention], str(len(runs)), *cells])
    return table(header, rows)


def _text(run: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of the held-out modules, one for each length."""
    return next(iter(run["perplexity"].values()))


def _perplexity(seeds: list[float | None]) -> str:
    found = [perplexity for perplexity in seeds if perplexity is not None]
    if not found:
        return "none"
    mean = f"{sum(found) / len(found):.2f}"
    return f"{mean} ({min(found):.2f} to {max(found):.2f})" if len(found) > 1 else mean


def plot_accuracy(results: Results, path: Path) -> None:
    """Mean accuracy over the length, and its range over seeds.

    A colour for each attention, a line style for each depth.
    """
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(8, 3.6))
    for attention, runs in _by_attention(results):
        for depth, seeds in _by_depth(runs).items():
            accuracies = [[1 - error for error in _by_position(run)[1:]] for run in seeds]
            by_length = list(zip(*accuracies, strict=True))
            lengths = range(1, len(by_length) + 1)
            style = _style(attention) | {"ls": LINES[(depth - 1) % len(LINES)]}
            style["label"] += f", {depth} {'layers' if depth > 1 else 'layer'}"
            axis.plot(lengths, [sum(a) / len(a) for a in by_length], **style)
            ranges = [*map(min, by_length)], [*map(max, by_length)]
            axis.fill_between(lengths, *ranges, color=style["color"], alpha=0.2, lw=0)
    axis.axhline(SUCCESS, color="0.6", lw=1, ls=":")
    _finish_words(figure, axis, path, results, "accuracy")


def plot_depths(results: Results, path: Path) -> None:
    """The table: smallest depth over the length, up to the last one that a depth solves."""
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(8, 3.6))
    for attention, depths in smallest_depths(results).items():
        solved = {length: depth for length, depth in depths.items() if depth is not None}
        apart = 0.05 * ATTENTIONS.index(attention)  # so that equal depths do not hide each other
        axis.step(
            solved.keys(), [d + apart for d in solved.values()], where="mid", **_style(attention)
        )
        if solved:
            last = max(solved)
            axis.plot(last, solved[last] + apart, "o", color=_style(attention)["color"])
    axis.set_yticks(range(1, 1 + max(_depths(results))))
    axis.xaxis.get_major_locator().set_params(integer=True)
    _finish_words(figure, axis, path, results, f"layers to reach {SUCCESS:.0%}")


def _finish_words(figure: Any, axis: Any, path: Path, results: Results, label: str) -> None:
    trained = results[0]["job"]["seq_len"] - 1
    axis.axvline(trained, color="0.6", lw=1, ls=":")
    axis.set_xlabel(f"permutations (trained on up to {trained})")
    axis.set_ylabel(label)
    _finish(figure, axis, path)


def plot_length_extrapolation(results: Results, path: Path) -> None:
    """Loss by position on the documents that fill the longest length that any fills.

    Mean over seeds, and its range.
    """
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(8, 3.6))
    for attention, runs in _by_attention(results):
        rows = [[row for row in _text(run) if row["documents"]][-1] for run in runs]
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


def _by_attention(results: Results) -> list[tuple[str, Results]]:
    groups = {a: [r for r in results if r["job"]["attention"] == a] for a in ATTENTIONS}
    return [(attention, runs) for attention, runs in groups.items() if runs]


def _percent(share: float, digits: int | None = None) -> str:
    """Two significant digits below 1 %, else one after the point."""
    percent = 100 * share
    if digits is not None or percent >= 1:
        return f"{percent:.{1 if digits is None else digits}f}"
    return f"{percent:.2g}" if percent >= 1e-4 else f"{percent:.6f}".rstrip("0").rstrip(".")


GROUPS: dict[str, tuple[str, Callable[[Results], str]]] = {
    "flip_flop": ("Flip-flop language modelling", flip_flop),
    "s5_swaps": ("Word problem of S5 by swaps: fewest layers with 90 %, best seed", word_problem),
    "a5_word_problem": ("Word problem of A5: fewest layers with 90 %, best seed", word_problem),
    "mqrar": ("MQRAR-N", mqrar),
    "mqrar_open_gates": ("MQRAR-N, gates that start at 0.998 instead of 0.5", mqrar),
    "mqrar_lower_rate": ("MQRAR-N, learning rate 3e-4 instead of 1e-3", mqrar),
    "mqrar_small": ("MQRAR-N, small: 8 variables, 128 tokens, width 64", mqrar),
    "length_extrapolation": ("Perplexity beyond the trained 1,024 tokens", length_extrapolation),
}
PLOTS = {
    "s5_swaps": plot_accuracy,
    "a5_word_problem": plot_depths,
    "length_extrapolation": plot_length_extrapolation,
}


def report(folder: Path) -> str:
    """Every table as Markdown, with where it was measured."""
    parts = []
    for group, (title, make) in GROUPS.items():
        if results := load(folder, group):
            parts.append(f"**{title}**\n\n{make(results)}\n{_provenance(results)}\n")
    failed = ", ".join(f"{f['experiment']} ({f['failure']})" for f in failures(folder))
    if failed:
        parts.append(f"Without a result: {failed}.\n")
    return "\n".join(parts)


def _provenance(results: Results) -> str:
    def every(values: Iterable[str]) -> str:
        return ", ".join(sorted(set(values)))

    devices = every(run["device"] for run in results)
    torches = every(run["versions"]["torch"] for run in results)
    dates = sorted(run["date"][:10] for run in results)
    span = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    steps = ", ".join(f"{step:,}" for step in sorted({run["step"] for run in results}))
    return f"Runs: {len(results)} of {steps} steps, on {devices}, torch {torches}, {span}."


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="path-backend report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    parser.add_argument("--readme", type=Path, help="file that gets the tables")
    options = parser.parse_args(arguments)
    text = report(options.results)
    if not text:
        raise ValueError(f"--results must hold results of experiments, got {options.results}")
    for group, plot in PLOTS.items():
        if results := load(options.results, group):
            plot(results, options.results / f"{group}.png")
    if options.readme is None:
        print(text)
        return
    before, begin, rest = options.readme.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"--readme must hold the lines {BEGIN} and {END}, got {options.readme}")
    options.readme.write_text(f"{before}{BEGIN}\n{text}{END}{after}")


if __name__ == "__main__":
    main()
