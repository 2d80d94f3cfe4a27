"""Context parallelism in torchtitan: refusals, layouts, masks and logged numbers.

That jobs train as on one rank is tested in test_parallel.py.
"""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from context_simulation import shard
from ranks import on_ranks
from test_config import SINGLE, configured_args, own_parallelize, parse
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.components.validate import Validator
from torchtitan.distributed import context_parallel as stock
from torchtitan.models import llama3

from path_backend.context_parallel.layout import Layout
from path_backend.integration.repairs import context_parallel_metrics, context_parallel_validation
from path_backend.integration.torchtitan import context_parallel, train_spec
from path_backend.layers.segmented import Segmented

CP2 = "--parallelism.context_parallel_degree=2"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ("--training.seq_len=510",),
            r"training.seq_len must be a multiple of .*context_parallel_degree .* = 4, got 510",
        ),
        (
            ("--validation.seq_len=514",),
            r"validation.seq_len must be a multiple of .*context_parallel_degree .* = 4, got 514",
        ),
        (
            ("--training.seq_len=516", "--parallelism.tensor_parallel_degree=2"),
            r"training.seq_len .* parallelism.tensor_parallel_degree = 8, got 516",
        ),
        (
            ("--parallelism.context_parallel_load_balancer=ptrr",),
            r"context_parallel_load_balancer must be one of \('headtail', None\) .*, got 'ptrr'",
        ),
        (
            ("--model.path.context_parallel=heads", "--parallelism.tensor_parallel_degree=16"),
            r'"heads" needs .*context_parallel_degree .* the 1 key/value heads of each rank, got 2',
        ),
        (
            ("--model.attention=stick_breaking",),
            r'context_parallel_degree must be 1 with model.attention = "stick_breaking", got 2',
        ),
    ],
)
def test_refusals(arguments, message):
    """A job that fails in its first step or in its first validation being started."""
    configured_args(parse(CP2))
    with pytest.raises(ValueError, match=message):
        configured_args(parse(CP2, *arguments))
    configured_args(parse(CP2, *arguments, "--model.attention=default"))
    if "stick_breaking" not in message:
        configured_args(parse(*arguments))


def test_refuses_a_rotate_method_of_a_file():
    """A method of a TOML file, which torchtitan does not check, taken for another one."""
    job = parse(CP2)
    job.parallelism.context_parallel_rotate_method = "ring"
    message = r"rotate_method must be one of \('allgather', 'alltoall'\) .*, got 'ring'"
    with pytest.raises(ValueError, match=message):
        configured_args(job)


def test_validation_that_is_off_may_have_any_length():
    """A job refused for a length that it does not use."""
    configured_args(parse(CP2, "--validation.seq_len=514", "--validation.no-enable"))


def test_replaces_a_flavor_that_refuses():
    """llama3's refusal of its varlen attention although another takes its place."""
    configured_args(parse(CP2), "debugmodel_varlen_attn")


def test_needs_a_parallelize_fn_that_asks_for_it():
    """A model of someone else trained with attention inside each rank's tokens only."""
    dims = SimpleNamespace(cp_enabled=True)
    with (
        pytest.raises(ValueError, match="has apply_cp_to_attention_module, got none in test_"),
        context_parallel.applied(own_parallelize, None, dims, None),
    ):
        pass
    with context_parallel.applied(own_parallelize, None, SINGLE, None):
        pass


def positions_of(layout, rank, batch=1):
    tokens = torch.arange(layout.segments * layout.length, dtype=torch.int32)
    return shard(tokens.expand(batch, -1), layout, rank)


class Model(torch.nn.Module):
    """Counts the positions of the blocks; stands for a parallelized model."""

    def __init__(self):
        super().__init__()
        block = torch.nn.Module()
        block.attention = torch.nn.Module()
        self.layers = torch.nn.ModuleDict({"0": block})

    def forward(self, tokens, positions=None):
        return self.layers["0"].attention.segmented.layout


def forwards_on_rank(group):
    """Layouts of forwards with two lengths, and what forwards without or with others are told."""
    model, segmented = Model(), Segmented(group)
    context_parallel.share_sequences(model, segmented)
    layouts = []
    for length in (4, 6, 4, 4):
        positions = positions_of(Layout.head_tail(2, length), group.rank())
        layouts.append(model(None, positions=positions))
    assert layouts[0] is layouts[2] is layouts[3]  # or compiled blocks would be compiled again
    messages = []
    for wrong in ({"positions": positions + 1}, {}):
        with pytest.raises((RuntimeError, ValueError)) as error:
            model(None, **wrong)
        messages.append(str(error.value))
    return layouts[:2], messages


def test_every_forward_has_its_layout():
    """The layout of another length, read again in each forward, or not compared with later ones."""
    expected = [Layout.head_tail(2, 4), Layout.head_tail(2, 6)]
    for layouts, (other, without) in on_ranks(2, forwards_on_rank):
        assert layouts == expected
        assert "positions of 8 tokens must stay those of the first forward" in other
        assert "needs the keyword argument positions" in without


