"""Run every cell of test_parallel.py and write the table of the README from the results.

python tests/make_matrix.py [pytest arguments, such as -n 2]
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
    text = README.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    README.write_text(f"{before}{BEGIN}\n{table(results)}{END}{after}")
    sys.exit(done.returncode)


def table(results: ElementTree.ElementTree) -> str:
    """A Markdown table of the cells that the tests recorded."""
    cells: dict[str, dict[str, str]] = {}
    for case in results.iter("testcase"):
        recorded = {p.get("name"): p.get("value", "") for p in case.iter("property")}
        if "cell" not in recorded:
            continue
        failed = case.find("failure") is not None or case.find("error") is not None
        cell = "**fails**" if failed else recorded["cell"]
        cells.setdefault(recorded["row"], {})[recorded["column"]] = cell
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    lines = [f"| | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    order = [layout.name for layout in (*LAYOUTS, *(refusal.layout for refusal in REFUSALS))]
    for name, row in sorted(cells.items(), key=lambda item: order.index(item[0])):
        lines.append(f"| {name} | {' | '.join(row.get(c, 'not run') for c in columns)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
