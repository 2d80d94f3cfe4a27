"""[model.path] rope: a RoPE checkpoint becomes a PaTH model, alike in every layout and format."""

import copy

import pytest
import torch
from parity import FP32, Column, Layout, Parity, assert_same_training
from test_config import parse
from torchtitan.models import llama3, qwen3

from path_backend.integration.torchtitan.job import model_args
from path_backend.integration.torchtitan.model import build_model
from path_backend.integration.torchtitan.state_dict import build_adapter

STOCK = {"llama3": llama3, "qwen3": qwen3}
CLOSED_BETA = ("--model.path.beta_start=1e-7", "--model.path.gate_start=0.9999999")
ROPE = ("--model.path.rope",)


def build(name, attention, *arguments):
    """A small model with the attention, and its stock twin with the same weights."""
    import parity_data  # noqa: F401 (adds the flavors)

    job = parse(
        f"--model.name={name}", "--model.flavor=parity", f"--model.attention={attention}",
        "--training.seq_len=96", *arguments,
    )  # fmt: skip
    args = copy.deepcopy(model_args(job))
    spec = STOCK[name].get_train_spec()
    torch.manual_seed(0)
    model, stock = build_model(spec.model_cls, args), spec.model_cls(args.stock())
    with torch.no_grad():
        stock.init_weights(torch.device("cpu"))
        model.init_weights(torch.device("cpu"))
        for parameter in stock.parameters():  # attention that matters
            if parameter.ndim == 2:
                parameter.mul_(8)
    model.load_state_dict(stock.state_dict(), strict=False)
    return model.eval(), stock.eval(), args, spec


@pytest.mark.parametrize("attention", ["path", "path_fox", "fox"])
@pytest.mark.parametrize("name", STOCK)
def test_logits_of_a_rope_checkpoint_stay(name, attention):
    """Catches w left unrotated, another table, order of channels or scaling than the model's."""
    model, stock, args, _ = build(name, attention, *ROPE, *CLOSED_BETA)
    tokens = torch.randint(args.vocab_size, (2, 96), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, actual = stock(tokens), model(tokens)
    assert (actual - expected).norm() / expected.norm() < 1e-5
    plain, *_ = build(name, attention, *CLOSED_BETA)
    with torch.no_grad():
        assert (plain(tokens) - expected).norm() / expected.norm() > 1e-2


@pytest.mark.parametrize("name", STOCK)
def test_hugging_face_layout_is_that_of_the_base_model(name):
    """Catches rows of q, k or w in the wrong order: transformers rotates halves, Llama pairs."""
    model, stock, args, spec = build(name, "path_fox", *ROPE)
    adapter = build_adapter(spec.state_dict_adapter, args, None)
    exported = adapter.to_hf(model.state_dict())
    for key, value in spec.state_dict_adapter(args.stock(), None).to_hf(stock.state_dict()).items():
        assert torch.equal(exported[key], value), key
    loaded = adapter.from_hf(exported)
    for key, value in model.state_dict().items():
        assert torch.equal(loaded[key], value), key
    w_up = exported["model.layers.0.self_attn.path.w_up.weight"]
    moved = not torch.equal(w_up, model.layers["0"].attention.path.w_up.weight)
    assert moved == (name == "llama3")


LAYOUTS = [
    (Layout("CP2", context=2), Column("llama3", "path_fox"), ("--model.path.document_mask",)),
    (Layout("TP2", tensor=2), Column("qwen3", "path"), ()),
    (Layout("PP2 x TP2", pipeline=2, tensor=2), Column("llama3", "fox"), ()),
]


@pytest.fixture(scope="module")
def parity(tmp_path_factory):
    return Parity(tmp_path_factory.mktemp("parity"))


@pytest.mark.parametrize("layout, column, arguments", LAYOUTS, ids=lambda x: str(x))
def test_layouts_train_the_same(parity, tmp_path, layout, column, arguments):
    """Catches positions of a part taken for those of the sequence, or a table cut by heads."""
    arguments = (*ROPE, *arguments)
    run = parity.run(tmp_path, column, layout, *arguments)
    assert_same_training(run, parity.one_rank(column, *arguments), FP32)


@pytest.mark.parametrize("attention", ["nope", "stick_breaking"])
def test_refused_without_reflections_or_gates(attention):
    """Catches a key that is ignored."""
    job = parse(
        "--model.name=llama3", "--model.flavor=debugmodel", f"--model.attention={attention}", *ROPE
    )
    message = "model.path.rope = true needs model.attention to be one of path, path_fox, fox"
    with pytest.raises(ValueError, match=message):
        model_args(job)
