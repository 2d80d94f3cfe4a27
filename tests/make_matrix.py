"""Run every cell of test_parallel.py and write the results into the table of PARALLELISM.md.

python tests/make_matrix.py [pytest arguments, such as -n 2]

The table is of one run, whose day, commit and versions stand below it: a run that leaves out a
cell changes nothing.
"""

import datetime
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "integration"))

from test_parallel import BACKEND, COLUMNS, LAYOUTS, REFUSALS  # noqa: E402

from path_backend.benchmarks.provenance import commit, version  # noqa: E402

TESTS = Path(__file__).resolve().parent
DOCUMENT = TESTS.parent / "PARALLELISM.md"
BEGIN, END = "<!-- make_matrix.py: begin -->", "<!-- make_matrix.py: end -->"
ROWS = [layout.name for layout in (*LAYOUTS, *(refusal.layout for refusal in REFUSALS))]


def main() -> None:
    origin = stamp()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", str(TESTS / "integration" / "test_parallel.py")]
        done = subprocess.run(
            [*command, f"--junitxml={report}", *sys.argv[1:]],
            env={**os.environ, "PATH_BACKEND_MATRIX": "1"},
        )
        cells = recorded(ElementTree.parse(report))
    left_out = [f"{row}, {c}" for row in ROWS for c in COLUMNS if str(c) not in cells.get(row, {})]
    if left_out:
        sys.exit(
            f"{DOCUMENT.name} is as it was: it needs every cell, not run: {'; '.join(left_out)}"
        )
    before, rest = DOCUMENT.read_text().split(BEGIN)
    after = rest.split(END)[1]
    DOCUMENT.write_text(f"{before}{BEGIN}\n{table(cells)}\n{origin}\n{END}{after}")
    sys.exit(done.returncode)


def stamp() -> str:
    """When and with what a run was made."""
    day = datetime.datetime.now(datetime.timezone.utc).date()
    torch, torchtitan = version("torch"), version("torchtitan")
    return (
        f"Run: {day}, commit {commit()}, torch {torch}, torchtitan {torchtitan}, gloo on a CPU, "
        f"compiled rows with {BACKEND}."
    )


Cells = dict[str, dict[str, str]]  # by row and column


def recorded(results: ElementTree.ElementTree) -> Cells:
    """The cells that the tests recorded."""
    cells: Cells = {}
    for case in results.iter("testcase"):
        noted = {p.get("name"): p.get("value", "") for p in case.iter("property")}
        if "cell" not in noted or case.find("skipped") is not None:
            continue
        failed = case.find("failure") is not None or case.find("error") is not None
        cell = "**fails**" if failed else noted["cell"]
        cells.setdefault(noted["row"], {})[noted["column"]] = cell
    return cells


def table(cells: Cells) -> str:
    """A Markdown table, in the order of test_parallel.py: what all columns say is said once."""
    columns = [str(column) for column in COLUMNS]
    lines = [f"| | {', '.join(columns)} |", "|---|---|"]
    for name in ROWS:
        values = [cells[name][column] for column in columns]
        each = [f"{column}: {value}" for column, value in zip(columns, values, strict=True)]
        lines.append(f"| {name} | {values[0] if len(set(values)) == 1 else '; '.join(each)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
