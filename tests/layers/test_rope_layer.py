"""RoPE and reflections in one layer, against products of transitions R H_s and RoPE alone."""

import pytest
import torch
import torch.nn.functional as F

from path_backend import PathAttention
from path_backend.beta import beta_from_logits

DIM, HEADS, KV_HEADS, HEAD_DIM, T = 32, 4, 2, 8, 12


def angles():
    return torch.tensor([1.0, 0.3, 0.1, 0.03], dtype=torch.float64)


def rotation(order, tokens=T):
    """R^t of every token [T, D, D]; `order` is how channels are paired."""
    matrices = torch.zeros(tokens, HEAD_DIM, HEAD_DIM, dtype=torch.float64)
    half = HEAD_DIM // 2
    for pair, angle in enumerate(angles()):
        first, second = (pair, pair + half) if order == "half" else (2 * pair, 2 * pair + 1)
        turn = angle * torch.arange(tokens)
        matrices[:, first, first] = matrices[:, second, second] = turn.cos()
        matrices[:, second, first], matrices[:, first, second] = turn.sin(), -turn.sin()
    return matrices


def rotate_by(matrices):
    def rotate(x, y):
        return tuple(torch.einsum("tde,bthe->bthd", matrices.to(z.dtype), z) for z in (x, y))

    return rotate


def make_layer(dtype=torch.float64, **options):
    torch.manual_seed(0)
    options = {"w_rank": 5, "rope": True} | options
    layer = PathAttention.from_sizes(DIM, HEADS, KV_HEADS, **options).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(10)
    return layer


def test_transitions_are_rotations_times_reflections():
    """Catches w left unrotated, or rotated by another position than its token's."""
    layer = make_layer()
    x = torch.randn(1, T, DIM, dtype=torch.float64)
    plain, matrices = make_layer(rope=False), rotation("half")
    q, k, v = (f(x).view(T, -1, HEAD_DIM) for f in (plain.wq, plain.wk, plain.wv))
    w, beta, _ = plain.path(x, None, x.dtype)
    R, eye = matrices[1], torch.eye(HEAD_DIM, dtype=torch.float64)
    out = torch.zeros(T, HEADS, HEAD_DIM, dtype=torch.float64)
    for head in range(HEADS):
        kv = head // (HEADS // KV_HEADS)
        for i in range(T):
            logits, product = torch.zeros(i + 1, dtype=torch.float64), eye
            for j in range(i, -1, -1):
                logits[j] = k[j, kv] @ product @ q[i, head] * HEAD_DIM**-0.5
                reflection = eye - beta[0, j, kv] * torch.outer(w[0, j, kv], w[0, j, kv])
                product = R @ reflection @ product
            out[i, head] = logits.softmax(0) @ v[: i + 1, kv]
    expected = plain.wo(out.view(1, T, -1))
    actual = layer(x, rotate=rotate_by(matrices))
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("order", ["half", "interleaved"])
@pytest.mark.parametrize("gates", [False, True])
def test_small_beta_is_the_base_model(order, gates):
    """Catches a start that is not where the base model stands: 1e-5 of it, in fp32."""
    beta_start, gate_start = 1e-7, 1 - 1e-7
    layer = make_layer(
        torch.float32, forget_gate=gates, beta_start=beta_start, gate_start=gate_start
    )
    layer.path.init_weights()
    rotate = rotate_by(rotation(order))
    x = torch.randn(2, T, DIM)
    q, k, v = (f(x).view(2, T, -1, HEAD_DIM) for f in (layer.wq, layer.wk, layer.wv))
    q, k, v = (y.transpose(1, 2) for y in (*rotate(q, k), v))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    expected = layer.wo(attended.transpose(1, 2).flatten(2))
    error = (layer(x, rotate=rotate) - expected).norm() / expected.norm()
    assert error < 1e-5


def test_rotated_w_keeps_reflections_contractive():
    """Catches a bound of beta taken from w before its last rounding: |H| would exceed 1."""
    layer = make_layer(torch.bfloat16, beta_start=1.9999)
    layer.path.init_weights()
    x = torch.randn(4, T, DIM).bfloat16()
    w, beta, _ = layer.path(x, None, torch.bfloat16, rotate=rotate_by(rotation("half")))
    assert (1 - beta * w.float().square().sum(-1)).min() >= -1
    assert beta_from_logits(torch.full((4, T, KV_HEADS), 20.0), w)[0].min() > 1.9


def test_starts():
    """Catches a start in other units than beta's and the gate's own."""
    layer = make_layer(forget_gate=True, beta_start=0.01, gate_start=0.998)
    layer.path.init_weights()
    _, beta, log_gate = layer.path(torch.zeros(1, 2, DIM, dtype=torch.float64), None, torch.float64)
    torch.testing.assert_close(beta, torch.full_like(beta, 0.01))
    torch.testing.assert_close(log_gate.exp(), torch.full_like(log_gate, 0.998))


def test_errors():
    """Catches a rotation that is ignored, or one that is missing."""
    x = torch.randn(1, T, DIM, dtype=torch.float64)
    with pytest.raises(ValueError, match="rotate must be the host's rotation with rope = True"):
        make_layer()(x)
    with pytest.raises(ValueError, match="rotate must be None with rope = False"):
        make_layer(rope=False)(x, rotate=rotate_by(rotation("half")))
    with pytest.raises(ValueError, match="rope = True needs reflections, a forget gate or both"):
        make_layer(reflections=False)
    for start in (0, 2):
        with pytest.raises(ValueError, match=rf"beta_start must be in \(0, 2\), got {start}"):
            make_layer(beta_start=start)
