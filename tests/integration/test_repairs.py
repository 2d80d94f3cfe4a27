"""Each repair of torchtitan says what it repairs and when it goes."""

import ast
from pathlib import Path

import pytest

from path_backend.integration import repairs

FILES = sorted(Path(repairs.__file__).parent.glob("[!_]*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_repairs_are_documented(file):
    """A repair that nobody can date, or that nobody dares to delete."""
    text = ast.get_docstring(ast.parse(file.read_text()))
    first = text.splitlines()[0]
    assert "#" in first or "Not reported" in first
    assert "\nApplies: " in text
    assert "\nDelete: when " in text


def test_table_of_repairs():
    """A repair missing in the table of the package, or a row without its file."""
    rows = [line for line in repairs.__doc__.splitlines() if line.startswith("| `")]
    assert sorted(row.split("`")[1] for row in rows) == [file.name for file in FILES]
