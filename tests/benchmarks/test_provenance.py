"""Where a measurement says that it comes from."""

import shutil
import subprocess
import sys

import pytest
import torch
import trainer

from path_backend.benchmarks import provenance


def commit_in(folder):
    """What `commit` says of a copy of the module in a folder."""
    code = "import provenance; print(provenance.commit())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    """A repository with one commit, and a copy of the module that is not in it."""
    if not shutil.which("git"):
        pytest.skip("needs git")
    shutil.copy(provenance.__file__, tmp_path)
    (tmp_path / "other").write_text("")

    def git(*arguments):
        identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "--quiet")
    git("add", "other")
    git("commit", "--quiet", "--message=first")
    return tmp_path, git


def test_commit_of_a_checkout(checkout):
    """Catches results under the name of a commit that does not hold what was measured."""
    folder, git = checkout
    git("add", "provenance.py")
    git("commit", "--quiet", "--message=second")
    name = git("rev-parse", "--short", "HEAD")
    assert commit_in(folder) == name
    (folder / "other").write_text("changed")
    assert commit_in(folder) == f"{name}+"


def test_commit_of_an_installed_copy(checkout):
    """Catches the commit of a user's own project, in whose folder the package is installed."""
    folder, _ = checkout
    assert commit_in(folder) == "unknown"


def test_version_of_what_is_not_installed():
    """Catches a preamble that fails where a peer is missing."""
    assert provenance.version("no-package-of-this-name") == "not installed"


@pytest.fixture
def no_settings(monkeypatch):
    """An environment that says nothing of multicast, then and after the test."""
    for name in provenance.NO_MULTICAST:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def test_preamble(no_settings):
    """Catches a command that a shell splits elsewhere, and one GPU of many taken for all."""
    no_settings.setattr(sys, "argv", ["x", "--layouts", "one GPU"])
    no_settings.setattr(torch.cuda, "device_count", lambda: 4)
    no_settings.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    lines = list(provenance.preamble("tests/x.py"))
    assert lines[1:3] == [
        "command: python tests/x.py --layouts 'one GPU'",
        "device: 4 x NVIDIA H200",
    ]
    assert "command: python -m a.module" in list(provenance.preamble("a.module"))[1]


def test_ranks_on_gpus_have_no_multicast(no_settings):
    """Catches multicast on in the ranks of tests, forced on a user, or left out of a preamble."""
    assert not any("NVLS" in line for line in provenance.preamble("x"))
    no_settings.setenv("NVSHMEM_DISABLE_NVLS", "0")
    no_settings.setattr(torch.cuda, "device_count", lambda: 2)
    no_settings.setattr(torch.cuda, "get_device_name", lambda: "a card")
    no_settings.setattr(torch.cuda, "set_device", lambda gpu: None)
    trainer.take_gpu(1, ranks=2)
    *_, line = provenance.preamble("x")
    assert line == (
        "environment: NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=0"
    )