def masks_on_rank(group):
    """This rank's tokens in torchtitan's two layouts."""
    mesh = init_device_mesh("cpu", (2,))
    tokens = torch.arange(16).reshape(2, 8)
    mask = torch.tensor([[0, 0, 2, 2, 2, 5, 5, 5], [0, 1, 1, 1, 1, 1, 1, 7]], dtype=torch.int32)
    mine = []
    for balancer in ("headtail", None):
        (cut, labels), cut_mask = stock.cp_shard(mesh, (tokens, tokens + 1), mask, balancer)
        (alone,), nothing = stock.cp_shard(mesh, (tokens,), None, balancer)
        assert nothing is None and torch.equal(alone, cut) and torch.equal(labels, cut + 1)
        with pytest.raises((TypeError, AssertionError)):  # no kind of mask
            stock.cp_shard(mesh, (tokens,), "mask", balancer)
        assert cut_mask.dtype == torch.int32 and torch.equal(cut_mask, mask[:, cut[0]])
        mine.append(cut[0].tolist())
    return mine


def test_masks_are_cut_like_tokens():
    """A document mask of other tokens than the rank has, or another kind of mask left whole."""
    first, second = [[0, 1, 6, 7], [0, 1, 2, 3]], [[2, 3, 4, 5], [4, 5, 6, 7]]
    assert on_ranks(2, masks_on_rank) == [first, second]


class CountOps(TorchDispatchMode):
    """Counts the runs of each op of this package by name."""

    def __init__(self):
        super().__init__()
        self.runs = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "path_backend":
            self.runs[func.name().removeprefix("path_backend::")] += 1
        return func(*args, **(kwargs or {}))


def checkpointed_on_rank(group):
    """Runs of the ops in a training step with selective checkpointing per op."""
    ac = (
        "--activation_checkpoint.mode=selective",
        "--activation_checkpoint.selective_ac_option=op",
    )
    job = parse(CP2, *ac, "--training.seq_len=32")
    spec = train_spec.wrap_train_spec(llama3.get_train_spec())
    args = spec.model_args["debugmodel"]
    args.n_layers, args.dim = 2, 64
    args.update_from_config(job)
    dims = replace(SINGLE, cp=2, world_size=2)
    model = spec.parallelize_fn(spec.model_cls(args), dims, job)
    with torch.no_grad():
        model.init_weights()
    positions = positions_of(Layout.head_tail(2, 8), group.rank())
    with CountOps() as count:
        model(torch.ones(1, 16, dtype=torch.int64), positions=positions).sum().backward()
    return count.runs


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a gloo group, torchtitan a GPU then")
def test_selective_checkpointing_keeps_attention_and_halo():
    """An op missing from the save list: it and its transfers would run twice."""
    once = dict.fromkeys(("context_parallel_attention", "halo"), 2)  # in each of two layers
    both = {name + suffix: runs for name, runs in once.items() for suffix in ("", "_backward")}
    assert on_ranks(2, checkpointed_on_rank) == [both, both]


def test_logged_numbers():
    """Tokens counted once per rank of a sequence (#2983), a part's loss over all tokens (#3111)."""
    logged = []
    processor = SimpleNamespace(log=lambda *args, **kwargs: logged.append((args, kwargs)))
    context_parallel_metrics.count_once(processor, 4)
    processor.log(7, 2.0, 0.75, 1.5, extra_metrics={"n_tokens_seen": 4096, "lr": 0.1})
    processor.log(8, 2.0, 0.75, 1.5)
    assert logged == [
        ((7, 2.0, 3.0, 1.5), {"extra_metrics": {"n_tokens_seen": 1024, "lr": 0.1}}),
        ((8, 2.0, 3.0, 1.5), {"extra_metrics": {}}),
    ]


class OwnValidator(Validator):
    def __init__(self, parallel_dims):
        self.parallel_dims = parallel_dims


class OwnLoop(OwnValidator):
    def validate(self, model_parts, step):
        pass


def test_validators_that_count_in_their_own_way_are_left_alone():
    """A validator of someone else whose loss would be divided twice."""
    dims = SimpleNamespace(cp_enabled=True, dp_cp_enabled=True, get_mesh=lambda dims: dims)
    build = context_parallel_validation.build_validator
    repaired = build(OwnValidator, parallel_dims=dims).parallel_dims
    assert repaired.dp_enabled and repaired.get_mesh("batch") == "loss"
    assert repaired.get_mesh("cp") == "cp" and repaired.cp_enabled
    assert build(OwnLoop, parallel_dims=dims).parallel_dims is dims
    assert build(OwnValidator, parallel_dims=SINGLE).parallel_dims is SINGLE
