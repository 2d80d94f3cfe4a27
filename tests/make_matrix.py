"""Run every cell of test_parallel.py and write the results into the table of the README.

python tests/make_matrix.py [pytest arguments, such as -n 2 or -k CP2]

Cells that were not run stay as they are; rows that test_parallel.py no longer has go.
"""

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from test_parallel import LAYOUTS, REFUSALS

TESTS = Path(__file__).resolve().parent
README = TESTS.parent / "README.md"
BEGIN, END = "<!-- make_matrix.py: begin -->", "<!-- make_matrix.py: end -->"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", str(TESTS / "test_parallel.py")]
        done = subprocess.run(
            [*command, f"--junitxml={report}", *sys.argv[1:]],
            env={**os.environ, "PATH_BACKEND_MATRIX": "1"},
        )
        results = ElementTree.parse(report)
    before, rest = README.read_text().split(BEGIN)
    old, after = rest.split(END)
    cells = read(old)
    for row, found in recorded(results).items():
        cells.setdefault(row, {}).update(found)
    README.write_text(f"{before}{BEGIN}\n{table(cells)}{END}{after}")
    sys.exit(done.returncode)


Cells = dict[str, dict[str, str]]  # by row and column


def read(table: str) -> Cells:
    """The cells of a Markdown table."""
    lines = [line.split("|")[1:-1] for line in table.split("\n") if line]
    (_, *columns), _, *rows = [[cell.strip() for cell in line] for line in lines]
    return {name: dict(zip(columns, row, strict=True)) for name, *row in rows}


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
    """A Markdown table, in the order of test_parallel.py."""
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    lines = [f"| | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    order = [layout.name for layout in (*LAYOUTS, *(refusal.layout for refusal in REFUSALS))]
    for name in order:
        if name in cells:
            row = [cells[name].get(column, "not run") for column in columns]
            lines.append(f"| {name} | {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
