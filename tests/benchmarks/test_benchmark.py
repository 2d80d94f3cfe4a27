"""The benchmark scripts: their arguments, their rows and the picture."""

import contextlib
import csv
import io
import os
import sys
from itertools import product

import pytest
import torch
from ranks import on_ranks

from path_backend.attention import EXCHANGES, path_attention
from path_backend.benchmarks import context_parallel as benchmark_context_parallel
from path_backend.benchmarks import operator, peers
from path_backend.benchmarks.provenance import NO_MULTICAST
from path_backend.testing import as_leaves, make_inputs

TINY = "--lengths 70 130 --widths 16 --heads 2/1 --tokens 130 --rep 1".split()


@pytest.fixture
def on_cpu(monkeypatch):
    """Interpreted kernels in fp32, counted seconds, made-up bytes."""
    pytest.importorskip("triton")
    ticks = iter(range(1, 1000))

    def clock(function, milliseconds):
        function()
        return [float(next(ticks))] * 3

    def peak_memory(function):
        """The tokens, twice with reflections."""
        grads = function()
        return float(grads[0].shape[1] * (2 if len(grads) > 3 else 1))

    monkeypatch.setattr(operator, "DEVICE", "cpu")
    monkeypatch.setattr(operator, "DTYPE", torch.float32)
    monkeypatch.setattr(operator, "clock", clock)
    monkeypatch.setattr(operator, "peak_memory", peak_memory)


def output(capsys, *arguments):
    """The tables that the script prints, as lists of rows by column."""
    operator.main(arguments)
    text = capsys.readouterr().out
    head, *tables = text.split("\n\n")
    assert all(line.startswith("# ") for line in head.splitlines())
    return [list(csv.DictReader(table.splitlines())) for table in tables]


def test_dry_run_lists_every_row(capsys):
    """Catches a shape or an implementation that is left out, and a batch of the wrong size."""
    (rows,) = output(capsys, "--dry-run")
    assert len(rows) == len(peers.IMPLEMENTATIONS) * 2 * 2 * 3
    shapes = {tuple(row[x] for x in ("B", "T", "HQ", "H", "D")) for row in rows}
    assert {("8", "2048", "16", "16", "128"), ("1", "32768", "32", "8", "64")} <= shapes


def test_lengths_come_in_the_order_asked_for(capsys):
    """Catches what matters most measured last, where a time limit cuts it off."""
    (rows,) = output(capsys, "--dry-run", "--only", "path", "--lengths", "8192", "2048")
    assert [row["T"] for row in rows] == 4 * ["8192"] + 4 * ["2048"]
    assert [row["D"] for row in rows] == 2 * (2 * ["128"] + 2 * ["64"])


def test_dry_run_of_every_table(capsys):
    """Catches an option that selects no table, or another one."""
    options = [f"--{name}" for name in operator.TABLES]
    tables = output(capsys, "--dry-run", "--only", "path", "fla_path", *options)
    assert [len(table) for table in tables] == [24, 24, 12, 40, 24]


MISUSES = [
    (["--only", "flash"], "invalid choice: 'flash'"),
    (["--heads", "8/3"], "invalid head_pair value: '8/3'"),
    (["--read", "a.csv"], "--read needs --plot"),
    (["--plot", "a.png", "--dry-run"], "--plot draws the speed table"),
    (["--plot", "a.png", "--memory"], "--plot draws the speed table"),
    pytest.param(
        [],
        "expected a CUDA device, found none",
        marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
    ),
]


@pytest.mark.parametrize("arguments, message", MISUSES)
def test_misuse(capsys, arguments, message):
    """Catches a run that measures something else than was asked for."""
    with pytest.raises(SystemExit):
        operator.main(arguments)
    assert message in capsys.readouterr().err


def test_rows_have_ratios_and_failures_have_reasons(capsys, on_cpu):
    """Catches a ratio upside down, and a peer that fails and takes the other rows with it."""
    names = ("fla_path", "fox", "path_fox", "path", "sdpa_cudnn", "sdpa_flash")
    (rows,) = output(capsys, "--only", *names, *TINY)
    assert len(rows) == 12
    for row in rows:
        assert (
            row["note"] if row["implementation"] in ("fla_path", "sdpa_cudnn") else row["both_ms"]
        )
    flash, cudnn, path = rows[:3]
    assert flash["implementation"] == "sdpa_flash" and flash["both_ratio"] == "1.000"
    assert (flash["forward_ms"], flash["both_ms"]) == ("1.0000", "2.0000")
    assert not cudnn["both_ms"] and not cudnn["both_ratio"]
    assert (path["forward_ratio"], path["both_ratio"]) == ("3.000", "2.000")
    assert {row["B"] for row in rows} == {"1"}


