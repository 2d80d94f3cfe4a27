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
