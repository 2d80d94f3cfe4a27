"""What the tests of the cache share: inputs in parts, a cache for them, exact outputs."""

import torch

from path_backend import path_attention
from path_backend.inference import CacheSpec, PathCache
from path_backend.testing import make_inputs

EXACT = {torch.float64: 1e-10, torch.float32: 1e-5}

KINDS = {
    "path": dict(H=1, DV=8),
    "path_fox": dict(H=2, HQ=4, gate=True),
    "fox": dict(w=None, gate=True),
    "nope": dict(w=None, HQ=4),
}


def inputs_of(T, **case):
    """Inputs without gradients; small heads."""
    case = {"D": 8, **case}
    return make_inputs(T, **case).map(lambda x: x.detach())


def cache_for(inputs, *, group=4, **options):
    """An empty cache for tokens like these."""
    B, _, HQ, D = inputs.q.shape
    names = ("rows", "implementation")
    own = {name: options.pop(name) for name in names if name in options}
    spec = CacheSpec(
        query_heads=HQ,
        heads=inputs.k.shape[2],
        head_dim=D,
        value_dim=inputs.v.shape[3],
        dtype=inputs.q.dtype,
        reflections=inputs.w is not None,
        forget_gate=inputs.log_gate is not None,
        group=group,
        **options,
    )
    return PathCache(spec, own.pop("rows", B), device=inputs.q.device, **own)


def tokens(inputs, start, stop):
    """The inputs of some tokens."""
    return inputs.map(lambda x: x[:, start:stop])


def append(cache, part, **options):
    """`cache.attend` of a part."""
    return part.call(cache.attend, **options)


def appended(cache, inputs, sizes, start=0):
    """Outputs of the tokens from `start` on, appended in calls of these sizes."""
    outs = []
    for size in sizes:
        outs.append(append(cache, tokens(inputs, start, start + size)))
        start += size
    return torch.cat(outs, 1)


def whole(inputs, **options):
    """The output of the training forward, in fp64."""
    exact = inputs.map_floating(lambda x: x.double())
    return exact.call(path_attention, implementation="torch", **options)


def assert_equal(out, exact, dtype=None):
    """Every element within EXACT of the dtype."""
    limit = EXACT[dtype or out.dtype] * max(1.0, exact.abs().max().item())
    error = (out.double() - exact).abs().amax((0, 2, 3))
    worst = error.argmax().item()
    assert error[worst] <= limit, f"token {worst}: error {error[worst]:.2e}, allowed {limit:.2e}"


def snapshot(cache):
    """All that a cache holds, to be compared after an error."""
    numbers = (cache.tokens, cache.closed, cache.documents)
    return numbers, {name: x.clone() for name, x in cache.tensors.items()}


def assert_unchanged(cache, before):
    """The cache holds what `snapshot` saw."""
    numbers, tensors = snapshot(cache)
    assert numbers == before[0]
    assert tensors.keys() == before[1].keys()
    for name, x in tensors.items():
        assert torch.equal(x, before[1][name]), name