def test_graph_times_replays(capsys, on_cpu, monkeypatch):
    """Catches a forward or a backward that is launched though replays were asked for."""
    captured = []
    monkeypatch.setattr(
        operator, "replayed", lambda function: captured.append(function) or function
    )
    (rows,) = output(capsys, "--only", "path", "fox", *TINY)
    assert len(rows) == 4 and not captured
    output(capsys, "--graph", "--only", "path", "fox", *TINY)
    assert len(captured) == 2 * len(rows)


def test_accuracy_is_measured_on_what_was_run(capsys, on_cpu):
    """Catches an error column of another input, or of another d(out)."""
    options = "--accuracy --accuracy-length 70 --widths 16 --only path path_fox".split()
    (rows,) = output(capsys, *options)
    assert len(rows) == 12
    for row in rows:
        columns = set(operator.ERRORS) - (
            {"dlog_gate"} if row["implementation"] == "path" else set()
        )
        assert all(0 < float(row[x]) < 1e-4 for x in columns), row


@pytest.mark.parametrize("name", ["fla_path", "fla_path_fox"])
def test_accuracy_of_a_peer(on_cpu, name):
    """Catches a gate's factor where there is no gate, or none where the peer has one."""
    inputs = make_inputs(70, gate=peers.WITH_REFLECTIONS[name]).map_floating(torch.detach)
    leaves = as_leaves(operator.clipped(inputs))
    scale = inputs.q.shape[-1] ** -0.5 if name == "fla_path_fox" else 1.0
    problem = peers.Problem(
        lambda: leaves.call(path_attention, implementation="torch", gate_scale=scale),
        leaves.differentiable(),
    )
    errors = operator.accuracy_of(name, inputs, 1.0)(problem)
    assert errors.keys() == {"out", *(f"d{x}" for x in leaves.differentiable())}
    assert max(errors.values()) < 1e-5


def test_documents_and_memory(capsys, on_cpu):
    """Catches a speed-up measured without the mask, and growth against another implementation."""
    options = "--documents --memory --document-length 32 --memory-lengths 64 128"
    names = ("--only", "path", "sdpa_flash")
    documents, memory = output(capsys, *options.split(), *names, *TINY)
    assert [row["document"] for row in documents] == ["no mask", "130", "32"]
    assert [row["times_faster"] for row in documents] == ["1.000", "0.500", "0.333"]
    assert [row["implementation"] for row in memory] == ["sdpa_flash"] * 2 + ["path"] * 2
    assert [row["growth"] for row in memory] == ["", "2.000", "", "2.000"]
    assert [row["ratio"] for row in memory] == ["1.000", "1.000", "2.000", "2.000"]


def test_expanded_heads_are_announced(monkeypatch):
    """Catches a peer that is handed a smaller problem, or one that is expanded in silence."""
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def without_groups(*args, enable_gqa, **options):
        if enable_gqa:
            raise RuntimeError("No available kernel")
        return sdpa(*args, **options)

    monkeypatch.setattr(operator, "DEVICE", "cpu")
    monkeypatch.setattr(operator, "DTYPE", torch.float32)
    inputs = operator.draw(operator.Shape(1, 30, 4, 2, 16))
    build = peers.IMPLEMENTATIONS[peers.REFERENCE].build
    expected = build(inputs)
    exact = expected.call()
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", without_groups)
    expanded = build(inputs)
    assert expected.note == "" and "expanded" in expanded.note
    assert expanded.leaves["k"].shape == expanded.leaves["q"].shape
    assert torch.allclose(expanded.call(), exact, atol=1e-6)


