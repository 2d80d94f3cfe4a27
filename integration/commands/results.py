"""Results of experiments as lines of JSON, one file for each experiment.

    configs/results/mqrar.jsonl          each run: what it is, its scores, its conditions
    configs/results/curves/mqrar.jsonl   each run: losses and statistics of layers by step
    configs/results/failures.jsonl       each job that failed and has no result since

A line is an object whose `name` no other line of the file has, and lines are sorted by it. Writers
take turns by a lock on the folder, and a file is replaced as a whole: it holds complete lines only,
whenever a process is killed.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CURVE_POINTS = 41  # of a stored curve: the first step and every 200th of 8,000
STATISTIC_POINTS = 11  # of the statistics of layers, which are many and change slowly
DIGITS = 6  # significant ones of a stored score

Record = dict[str, Any]


def load(folder: Path, experiment: str) -> list[Record]:
    """Returns the results of an experiment, sorted by name."""
    return _read(folder / f"{experiment}.jsonl")


def load_curves(folder: Path, experiment: str) -> list[Record]:
    """Returns the curves of an experiment: `steps`, and `values` as long by the curve's name."""
    return _read(folder / "curves" / f"{experiment}.jsonl")


def failures(folder: Path) -> list[Record]:
    """Returns the jobs that failed and have no result since: `failure` and the log's end."""
    return _read(folder / "failures.jsonl")


def save(folder: Path, record: Record, scalars: dict[str, dict[int, float]]) -> None:
    """Stores a result and its curves in place of those of the same name, and drops its failure.

    The result comes last: where there is one, the rest is there too.
    """
    experiment, name = record["experiment"], record["name"]
    curves = {"name": name, "curves": columns(scalars)}
    _put(folder / "curves" / f"{experiment}.jsonl", curves)
    _put(folder / f"{experiment}.jsonl", rounded(record))
    drop_failure(folder, name)


def save_failure(folder: Path, record: Record) -> None:
    """Stores why a job has no result, in place of what an earlier attempt left."""
    _put(folder / "failures.jsonl", record)


def drop_failure(folder: Path, name: str) -> None:
    """Forgets the failure of a job, if there is one."""
    path = folder / "failures.jsonl"
    if any(record["name"] == name for record in _read(path)):
        _change(path, lambda records: records.pop(name, None))


def columns(scalars: dict[str, dict[int, float]]) -> list[Record]:
    """Returns curves that share their steps as one object.

    They are thinned to `CURVE_POINTS`, those of layers (`path/`) to `STATISTIC_POINTS`, and values
    have four significant digits.
    """
    groups: dict[tuple[int, ...], dict[str, list[float]]] = {}
    for name, curve in sorted(scalars.items()):
        points = STATISTIC_POINTS if name.startswith("path/") else CURVE_POINTS
        steps = _thinned(sorted(curve), points)
        groups.setdefault(steps, {})[name] = [float(f"{curve[step]:.4g}") for step in steps]
    return [{"steps": list(steps), "values": values} for steps, values in groups.items()]


def _thinned(steps: Sequence[int], points: int) -> tuple[int, ...]:
    """Returns the first step, the last and evenly many between, at most `points` of them."""
    if len(steps) <= points:
        return tuple(steps)
    last = len(steps) - 1
    return tuple(steps[round(i * last / (points - 1))] for i in range(points))


def rounded(value: Any) -> Any:
    """Returns a value of JSON with every number that is no integer rounded to `DIGITS`."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value


def _read(path: Path) -> list[Record]:
    """Returns the lines of a file, none if it is not there.

    Raises ValueError for a line that is no object with a name, and for a name that comes twice.
    """
    records: dict[str, Record] = {}
    lines = path.read_text().splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            name = record["name"]
        except (json.JSONDecodeError, TypeError, KeyError) as error:
            raise ValueError(
                f"expected a JSON object with a name, got line {number} of {path}: {line[:80]!r}"
            ) from error
        if name in records:
            raise ValueError(f"expected one line for each name, got {name!r} twice in {path}")
        records[name] = record
    return list(records.values())


def _put(path: Path, record: Record) -> None:
    _change(path, lambda records: records.update({record["name"]: record}))


def _change(path: Path, change: Callable[[dict[str, Record]], Any]) -> None:
    """Rewrites a file after `change` of its records by name, while no other process does."""
    with _locked(path.parent):
        records = {record["name"]: record for record in _read(path)}
        change(records)
        lines = [_line(records[name]) for name in sorted(records)]
        part = path.with_suffix(".part")
        part.write_text("".join(lines))
        part.replace(path)


def _line(record: Record) -> str:
    return json.dumps(record, separators=(",", ":"), ensure_ascii=False) + "\n"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # ends with the descriptor, thus with the process
        yield
    finally:
        os.close(descriptor)
