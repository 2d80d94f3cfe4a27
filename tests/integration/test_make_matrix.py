"""The table of layouts of PARALLELISM.md."""

import re
import sys
import xml.etree.ElementTree as ElementTree

import make_matrix
import pytest
import torch
from make_matrix import BEGIN, DOCUMENT, END, ROWS, recorded, table
from parity import FP32
from test_parallel import COLUMNS, LAYOUTS

REPORT = """
<testsuites><testsuite>
  <testcase><properties>
    <property name="row" value="FSDP2"/><property name="column" value="llama3 path"/>
    <property name="cell" value="equal"/>
  </properties></testcase>
  <testcase><properties>
    <property name="row" value="CP2"/><property name="column" value="qwen3 path"/>
    <property name="cell" value="equal"/>
  </properties><failure/></testcase>
  <testcase><properties>
    <property name="row" value="TP4"/><property name="column" value="qwen3 path"/>
    <property name="cell" value="refused"/>
  </properties><skipped/></testcase>
  <testcase name="test_tied_embeddings"/>
</testsuite></testsuites>
"""


def test_cells_of_a_report():
    """A failure or what did not run shown as equal, or a test without a cell taken for one."""
    cells = recorded(ElementTree.ElementTree(ElementTree.fromstring(REPORT)))
    assert cells == {"FSDP2": {"llama3 path": "equal"}, "CP2": {"qwen3 path": "**fails**"}}


def read(table):
    """The cells of a table whose columns agree, by row and column."""
    lines = [line.split("|")[1:-1] for line in table.split("\n") if line]
    (_, columns), _, *rows = [[cell.strip() for cell in line] for line in lines]
    return {name: dict.fromkeys(columns.split(", "), value) for name, value in rows}


def test_columns_that_differ_are_told_apart():
    """Catches one column's cell shown for all of them."""
    cells = {row: dict.fromkeys(map(str, COLUMNS), "equal") for row in ROWS}
    cells["CP2"]["qwen3 path"] = "**fails**"
    lines = table(cells).split("\n")
    assert "| FSDP2 | equal |" in lines
    assert [line for line in lines if "fails" in line] == [
        "| CP2 | llama3 path: equal; llama3 path_fox: equal; qwen3 path: **fails**; "
        "qwen3 path_fox: equal |"
    ]


def test_a_run_of_some_cells_is_not_written(monkeypatch):
    """Cells of another commit under the stamp of this one."""
    before = DOCUMENT.read_text()
    monkeypatch.setattr(sys, "argv", ["make_matrix.py", "--collect-only", "-q"])
    with pytest.raises(SystemExit, match="every cell, not run: gradient accumulation, llama3 path"):
        make_matrix.main()
    assert DOCUMENT.read_text() == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="the table is that of a CPU")
def test_document_has_every_cell():
    """A layout whose result nobody wrote down, of an unknown day, or within an unnamed budget."""
    written, origin = DOCUMENT.read_text().split(BEGIN)[1].split(END)[0].strip("\n").split("\n\n")
    cells = read(written)
    assert list(cells) == ROWS
    assert table(cells) == written + "\n"
    assert re.fullmatch(r"Run: 20\d\d-\d\d-\d\d, commit [0-9a-f]{7,}, torch [0-9.]+\S*, .*", origin)
    limits = {layout.name: layout.budget.tensor for layout in LAYOUTS if layout.budget != FP32}
    for row, values in cells.items():
        refused = all(value.startswith("refused: ") for value in values.values())
        assert refused or set(values.values()) == {
            f"within {limits[row]:g}" if row in limits else "equal"
        }