def test_plot(capsys, on_cpu, tmp_path):
    """Catches a picture that needs a GPU, or that fails where a row failed."""
    pytest.importorskip("matplotlib")
    operator.main(["--only", "sdpa_flash", "sdpa_cudnn", "path", *TINY])
    results, picture = tmp_path / "results.csv", tmp_path / "results.png"
    results.write_text(capsys.readouterr().out)
    operator.main(["--read", str(results), "--plot", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_file_without_the_table_is_refused(tmp_path):
    """Catches an empty picture."""
    path = tmp_path / "other.csv"
    path.write_text("# a comment\n\na,b\n1,2\n")
    with pytest.raises(ValueError, match="other.csv holds no table with the columns impl"):
        operator.read_speed(path)


@pytest.mark.gpu
def test_every_table_on_a_gpu(capsys):
    """Catches what only a card shows: timers, the profiler, peers that refuse the layout."""
    options = [f"--{name}" for name in operator.TABLES]
    sizes = "--lengths 256 512 --widths 64 --heads 4/2 --tokens 512 --rep 1 --document-length 64"
    lengths = "--memory-lengths 256 512 --accuracy-length 256"
    names = ("sdpa_flash", *peers.OURS)
    tables = output(capsys, "--only", *names, *options, *sizes.split(), *lengths.split())
    assert len(tables) == len(operator.TABLES)
    for table in tables:
        assert table
        for row in table:
            assert not row["note"], row


def test_exposed_communication():
    """Overlapping kernels counted twice, or a gap between them counted as work."""
    covered = benchmark_context_parallel.covered
    assert covered([]) == 0
    assert covered([(0.0, 4.0), (1.0, 2.0), (3.0, 6.0), (8.0, 9.0)]) == 7.0
    kernels, collectives = [(0.0, 5.0)], [(4.0, 7.0), (9.0, 10.0)]
    assert benchmark_context_parallel.exposed(collectives, kernels) == 3.0


def report_on_rank(group, arguments):
    """What the benchmark of context parallelism prints on this rank."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        benchmark_context_parallel.report(benchmark_context_parallel.parse(arguments))
    return text.getvalue()


def context_parallel_rows(ranks, *arguments, backend="gloo"):
    arguments = [*"--heads 16/8 --width 16 --rep 1 --warmup 0".split(), *arguments]
    text, *others = on_ranks(ranks, report_on_rank, arguments, backend=backend)
    assert isinstance(text, str), text
    assert not any(others)
    return list(csv.DictReader(line for line in text.splitlines() if line[0] != "#"))


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.skipif(torch.cuda.is_available(), reason="meets by gloo, on a GPU by NCCL")
def test_context_parallel_rows(tmp_path, ranks):
    """An efficiency of the wrong ranks or row, bytes of another step, ranks that wait for ever;
    norms of a rank's tokens alone, or of another d(out) on more ranks."""
    header = benchmark_context_parallel.HEADER
    cells = [f"{x},,1,1,256,16,8,16,5,{ms},1,1,0,0,1,0,0,0,{norms_of(x)}" for x, ms in SINGLE]
    earlier = tmp_path / "one.csv"
    earlier.write_text("\n".join(["# a comment", header, *cells]))
    attentions = [attention for attention, _ in SINGLE]
    rows = context_parallel_rows(
        ranks, "--lengths", "256", "--attention", *attentions, "--single", str(earlier)
    )
    methods = benchmark_context_parallel.METHODS
    assert [(x["attention"], x["method"]) for x in rows] == list(product(attentions, methods))
    for row in rows:
        assert row["ranks"] == str(ranks)
        speedup = dict(SINGLE)[row["attention"]] / float(row["both_ms"])
        assert float(row["speedup"]) == pytest.approx(speedup, abs=1e-3)
        assert float(row["efficiency"]) == pytest.approx(speedup / ranks, abs=1e-3)
        assert float(row["sent_mb"]) > 0 and row["sent_mb"] == row["formula_mb"]
        assert 0 < float(row["difference"]) < 1e-3


def norms_of(attention):
    """Norms of out and its gradients on one device, with q for d(out)."""
    absent = dict.fromkeys(benchmark_context_parallel.ATTENTIONS[attention])
    inputs = operator.draw(operator.Shape(1, 256, 16, 8, 16), "cpu")
    inputs = as_leaves(inputs._replace(**absent))
    out = inputs.call(path_attention)
    grads = torch.autograd.grad(out, [*inputs.differentiable().values()], inputs.q)
    return " ".join(str(float(x.detach().double().norm())) for x in (out, *grads))


SINGLE = [("path", 1000.0), ("path_fox", 2000.0), ("fox", 500.0)]
"""Forward + backward on one device, in ms."""


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_context_parallel_rows_of_gpus():
    """Bytes that only NCCL sends, a time or memory of the wrong device."""
    rows = context_parallel_rows(2, "--lengths", "1024", "2048", backend="nccl")
    assert [row["ranks"] for row in rows] == ["1", "2", "2", "2"] * 2
    for row in rows:
        assert row["sent_mb"] == row["formula_mb"] and float(row["peak_gib"]) > 0
        assert float(row["exposed_ms"]) <= float(row["collectives_ms"])
        assert float(row["difference"]) < 1e-2


def test_rows_of_one_gpu_are_read(tmp_path):
    """An efficiency against another file's numbers, or against nothing; a lost origin."""
    path = tmp_path / "other.csv"
    case = benchmark_context_parallel.Case("path", operator.Shape(1, 512, 16, 8, 16))
    row = "path,,1,1,256,16,8,16,5,7,1,1,0,0,1,0,0,0,1 2"
    for text in ("a,b\n1,2", f"{benchmark_context_parallel.HEADER}\n{row}"):
        path.write_text(f"# a comment\n# device: a card\n# commit: abc\n{text}")
        with pytest.raises(ValueError, match=r"other.csv holds no row of 1 rank of .*T=512"):
            benchmark_context_parallel.read_single(path, [case])
    case = case._replace(shape=case.shape._replace(T=256))
    assert benchmark_context_parallel.read_single(path, [case])[case] == (7.0, (1.0, 2.0))
    assert benchmark_context_parallel.origin(path) == "device: a card, commit: abc"


def test_context_parallel_methods(capsys):
    """A method that the function has and the benchmark does not offer, or one that it lacks."""
    parse = benchmark_context_parallel.parse
    assert sorted(parse([]).method) == sorted(EXCHANGES)
    assert parse(["--method", "heads"]).method == ["heads"]
    with pytest.raises(SystemExit):
        parse(["--method", "alltoall"])
    assert "invalid choice: 'alltoall'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse(["--rep", "0"])
    assert "--rep must be at least 1, got 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--lengths 64 1003", "--lengths must be multiples of 8 on 4 ranks, got 1003"),
        ("--lengths 0", "--lengths must be multiples of 8 on 4 ranks, got 0"),
        ("--heads 8/2 --method heads", "key/value heads that 4 ranks divide, got 2"),
    ],
)
def test_sizes_that_ranks_cannot_share(arguments, message):
    """Fewer tokens than the row says, or a failure after hours."""
    with pytest.raises(ValueError, match=message):
        benchmark_context_parallel.check(benchmark_context_parallel.parse(arguments.split()), 4)


