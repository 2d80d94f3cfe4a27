"""Kernels load tiles by descriptors, or by pointers where a card or a pass has none: same bits."""

from dataclasses import replace

import pytest
import torch
from kernel_checks import (
    DEVICE,
    KINDS,
    NAN_IN_ALL_MEMORY,
    assert_same_bits,
    check,
    gradient_of_out,
    kernels,
    on_device,
    surrounded,
)

from path_backend.arguments import CrossSegment
from path_backend.kernels import backend
from path_backend.testing import run

pytest.importorskip("triton")

from path_backend.kernels import config  # noqa: E402

pytestmark = NAN_IN_ALL_MEMORY
WITHOUT_DESCRIPTORS = replace(config.SM_90, descriptors=False)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_by_pointers(kind, monkeypatch):
    """Catches a stride, a head or columns of another tensor, and rows or columns read past the end
    (40 of width 64 are a slab of 32 and a part of one).
    """
    inputs = on_device(190, D=40, DV=24, **KINDS[kind])
    expected = run(kernels, inputs, gradient_of_out(inputs))
    monkeypatch.setattr(config, "architecture", lambda: WITHOUT_DESCRIPTORS)
    assert_same_bits(run(kernels, inputs, gradient_of_out(inputs)), expected)


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)], ids=str)
def test_slabs_of_other_cards(capability, monkeypatch):
    """Catches columns that the chunk backward leaves out where it does not take Hopper's slabs."""
    monkeypatch.setattr(config, "capability", lambda: capability)
    check(on_device(130, D=72, HQ=2, H=1))


@pytest.mark.parametrize("gate", [False, True])
def test_pairs_of_segments_by_pointers(gate, monkeypatch):
    """Catches the same between segments, where the last tile of keys passes their end."""
    inputs = on_device(150, B=2, HQ=4, H=2, D=24, gate=True).map(torch.detach)
    q, (k, v) = inputs.q[:, :70], (x[:, 20:] for x in (inputs.k, inputs.v))
    gates = inputs.log_gate.transpose(1, 2)
    gates = (gates[:, :, :70], gates[:, :, 20:]) if gate else (None, None)

    def run_pair():
        out = torch.zeros(q.shape, device=DEVICE)
        lse = torch.full((2, 4, 70), float("-inf"), device=DEVICE)
        pair = CrossSegment(q, k, v, *gates, None)
        backend.cross_segment_forward(pair, 0.2, out, lse)
        delta = (out * q).sum(-1).transpose(1, 2)
        grads = backend.cross_segment_backward(q, pair, lse, delta, 0.2)
        return {str(i): x for i, x in enumerate((out, lse, *grads)) if x is not None}

    expected = run_pair()
    monkeypatch.setattr(config, "architecture", lambda: WITHOUT_DESCRIPTORS)
    assert_same_bits(run_pair(), expected)


@pytest.mark.parametrize("kind", ["path_fox", "fox"])
def test_nothing_around_a_view_is_read(kind):
    """Catches tiles that pass the end of a view which is not copied, rows and heads of 16 bytes."""
    inputs = on_device(130, B=2, D=24, DV=16, **KINDS[kind])
    check(inputs.map_floating(lambda x: surrounded(x.detach(), columns=8).requires_grad_()))


def test_negated_keys_of_an_odd_width():
    """Catches a descriptor of the copy that a negative scale makes, with rows of 100 bytes."""
    check(on_device(70, D=25, w=None), scale=-0.3)


def test_gradients_of_an_odd_width():
    """Catches a descriptor of what the backward wrote, with rows of 100 bytes, and gradients that
    come back with the padding that it takes.
    """
    inputs = on_device(70, D=25, H=1)
    check(inputs)
    inputs = inputs.map_floating(torch.detach)
    out, lse = backend.attention_forward(inputs, 0.2)
    grads = backend.attention_backward(out, inputs, out, lse, 0.2)
    assert all(x.is_contiguous() for x in grads if x is not None)


def test_pair_of_one_query_head():
    """Catches a descriptor with the stride of a dimension of one, here 4 bytes."""
    inputs = on_device(64, HQ=1, H=1, gate=True).map(torch.detach)
    gate = inputs.log_gate.transpose(1, 2)
    out, lse = torch.zeros_like(inputs.q), torch.full((1, 1, 64), float("-inf"), device=DEVICE)
    pair = CrossSegment(*inputs[:3], gate, gate, None)
    backend.cross_segment_forward(pair, 0.3, out, lse)
    logits = 0.3 * inputs.q[:, :, 0] @ inputs.k[:, :, 0].mT + gate.mT[..., 0, None] + gate
    torch.testing.assert_close(
        out[:, :, 0], logits.softmax(-1) @ inputs.v[:, :, 0], atol=1e-3, rtol=0
    )
