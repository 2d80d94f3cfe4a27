"""The decode benchmark's tables on a CPU, and what it refuses."""

import csv
import io

import pytest
import torch

from path_backend.benchmarks import decode
from path_backend.reference import path_attention_reference

SMALL = ["--device", "cpu", "--heads", "2", "1", "--width", "16"]


def table(capsys, *arguments):
    decode.main([*SMALL, *arguments])
    lines = [x for x in capsys.readouterr().out.splitlines() if x and not x.startswith("#")]
    return list(csv.DictReader(io.StringIO("\n".join(lines))))


def test_check(capsys):
    """Every kind is measured, and a cache that errs more than the forward would be seen."""
    rows = table(capsys, "--check", "--check-tokens", "130")
    assert {row["kind"] for row in rows} == set(decode.KINDS)
    assert all(float(row["ratio"]) < decode.LIMIT for row in rows)


def test_check_fails(capsys, monkeypatch):
    """A limit that is not held ends the run with an error."""
    monkeypatch.setattr(decode, "LIMIT", 0.5)
    with pytest.raises(SystemExit, match="at most 0.5 times"):
        table(capsys, "--check", "--check-tokens", "130")


def test_drift(capsys):
    """Keys that are updated in place in bf16 lose digits, those of the cache do not."""
    rows = table(capsys, "--drift", "--drift-tokens", "1024")
    assert [row["tokens"] for row in rows] == ["64", "256", "1024"] * 2
    worst = rows[-1]
    assert float(worst["cache_error"]) < 1.5 * float(worst["forward_error"])
    assert float(worst["in_place_error"]) > 3 * float(worst["cache_error"])


def test_last_outputs_are_the_definition():
    """The walk that judges both is the reference's, of the last queries alone."""
    args = decode.parse([*SMALL, "--check"])
    inputs = decode.draw(args, 2, 90)
    exact = path_attention_reference(*inputs[:5])
    assert torch.allclose(decode.last_outputs(inputs, 64), exact[:, -64:], atol=1e-12)


def test_refusals(capsys):
    """What needs a card says so."""
    for arguments, named in (
        (["--device", "cpu", "--speed"], "['speed']"),
        (["--device", "cpu"], "['prefill', 'speed']"),
    ):
        with pytest.raises(SystemExit):
            decode.parse(arguments)
        assert f"expected --device cuda for {named}, got cpu" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [*decode.KINDS, "sdpa", "in_place"])
def test_rows_of_the_speed_table(kind, monkeypatch):
    """The steps that a card would replay: 64 of them, which close a group, from one position."""
    closed = []

    def once(function, repeats=5):
        function()
        closed.append(True)
        return 1e-3

    monkeypatch.setattr(decode, "CACHED_BYTES", 1)
    monkeypatch.setattr(decode, "captured", lambda function: function)
    monkeypatch.setattr(decode, "seconds", once)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    args = decode.parse([*SMALL, "--check"])
    row, time = decode.speed_row(args, kind, 2, 256, 1e9, 2e-3)
    cells = dict(zip(decode.SPEED_HEADER, row, strict=True))
    assert (cells["kind"], cells["B"], cells["context"], cells["layers"]) == (kind, 2, 256, 1)
    steps = decode.STEPS if kind in decode.KINDS else 1
    assert time == pytest.approx(1e-3 / steps + (2e-3 if kind == "in_place" else 0))
    assert len(closed) == (2 if kind in decode.KINDS else 1)


def test_prefill_table(monkeypatch):
    """One call and four append the same tokens."""
    monkeypatch.setattr(decode, "seconds", lambda function, repeats=5: (function(), 1e-3)[1])
    args = decode.parse([*SMALL, "--check", "--prefill-tokens", "256"])
    header, *rows = decode.prefill_table(args)
    assert [row[3] for row in rows] == ["forward", 1, 4] * 3