def test_heads_that_ranks_do_not_divide():
    """The rows of other methods lost, or a method that is missing without a word."""
    args = benchmark_context_parallel.parse("--lengths 64 --heads 8/2".split())
    (note,) = benchmark_context_parallel.check(args, 4)
    assert note.startswith("left out: --method heads needs") and "heads" not in args.method
    assert len(args.method) == 2
    args = benchmark_context_parallel.parse("--lengths 1003 --heads 8/2".split())
    assert benchmark_context_parallel.check(args, 1) == []


def test_later_lengths_are_warmed_up(monkeypatch):
    """A cold run that counts, because the kernels of another length are compiled."""
    seen = []
    monkeypatch.setattr(
        benchmark_context_parallel,
        "measure",
        lambda case, args: seen.append((case.shape.T, args.warmup)) or [],
    )
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    arguments = "--lengths 64 128 --attention path fox --warmup 3".split()
    benchmark_context_parallel.report(benchmark_context_parallel.parse(arguments))
    assert seen == [(64, 3), (64, 3), (128, 1), (128, 1)]


def test_context_parallel_start(monkeypatch):
    """Ranks that share a GPU and are timed as if not, or that meet with NVLink multicast on."""
    for name in NO_MULTICAST:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    met = []
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda _: met.append({**os.environ})
    )
    monkeypatch.setattr(sys, "argv", ["benchmark"])
    monkeypatch.setattr(benchmark_context_parallel, "GPU", True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="every rank needs a GPU, got 4 ranks and 2 GPUs"):
        benchmark_context_parallel.main()
    assert met[0].items() >= NO_MULTICAST.items()
