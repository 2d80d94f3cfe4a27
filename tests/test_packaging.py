"""What is built, pinned and installed: wheel, sdist, constraints, and the two scripts."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
LOCAL = shutil.ignore_patterns(
    ".*", "*.egg-info", "__pycache__", "build", "dist", "outputs", "shared"
)
STUB_PYTHON = """#!/usr/bin/env bash
# Stands for a new Python: records its arguments and makes environments of itself.
echo "$*" >>"$STUB_LOG"
if [[ "$1 $2" == "-m venv" ]]; then
    mkdir -p "$3/bin" && cp "$0" "$3/bin/python"
fi
exit 0
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the sources, so that a build leaves nothing behind in the checkout."""
    copy = tmp_path_factory.mktemp("build") / "checkout"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=LOCAL)
    return copy


def build(source: Path, kind: str, destination: Path) -> Path:
    """Build a "wheel" or an "sdist" without a network, by the backend that pyproject.toml names."""
    code = f"from setuptools import build_meta as b; print(b.build_{kind}({str(destination)!r}))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return destination / result.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory):
    return build(checkout, "wheel", tmp_path_factory.mktemp("wheel"))


def modules_of(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_wheel_holds_every_module_once_and_the_tokenizer(checkout, wheel):
    """Catches a missing package or asset, and a second copy under the bare name of a folder."""
    expected = {"path_backend/integration/assets/tokenizer/tokenizer.json"}
    expected.add("path_backend/integration/assets/tokenizer/tokenizer_config.json")
    for path in (checkout / "path_backend").rglob("*.py"):
        expected.add(path.relative_to(checkout).as_posix())
    for folder in ("kernels", "integration"):
        for path in (checkout / folder).rglob("*.py"):
            expected.add(f"path_backend/{folder}/{path.relative_to(checkout / folder).as_posix()}")
    assert modules_of(wheel) == expected


def test_wheel_built_from_the_sdist_is_the_same(checkout, wheel, tmp_path):
    """Catches sources or assets that only the checkout's symlinks bring into a wheel."""
    sdist = build(checkout, "sdist", tmp_path)
    with tarfile.open(sdist) as archive:
        for member in archive.getmembers():
            assert member.isfile() or member.isdir(), f"{member.name} is a link"
        archive.extractall(tmp_path)
    source = tmp_path / sdist.name.removesuffix(".tar.gz")
    assert modules_of(build(source, "wheel", tmp_path)) == modules_of(wheel)
    for name in ("constraints.txt", "LICENSE", "tests/test_packaging.py"):
        assert (source / name).is_file()


def test_installed_wheel_finds_its_subpackages_and_its_tokenizer(wheel, tmp_path):
    """Catches code that works only in the checkout: paths through a symlink, files beside setup."""
    pytest.importorskip("torchtitan")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import path_backend.kernels\n"
        "from path_backend.integration.data import text\n"
        "print(text.TOKENIZER_DIR, (text.TOKENIZER_DIR / 'tokenizer.json').is_file())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    expected = tmp_path / "path_backend/integration/assets/tokenizer"
    assert result.stdout.splitlines()[-1] == f"{expected.resolve()} True"


@pytest.mark.parametrize("name, submodule", [("kernels", "config"), ("integration", "job_config")])
def test_the_bare_name_of_a_folder_is_an_old_empty_package(name, submodule):
    """Catches a second copy of a package, which would register its operators twice."""
    assert (ROOT / name / f"{submodule}.py").is_file()
    program = (
        f"import {name}\n"
        f"assert ({name}.__version__, {name}.__path__) == ('0', [])\n"
        f"import {name}.{submodule}"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    last = result.stderr.splitlines()[-1]
    assert last == f"ModuleNotFoundError: No module named '{name}.{submodule}'"


def test_transformers_imports_from_the_folder_of_the_checkout():
    """Catches a folder `kernels` that transformers, which probes that name, cannot import."""
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers")
    program = "import kernels, integration, transformers; print(kernels.__file__)"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.split()[-1]) == ROOT / "kernels/__init__.py"


