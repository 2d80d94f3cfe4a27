"""The script that trains one model on several layouts, measure_layouts.py."""

import json

import measure_layouts
import pytest
import torch

from path_backend.integration.job import load_job


@pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs a layout may be left out")
def test_rows(capsys):
    """Layouts that train on different sequences, so that no difference of them tells anything."""
    options = "--length 128 --steps 3 --attention path --layouts FSDP2".split()
    config = f"--config={measure_layouts.TESTS / 'tiny.toml'}"
    measure_layouts.main([config, *options, "one GPU", "--training.max_norm=0.5"])
    header, _, *rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in capsys.readouterr().out.splitlines()
    ]
    assert header == list(measure_layouts.COLUMNS)
    assert [row[:2] for row in rows] == [["one GPU", "`path`"], ["FSDP2", "`path`"]]
    for row in rows:
        losses = [float(x) for x in row[-1].split(", ")]
        assert len(losses) == 3 and 0 < losses[2] < losses[0]
        difference, of_norm = (float(x) for x in row[-2].split(", "))
        assert difference <= 1e-6 and of_norm <= 1e-5


@pytest.mark.parametrize("layout", measure_layouts.LAYOUTS, ids=str)
@pytest.mark.parametrize("attention", ["path", "path_fox", "default"])
def test_the_job_of_every_row_is_read(attention, layout):
    """An argument that torchtitan does not know found only where the GPUs are."""
    args, overrides = measure_layouts.parse(["--compile.no-enable"])
    job = load_job(
        [
            f"--job.config_file={args.config}",
            *measure_layouts.job_of(args, attention),
            *measure_layouts.options_of(layout, args),
            *overrides,
        ]
    )
    assert (job.model.attention, job.model.flavor) == (attention, "1B")
    assert job.training.global_batch_size % (layout.shard * job.training.local_batch_size) == 0
    assert job.training.seq_len % (2 * layout.context * layout.tensor) == 0
    assert job.parallelism.context_parallel_degree == layout.context
    assert not job.compile.enable


def test_exposed_communication_of_a_trace(tmp_path):
    """Times of the host counted, or transfers under kernels taken for exposed ones."""
    events = [
        ("kernel", "matmul", 1000, 4000),
        ("kernel", "ncclDevKernel_AllGather", 4000, 3000),
        ("gpu_memcpy", "Memcpy DtoD", 9000, 1000),
        ("cpu_op", "nccl:all_gather", 0, 90000),
    ]
    trace = tmp_path / "trace.json"
    keys = ("cat", "name", "ts", "dur")
    events = [dict(zip(keys, event, strict=True)) for event in events]
    trace.write_text(json.dumps({"traceEvents": [*events, {"name": "process_name"}]}))
    assert measure_layouts.communication(trace) == "2 of 9 ms"


def test_too_few_steps(capsys):
    """A median of no step at all, after the run."""
    with pytest.raises(SystemExit):
        measure_layouts.parse(["--steps=2"])
    assert "--steps must be at least 3, got 2" in capsys.readouterr().err
