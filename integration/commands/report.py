"""Tables and pictures of the experiments' results.

    path-backend report                      tables to the terminal, pictures beside the results
    path-backend report --into RESULTS.md    tables into the file, each between its two marks

The table of `mqrar` lies between `<!-- path-backend report: begin mqrar -->` and the next
`<!-- path-backend report: end -->`. Errors and perplexities are those in the lines of
`path-backend experiments`; nothing is computed from models here. Pictures need matplotlib.
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from path_backend.integration.commands import pictures
from path_backend.integration.commands import results as store
from path_backend.integration.commands.experiments import RESULTS
from path_backend.integration.commands.scores import (
    LABELS,
    Results,
    by_attention,
    by_depth,
    depths,
    longest_word,
    smallest_depths,
    text_rows,
)
from path_backend.integration.data.task_error import wilson_interval

BEGIN, END = "<!-- path-backend report: begin {} -->", "<!-- path-backend report: end -->"
SHOWN_LENGTHS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 30, 40)
# Yang et al., PaTH Attention (NeurIPS 2025): errors in %, in distribution, sparse, dense.
PAPER_FLIP_FLOP = {
    "default": ("6.9", "40.3", "0.01"),
    "stick_breaking": ("9.6", "38.9", "0"),
    "fox": ("8.3", "36.3", "0"),
    "path": ("0", "0.0001", "0"),
}


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def flip_flop(results: Results) -> str:
    """Returns errors in %, of all seeds together and from the best seed to the worst."""
    sets = ("flip_flop_validation", "flip_flop_sparse", "flip_flop_dense")
    rows = []
    for attention, runs in by_attention(results):
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
    """Returns the smallest depth whose best seed solves each length, a bound where none ran.

    A second table has the longest word of every seed, by depth.
    """
    found = smallest_depths(results)
    rows = [
        [
            LABELS[attention],
            _seeds(runs),
            *(_depth_cell(found[attention], length, depths(runs)) for length in SHOWN_LENGTHS),
        ]
        for attention, runs in by_attention(results)
    ]
    smallest = table(["layers, by length", "seeds", *map(str, SHOWN_LENGTHS)], rows)
    return f"{smallest}\n{longest_words(results)}"


def longest_words(results: Results) -> str:
    """Returns the greatest length up to which each seed solves every one, by depth."""
    every = depths(results)
    rows = []
    for attention, runs in by_attention(results):
        groups = by_depth(runs)
        cells = [
            ", ".join(str(longest_word(run)) for run in _by_seed(groups.get(depth, [])))
            for depth in every
        ]
        rows.append([LABELS[attention], *(cell or "not run" for cell in cells)])
    return table(["longest word of each seed, by layers", *map(str, every)], rows)


def _by_seed(runs: Results) -> Results:
    return sorted(runs, key=lambda run: run["seed"])


def _seeds(runs: Results) -> str:
    """Returns how many runs a depth has."""
    counts = sorted(len(seeds) for seeds in by_depth(runs).values())
    return str(counts[0]) if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"


def _depth_cell(found: dict[int, int | None], length: int, ran: list[int]) -> str:
    if length not in found:
        return "not run"
    depth = found[length]
    if depth is None:
        return f"> {ran[-1]}"
    return str(depth) if depth == 1 or depth - 1 in ran else f"<= {depth}"


def mqrar(results: Results) -> str:
    """Returns accuracies in %, mean over seeds and from the worst to the best."""
    rows = []
    for attention, runs in by_attention(results):
        cells = []
        for n_back in (1, 2, 3, 4):
            accuracies = sorted(
                1 - run["sets"]["mqrar_validation"]["error"]
                for run in runs
                if run["n_back"] == n_back
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
    """Returns perplexities on the documents that fill each length: mean, lowest and highest."""
    rows, header = [], ["perplexity", "seeds"]
    for attention, runs in by_attention(results):
        by_length = list(zip(*map(text_rows, runs), strict=True))
        lengths = [f"{r['length']} ({r['documents']} documents)" for r, *_ in by_length]
        header = ["perplexity", "seeds", *lengths]
        cells = [_perplexity([row["perplexity"] for row in seeds]) for seeds in by_length]
        rows.append([LABELS[attention], str(len(runs)), *cells])
    return table(header, rows)


def _perplexity(seeds: list[float | None]) -> str:
    found = [perplexity for perplexity in seeds if perplexity is not None]
    if not found:
        return "none"
    mean = f"{sum(found) / len(found):.2f}"
    return f"{mean} ({min(found):.2f} to {max(found):.2f})" if len(found) > 1 else mean


def _percent(share: float, digits: int | None = None) -> str:
    """Returns a share in %: two significant digits below 1 %, else one after the point."""
    percent = 100 * share
    if digits is not None or percent >= 1:
        return f"{percent:.{1 if digits is None else digits}f}"
    return f"{percent:.2g}" if percent >= 1e-4 else f"{percent:.6f}".rstrip("0").rstrip(".")


EXPERIMENTS: dict[str, tuple[str, Callable[[Results], str]]] = {
    "flip_flop": ("Flip-flop language modelling", flip_flop),
    "s5_swaps": ("Word problem of S5 by swaps: fewest layers with 90 %, best seed", word_problem),
    "a5_word_problem": ("Word problem of A5: fewest layers with 90 %, best seed", word_problem),
    "mqrar": ("MQRAR-N", mqrar),
    "mqrar_open_gates": ("MQRAR-N, gates that start at 0.998 instead of 0.5", mqrar),
    "mqrar_lower_rate": ("MQRAR-N, learning rate 3e-4 instead of 1e-3", mqrar),
    "mqrar_small": ("MQRAR-N, small: 8 variables, 128 tokens, width 64", mqrar),
    "length_extrapolation": ("Perplexity beyond the trained 1,024 tokens", length_extrapolation),
}


def sections(folder: Path) -> dict[str, str]:
    """Returns the table of each experiment as Markdown, with where it was measured.

    An experiment that never ran is left out; jobs that failed are named below the table.
    """
    failed = store.failures(folder)
    parts = {}
    for experiment, (title, make) in EXPERIMENTS.items():
        results = store.load(folder, experiment)
        part = f"{make(results)}\n{_provenance(results)}\n" if results else ""
        reasons = [f"{f['name']} ({f['failure']})" for f in failed if f["experiment"] == experiment]
        if reasons:
            part += f"\nWithout a result: {', '.join(reasons)}.\n"
        if part:
            parts[experiment] = f"**{title}**\n\n{part.lstrip()}"
    return parts


def insert(text: str, parts: dict[str, str]) -> str:
    """Returns a document with each table between its marks.

    Raises ValueError if the marks of a table are not there, naming the first that is missing.
    """
    for experiment, part in parts.items():
        begin = BEGIN.format(experiment)
        before, found, rest = text.partition(begin)
        old, end, after = rest.partition(END)
        if not (found and end) or BEGIN.partition("{")[0] in old:
            raise ValueError(f"expected the lines {begin} and {END} around a table, found none")
        text = f"{before}{begin}\n{part}{END}{after}"
    return text


def _provenance(results: Results) -> str:
    def every(values: Iterable[str]) -> str:
        return ", ".join(sorted(set(values)))

    devices = every(run["device"] for run in results)
    torches = every(run["versions"]["torch"] for run in results)
    dates = sorted(run["date"][:10] for run in results)
    span = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    steps = ", ".join(f"{step:,}" for step in sorted({run["steps"] for run in results}))
    return f"Runs: {len(results)} of {steps} steps, on {devices}, torch {torches}, {span}."


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="path-backend report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON lines")
    parser.add_argument("--into", type=Path, metavar="FILE", help="file that gets the tables")
    options = parser.parse_args(arguments)
    parts = sections(options.results)
    if not parts:
        raise ValueError(f"--results must hold results of experiments, got {options.results}")
    if options.into is None:
        print("\n".join(parts.values()))
    else:
        try:
            text = insert(options.into.read_text(), parts)
        except ValueError as error:
            raise ValueError(f"--into {options.into}: {error}") from error
        options.into.write_text(text)
    pictures.draw(options.results)


if __name__ == "__main__":
    main()
