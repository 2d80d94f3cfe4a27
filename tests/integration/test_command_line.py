"""The command line: what lists, names and refuses commands."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from trainer import ROOT

from path_backend.integration.__main__ import COMMANDS, TRACEBACK, main


def test_help_lists_every_command_without_heavy_imports():
    program = (
        "import sys\n"
        "from path_backend.integration.__main__ import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "assert not {'torchtitan', 'torch.distributed.checkpoint'} & set(sys.modules)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    for name, (_, text) in COMMANDS.items():
        assert f"  {name:12} {text}\n" in result.stdout


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("path-backend ")


def test_an_unknown_command_is_one_line_with_the_nearest(capsys):
    with pytest.raises(SystemExit) as end:
        main(["evalute", "--config=x"])
    assert end.value.code == 2
    assert capsys.readouterr().err == (
        "path-backend: error: COMMAND must be one of evaluate, convert, experiments, report, fla, "
        "got 'evalute' (did you mean 'evaluate'?)\n"
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ("evaluate", "--config=missing.toml", "--checkpoint=x"),
            "--config must be the TOML file of a job, found no file missing.toml",
        ),
        (
            ("evaluate", "--config=broken.toml", "--checkpoint=x"),
            "--config must be a TOML file, got broken.toml: ",
        ),
        (
            ("evaluate", f"--config={ROOT / 'configs/llama3_debug_path.toml'}", "--checkpoint=x"),
            "--checkpoint must hold a checkpoint (steps there: none), got x",
        ),
        (
            ("fla", "import", "missing.toml", "a", "b"),
            "job must be the TOML file of a job, found no file missing.toml",
        ),
        (("report",), "--results must hold results of experiments, got configs/results"),
        (("experiments", "--run=none"), "--run must be a name that --list prints, got 'none'"),
    ],
    ids=["no TOML", "broken TOML", "no checkpoint", "fla", "report", "experiments"],
)
def test_a_users_error_is_one_line(tmp_path, arguments, message):
    """Catches a traceback, also one that torchtitan logs, where the user only mistyped."""
    pytest.importorskip("torchtitan")
    (tmp_path / "broken.toml").write_text("[job\n")
    result = subprocess.run(
        [sys.executable, "-m", "path_backend.integration", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), TRACEBACK: "0"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    errors = [x for x in result.stderr.splitlines() if x.startswith("path-backend: error: ")]
    assert errors == result.stderr.splitlines()[-1:]
    assert errors[0].startswith(f"path-backend: error: {message}")


def stub_command(monkeypatch, error):
    """A command `evaluate` that only raises."""

    def run(arguments):
        raise error

    name = "path_backend.integration.commands.evaluate"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(main=run))


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    """Catches the traceback of KeyboardInterrupt, and an exit status that says success."""
    stub_command(monkeypatch, KeyboardInterrupt())
    with pytest.raises(SystemExit) as end:
        main(["evaluate"])
    assert end.value.code == 130
    assert capsys.readouterr().err == "path-backend: interrupted\n"


@pytest.mark.parametrize(
    "error, message",
    [
        (ValueError("first\n  second"), "first second"),
        (PermissionError(13, "Permission denied", "out.json"), "Permission denied: 'out.json'"),
        (ModuleNotFoundError("No module named 'torchtitan'"), "No module named 'torchtitan'"),
        (ValueError(), "ValueError"),
    ],
)
def test_every_error_of_a_user_is_one_line(monkeypatch, capsys, error, message):
    """Catches a message of several lines, an empty one, and an OSError that is let through."""
    monkeypatch.delenv(TRACEBACK, raising=False)
    stub_command(monkeypatch, error)
    with pytest.raises(SystemExit) as end:
        main(["evaluate"])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("path-backend: error: ") and line.endswith(message)


def test_an_error_of_the_program_keeps_its_traceback(monkeypatch):
    """Catches a fault of ours that is shown as one of the user."""
    stub_command(monkeypatch, AssertionError())
    with pytest.raises(AssertionError):
        main(["evaluate"])


def test_a_users_error_is_one_line_unless_the_traceback_is_asked_for(tmp_path, capsys, monkeypatch):
    missing = tmp_path / "missing.toml"
    arguments = ["fla", "export", str(missing), str(tmp_path), str(tmp_path / "out")]
    monkeypatch.delenv(TRACEBACK, raising=False)
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("path-backend: error: ") and str(missing) in last
    monkeypatch.setenv(TRACEBACK, "1")
    with pytest.raises(FileNotFoundError):
        main(arguments)