def test_constraints_are_exact_and_within_the_declared_ranges():
    """Catches a pin that pip would refuse beside pyproject.toml, and one that is no pin."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    allowed = {r.name: r.specifier for group in groups for r in map(Requirement, group)}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert {"torch", "triton", "torchtitan"} <= {pin.name for pin in pins}
    for pin in pins:
        (exact,) = pin.specifier
        assert exact.operator == "==", pin
        assert pin.name not in allowed or exact.version in allowed[pin.name], pin


class StubMachine:
    """A copy of the scripts beside a `python` that only records what it is asked to run."""

    def __init__(self, folder: Path):
        self.repository = folder / "repository"
        shutil.copytree(ROOT, self.repository, symlinks=True, ignore=LOCAL)
        self.python = folder / "python-stub"
        self.python.write_text(STUB_PYTHON)
        self.python.chmod(0o755)
        self.log = folder / "log"

    def run(
        self, script: str, *arguments: str, cwd: Path = ROOT, **environment: str
    ) -> tuple[list[str], str, int]:
        """Commands that the stub was given (version checks left out), standard error, exit code."""
        self.log.write_text("")
        inherited = {"PATH": os.environ["PATH"], "STUB_LOG": str(self.log)}
        result = subprocess.run(
            [str(self.repository / script), *arguments],
            cwd=cwd,
            env={**inherited, "PYTHON": str(self.python), **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )
        commands = [line for line in self.log.read_text().splitlines() if line.startswith("-m")]
        return commands, result.stderr, result.returncode


@pytest.fixture
def machine(tmp_path):
    return StubMachine(tmp_path)


def test_first_call_installs_torch_by_version_then_the_project_and_a_second_nothing(machine):
    """Catches a bare torch requirement resolved first, and a reinstall on every call."""
    commands, _, _ = machine.run("run_tests.sh", "-k", "dataset")
    installed = [command for command in commands if command.startswith("-m pip install")]
    assert commands[0] == f"-m venv {machine.repository}/.venv"
    assert installed[1] == "-m pip install torch==2.13.0"
    assert installed[2].endswith(f"constraints.txt --editable {machine.repository}[dev]")
    assert commands[-1] == "-m pytest -k dataset"

    assert machine.run("run_tests.sh")[0] == ["-m pytest"]
    assert all("pip" not in line for line in machine.run("run_train.sh", NGPU="2")[0])


def test_changed_constraints_are_installed(machine):
    """Catches an environment that stays at old versions after an update of the checkout."""
    machine.run("run_tests.sh")
    with (machine.repository / "constraints.txt").open("a") as constraints:
        constraints.write("einops==0.8.2\n")
    assert "-m pip install torch==2.13.0" in machine.run("run_tests.sh")[0]


def test_an_interrupted_installation_is_repeated(machine):
    """Catches a half-installed environment that counts as complete."""
    failing = STUB_PYTHON.replace("exit 0", '[[ "$*" != *--editable* ]]')
    machine.python.write_text(failing)
    commands, _, code = machine.run("run_tests.sh")
    assert code == 1 and "-m pytest" not in commands
    assert machine.run("run_tests.sh")[2] == 1


def test_train_passes_ranks_config_and_arguments_to_torchtitan(machine):
    """Catches a script that ignores torchtitan's variables or drops arguments."""
    commands, _, _ = machine.run(
        "run_train.sh",
        "--training.steps=3",
        NGPU="4",
        CONFIG_FILE="configs/mine.toml",
        LOG_RANK="0,1",
        PATH_BACKEND_VENV="none",
    )
    (command,) = commands
    assert "--nproc-per-node 4 --local-ranks-filter 0,1" in command
    assert command.endswith(
        "-m torchtitan.train --job.config_file configs/mine.toml --training.steps=3"
    )


def test_train_finds_the_config_where_the_caller_stands(machine, tmp_path):
    """Catches a path that the script reads from the repository, where its own `cd` leads."""
    (tmp_path / "mine.toml").touch()
    for named, passed in (
        ("mine.toml", f"{tmp_path}/mine.toml"),
        (f"{tmp_path}/mine.toml", f"{tmp_path}/mine.toml"),
        ("configs/llama3_debug_path.toml", "configs/llama3_debug_path.toml"),
    ):
        (command,), _, _ = machine.run(
            "run_train.sh", cwd=tmp_path, CONFIG_FILE=named, NGPU="1", PATH_BACKEND_VENV="none"
        )
        assert command.endswith(f" --job.config_file {passed}")


@pytest.mark.parametrize("ranks", ["abc", "0", "-1", "08", "2x"])
def test_train_refuses_a_number_of_ranks_that_is_none(machine, ranks):
    """Catches bash's "unbound variable" or "division by 0", after an installation of minutes."""
    commands, error, code = machine.run("run_train.sh", NGPU=ranks)
    assert (commands, code) == ([], 1)
    assert error == f"NGPU must be a positive integer, got '{ranks}'\n"


def test_an_environment_elsewhere_is_never_emptied(machine, tmp_path):
    """Catches the deletion of a folder that the user, not the script, made."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis").write_text("kept")
    machine.run("run_tests.sh", PATH_BACKEND_VENV=str(tmp_path / "home"))
    assert (tmp_path / "home" / "thesis").read_text() == "kept"


def test_an_old_python_is_refused_by_name(machine, tmp_path):
    """Catches a failure deep inside pip instead of a sentence about the interpreter."""
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.18 || exit 1\n')
    old.chmod(0o755)
    commands, error, code = machine.run("run_train.sh", PYTHON=str(old))
    assert (commands, code) == ([], 1)
    assert f"PYTHON must be Python 3.10 or newer, got '{old}' (Python 3.9.18)" in error


def test_no_python_at_all_is_said(machine, tmp_path):
    """Catches a silent exit where no interpreter is on PATH."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "env", "dirname", "cat", "cksum", "grep", "rm"):
        (tools / name).symlink_to(shutil.which(name))
    _, error, code = machine.run("run_tests.sh", PYTHON="", PATH=str(tools))
    assert code == 1
    assert "expected Python 3.10 or newer on PATH, found none" in error


def test_readme_lists_every_value_and_key_of_the_flag_with_its_default():
    """Catches a README that a changed default, a new key or a renamed value has made wrong."""
    pytest.importorskip("torchtitan")
    from dataclasses import asdict
    from typing import get_args

    from path_backend.integration import job_config

    readme = (ROOT / "README.md").read_text()
    for value in get_args(job_config.Attention):
        assert f"\n| `{value}` | " in readme
    for key, default in asdict(job_config.Path()).items():
        assert f"\n| `{key}` | `{json.dumps(default)}` | " in readme
