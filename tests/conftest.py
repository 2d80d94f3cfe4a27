import os

import pytest
import torch

torch.set_num_threads(1)
pytest.register_assert_rewrite("parity", "kernel_checks")  # their assertions show values

# Read when the kernels are imported. Without a GPU they run, on tensors of the CPU, in Triton's
# interpreter; only implementation="triton" asks for them there.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def compilations(monkeypatch):
    """compilations(step, *lengths): the kernels that Triton compiles in step(T) of each."""
    compiled = []
    knobs = pytest.importorskip("triton").knobs.runtime
    monkeypatch.setattr(knobs, "jit_post_compile_hook", lambda **event: compiled.append(event))

    def of(step, *lengths):
        compiled.clear()
        for T in lengths:
            step(T)
        return [event["repr"] for event in compiled]

    return of


@pytest.fixture
def uninitialized_memory_is_nan():
    """An element that no kernel writes, or that is read before, spoils the result."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1, device="cuda" if torch.cuda.is_available() else "cpu").isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
