"""Validation on text: the same sequences every round and on every layout, the whole set with -1."""

from itertools import islice

import pytest
import torch

pytest.importorskip("torchtitan")

from torchtitan.components.loss import IGNORE_INDEX  # noqa: E402
from torchtitan.components.tokenizer import HuggingFaceTokenizer  # noqa: E402
from torchtitan.config import JobConfig  # noqa: E402
from trainer import train  # noqa: E402

from path_backend.integration.data import text  # noqa: E402
from path_backend.integration.repairs.validation_data import build_validation_text  # noqa: E402

SEQ_LEN = 32
ROWS = 2


@pytest.fixture(scope="module")
def modules(tmp_path_factory) -> str:
    """A folder of Python files with 9 held-out sequences of 32 tokens: no multiple of a batch."""
    text.register()
    root = tmp_path_factory.mktemp("modules")
    tokens, i = 0, 0
    tokenizer = HuggingFaceTokenizer(str(text.TOKENIZER_DIR))
    while tokens < 9 * (SEQ_LEN + 1):
        name, source = f"m{i}", f"import os\n\nnumber = {i}\nprint(number, os.sep)\n"
        (root / f"{name}.py").write_text(source)
        if text.is_held_out(name):
            tokens += len(tokenizer.encode(source, add_bos=True, add_eos=True))
        i += 1
    assert tokens < 10 * (SEQ_LEN + 1)
    return str(root)


def loader(modules: str, steps: int, *, rank=0, ranks=1, rows=ROWS, seq_len=SEQ_LEN, workers=0):
    job = JobConfig()
    job.validation.dataset, job.validation.dataset_path = text.VALIDATION, modules
    job.validation.seq_len, job.validation.local_batch_size = seq_len, rows
    job.validation.steps, job.validation.dataloader.num_workers = steps, workers
    tokenizer = HuggingFaceTokenizer(str(text.TOKENIZER_DIR))
    return build_validation_text(ranks, rank, tokenizer, job, infinite=steps != -1)


def sequences(batches) -> torch.Tensor:
    """Inputs and labels [sequences, 2, T] of the rows that are not padding."""
    rows = torch.cat([torch.stack([inputs["input"], labels], 1) for inputs, labels in batches])
    return rows[(rows[:, 1] != IGNORE_INDEX).any(-1)]


def in_turn(loaders: list) -> list:
    """Batches of all ranks, in the order of the set. Raises ValueError if a rank has fewer."""
    return [batch for batches in zip(*loaders, strict=True) for batch in batches]


def test_every_iteration_starts_again(modules):
    """A round that goes on where the last one stopped, in the middle or at the end of the set."""
    data = loader(modules, 3)
    first = sequences(islice(data, 3))
    assert len(first.unique(dim=0)) == 3 * ROWS
    assert torch.equal(sequences(islice(data, 4))[: len(first)], first)
    assert torch.equal(sequences(islice(data, 3)), first)
    assert torch.equal(first[:, 0, 1:], first[:, 1, :-1])
    whole = loader(modules, -1)
    assert torch.equal(sequences(whole)[: len(first)], first)
    assert len(sequences(whole)) == 9


def test_more_steps_than_the_set_has_start_it_again(modules):
    """A round that ends early on some rank, whose others then wait for it."""
    assert len(sequences(islice(loader(modules, 20, rank=1, ranks=2), 20))) == 20 * ROWS


@pytest.mark.parametrize("ranks, rows", [(2, 2), (4, 1), (4, 4), (3, 2)])
def test_ranks_share_the_sequences_of_one(modules, ranks, rows):
    """Another set on another layout, or ranks with different numbers of batches."""
    expected = sequences(loader(modules, -1))
    loaders = [loader(modules, -1, rank=r, ranks=ranks, rows=rows) for r in range(ranks)]
    for _ in range(2):
        batches = in_turn(loaders)
        assert torch.equal(sequences(batches), expected)
        assert all(labels.shape == (rows, SEQ_LEN) for _, labels in batches)
    steps = 4 * ROWS // (ranks * rows)
    if steps:
        loaders = [loader(modules, steps, rank=r, ranks=ranks, rows=rows) for r in range(ranks)]
        got = sequences(in_turn([islice(data, steps) for data in loaders]))
        assert torch.equal(got, expected[: len(got)])


