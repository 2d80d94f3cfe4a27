"""The table of layouts in the README."""

import xml.etree.ElementTree as ElementTree

import pytest
import torch
from make_matrix import BEGIN, END, README, read, recorded, table
from test_parallel import COLUMNS, LAYOUTS, REFUSALS

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


@pytest.mark.skipif(torch.cuda.is_available(), reason="the table is that of a CPU")
def test_readme_has_every_cell():
    """A layout whose result nobody wrote down, or a table that does not survive its own reading."""
    text = README.read_text().split(BEGIN)[1].split(END)[0].lstrip("\n")
    cells = read(text)
    assert table(cells) == text
    rows = [layout.name for layout in (*LAYOUTS, *(refusal.layout for refusal in REFUSALS))]
    assert list(cells) == rows
    for row in cells.values():
        assert list(row) == [str(column) for column in COLUMNS]
        assert "not run" not in row.values() and "**fails**" not in row.values()
