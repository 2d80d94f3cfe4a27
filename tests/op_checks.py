"""What the operator, its context-parallel form and its kernels owe to torch, checked in one way."""

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

CASES = {
    "path": dict(HQ=4, DV=8),
    "path_fox": dict(gate=True, documents=True),
    "fox": dict(w=None, gate=True),
    "nope": dict(w=None),
    "bf16": dict(gate=True, dtype=torch.bfloat16),
}


def opcheck_forward(name, inputs, *options):
    """Compares an op with its schema, its fake and its registered gradient."""
    torch.library.opcheck(getattr(torch.ops.path_backend, name).default, (*inputs, *options))


def opcheck_backward(name, inputs, *options):
    """Does the same for the op's backward."""
    inputs = inputs.map(torch.detach)
    out, lse = getattr(torch.ops.path_backend, name)(*inputs, *options)
    arguments = (torch.randn_like(out), *inputs, out, lse, *options)
    torch.library.opcheck(getattr(torch.ops.path_backend, f"{name}_backward").default, arguments)


def runs_under_selective_checkpointing(monkeypatch, module, name, op, function, inputs, saved):
    """Returns how often module.name runs in a step whose policy saves `op`, or saves nothing."""
    calls, counted = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args: (calls.append(None), counted(*args))[1])
    operators = [getattr(torch.ops.path_backend, op).default] if saved else []
    contexts = partial(create_selective_checkpoint_contexts, operators)
    out = checkpoint(function, *inputs[:5], use_reentrant=False, context_fn=contexts)
    out.sum().backward()
    assert inputs.w.grad is not None
    return len(calls)


def assert_saves_only_inputs_output_and_lse(function, inputs):
    """Fails if anything else is kept between forward and backward."""
    saved = []

    def pack(x):
        saved.append(x.shape)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = inputs.call(function)
    B, T, HQ, _ = out.shape
    assert sorted(saved) == sorted([*(x.shape for x in inputs), out.shape, torch.Size([B, HQ, T])])