@pytest.mark.parametrize("ranks, rows", [(1, 2), (2, 2), (4, 4)])
def test_weights_make_the_mean_of_batches_that_of_tokens(modules, ranks, rows):
    """A short last batch that counts as much as a whole one."""
    loaders = [loader(modules, -1, rank=r, ranks=ranks, rows=rows) for r in range(ranks)]
    batches = zip(*loaders, strict=True)
    weights, counts = [], []
    for batch in batches:
        assert len({data.weight for data in loaders}) == 1
        weights.append(loaders[0].weight)
        counts.append(len(sequences(batch)))
    assert sum(counts) == 9
    shares = [weight / len(weights) for weight in weights]
    assert shares == pytest.approx([count / 9 for count in counts])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"steps": 0}, "validation.steps must be .* or -1 for the whole set, got 0"),
        ({"steps": -2}, "validation.steps must be .* or -1 for the whole set, got -2"),
        ({"steps": 1, "workers": 2}, "validation.dataloader.num_workers must be 0 .*, got 2"),
        (
            {"steps": -1, "seq_len": 4096},
            "validation.seq_len must be less than .* python_stdlib_validation, got 4096",
        ),
    ],
)
def test_refusals(modules, options, message):
    """A validation that dies without a name, or a key that has no effect."""
    with pytest.raises(ValueError, match=message):
        next(iter(loader(modules, **options)))


def job(modules: str, *arguments: str) -> tuple[str, ...]:
    return (
        *("--model.attention=path", "--training.steps=4", "--training.local_batch_size=2"),
        *(f"--training.seq_len={SEQ_LEN}", f"--validation.seq_len={SEQ_LEN}"),
        *("--validation.enable", f"--validation.dataset={text.VALIDATION}"),
        *(f"--validation.dataset_path={modules}", "--validation.freq=1"),
        *(f"--validation.local_batch_size={ROWS}", *arguments),
    )


FROZEN = ("--optimizer.lr=0", "--lr_scheduler.warmup_steps=0")


@pytest.mark.parametrize("steps", [2, -1])
def test_a_frozen_model_has_one_validation_loss(tmp_path, modules, steps):
    """A loss that depends on the number of rounds before."""
    run = train(tmp_path, *job(modules, *FROZEN, f"--validation.steps={steps}"))
    assert len(run.validation_loss) == 4
    assert len(set(run.validation_loss)) == 1


def test_resume_gives_the_same_validation_losses(tmp_path, modules):
    """A resumed run that validates on other text than the run without a break."""
    arguments = job(
        modules,
        *("--validation.steps=2", "--lr_scheduler.total_steps=4"),
        *("--checkpoint.enable", "--checkpoint.interval=2"),
        "--checkpoint.no_last_save_model_only",
    )
    whole = train(tmp_path / "whole", *arguments)
    first = train(tmp_path / "parts", *arguments, "--training.steps=2")
    second = train(tmp_path / "parts", *arguments)
    assert first.validation_loss + second.validation_loss == whole.validation_loss
    assert len(set(whole.validation_loss)) == 4


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory, modules):
    """A seed checkpoint, and the loss of its weights on the whole set, in batches of one."""
    folder = tmp_path_factory.mktemp("one_rank")
    arguments = ("--checkpoint.enable", "--checkpoint.create_seed_checkpoint")
    seed = train(folder / "seed", *job(modules, *arguments)).folder / "checkpoint" / "step-0"
    load = ("--checkpoint.enable", f"--checkpoint.initial_load_path={seed}")
    arguments = ("--validation.steps=-1", "--validation.local_batch_size=1", "--training.steps=1")
    return load, train(folder / "run", *job(modules, *FROZEN, *load, *arguments)).validation_loss


@pytest.mark.parametrize(
    "ranks, split",
    [
        (1, None),  # 4 batches of 2 and one of 1
        (2, "data_parallel_shard"),  # 2 batches of 2 x 2 and one of 1, of one rank
        (2, "pipeline_parallel"),
        (2, "context_parallel"),
    ],
)
def test_the_whole_set_has_one_loss_on_every_layout(tmp_path, modules, one_rank, ranks, split):
    """Ranks that wait for each other, a set cut short, a mean that depends on the batches."""
    load, expected = one_rank
    layout = ("--parallelism.data_parallel_shard_degree=1",) if ranks > 1 else ()
    if split:
        layout += (f"--parallelism.{split}_degree={ranks}",)
    arguments = (*FROZEN, *load, "--validation.steps=-1", "--training.steps=2", *layout)
    run = train(tmp_path, *job(modules, *arguments), ranks=ranks, timeout=60)
    assert run.validation_loss == pytest.approx(expected * 2, rel=1e-6)
