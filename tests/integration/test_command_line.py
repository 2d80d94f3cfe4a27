"""The command line: what lists, names and refuses commands."""

import subprocess
import sys

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
        "path-backend: error: COMMAND must be one of evaluate, experiments, report, fla, "
        "got 'evalute' (did you mean evaluate?)\n"
    )


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
