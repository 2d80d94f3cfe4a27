"""The tasks as datasets of torchtitan's trainer: what each rank is given, and what it trains."""

import math
from dataclasses import dataclass
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from parity import FP32, JOB, Layout, Parity, assert_same_training
from torchtitan.config import ConfigManager
from torchtitan.models import llama3, qwen3
from torchtitan.protocols import train_spec as registry
from trainer import ROOT, TrainerError, train

from path_backend.integration.data import tasks
from path_backend.integration.torchtitan.flavors import LAYERS, WIDTHS
from path_backend.integration.torchtitan.train_spec import wrap_train_spec
from path_backend.tasks import IGNORE_INDEX, FlipFlop, Mqrar

FLIP_FLOP = ROOT / "configs" / "flip_flop.toml"
NAMES = tuple(tasks.TRAINING)
SETS = [(dataset, name) for dataset, names in tasks.TRAINING.items() for name in names]
CONFIG_OF = {name: ROOT / "configs" / f"{name}.toml" for name in NAMES}
VOCABULARY = {"flip_flop": 5, "a5_word_problem": 61, "s5_swaps": 121, "mqrar": 64}


@pytest.fixture(autouse=True)
def start_from_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


def parse(*arguments, config=FLIP_FLOP):
    return ConfigManager().parse_args([f"--job.config_file={config}", *arguments])


def spec(name="llama3"):
    return wrap_train_spec({"llama3": llama3, "qwen3": qwen3}[name].get_train_spec())


def loader(job, rank=0, ranks=1):
    return spec().build_dataloader_fn(
        dp_world_size=ranks, dp_rank=rank, tokenizer=None, job_config=job
    )


def validation_loader(job, rank=0, ranks=1):
    """What torchtitan's validator holds."""
    builders = ("parallel_dims", "loss_fn", "validation_context", "maybe_enable_amp")
    validator = spec().build_validator_fn(
        job_config=job,
        dp_world_size=ranks,
        dp_rank=rank,
        tokenizer=None,
        metrics_processor=SimpleNamespace(),
        **dict.fromkeys(builders),
    )
    return validator.validation_dataloader


def rows(batches):
    """Inputs and labels of batches as one tensor [sequences, 2, T]."""
    return torch.cat([torch.stack([inputs["input"], labels], 1) for inputs, labels in batches])


@pytest.mark.parametrize("dataset", NAMES)
def test_vocabulary_follows_the_dataset(dataset):
    """An embedding of another size than the tokenizer, or one padded to that of a text."""
    job = parse(config=CONFIG_OF[dataset])
    tokenizer = spec().build_tokenizer_fn(job)
    assert tokenizer.get_vocab_size() == VOCABULARY[dataset]
    ids = list(range(VOCABULARY[dataset]))
    assert tokenizer.encode(tokenizer.decode(ids)) == ids
    assert len(set(tokenizer.decode(ids).split())) == len(ids)
    assert tokenizer.eos_id is None
    for model in ("llama3", "qwen3"):
        for attention in ("default", "path"):
            job.model.attention = attention
            args = spec(model).model_args["debugmodel"]
            args.update_from_config(job)
            with torch.device("meta"):
                built = spec(model).model_cls(args)
            assert built.tok_embeddings.weight.shape[0] == VOCABULARY[dataset]
            assert built.output.weight.shape[0] == VOCABULARY[dataset]
    inputs, labels = next(iter(loader(job)))
    assert inputs["input"].max() < VOCABULARY[dataset]
    assert labels[labels != IGNORE_INDEX].max() < VOCABULARY[dataset]


def test_difficulty_reaches_the_data(tmp_path):
    """A key of [task] that is parsed and not used, or used for a set that fixes it."""
    job = parse("--task.flip_flop.p_ignore=0.5", "--task.mqrar.n_back=3", "--task.mqrar.pairs=7")
    assert tasks.stream(job, "flip_flop", 64).task == FlipFlop(0.5)
    assert tasks.stream(job, "flip_flop_validation", 64).task == FlipFlop(0.5)
    assert tasks.stream(job, "flip_flop_sparse", 64).task == FlipFlop(0.98)
    assert tasks.stream(job, "flip_flop_dense", 64).task == FlipFlop(0.1)
    assert tasks.stream(job, "mqrar", 64).task == Mqrar(3, 7)
    assert tasks.stream(job, "mqrar_validation", 64).task == Mqrar(3, 7)
    job = parse("--training.seq_len=32", "--training.local_batch_size=3")
    assert next(iter(loader(job)))[1].shape == (3, 32)
    job = parse("--validation.seq_len=16", "--validation.local_batch_size=2")
    assert next(iter(validation_loader(job)))[1].shape == (2, 16)


def test_seed_is_of_training_only():
    """Jobs with other seeds that train on the same, or that are measured on something else."""
    jobs = [parse(f"--task.seed={seed}", "--training.seq_len=32") for seed in (0, 1)]
    first, second = (rows(islice(loader(job), 2)) for job in jobs)
    assert not torch.equal(first, second)
    first, second = (rows(islice(validation_loader(job), 2)) for job in jobs)
    assert torch.equal(first, second)


def test_a_step_is_the_same_on_every_layout():
    """Ranks that read the same, or a step whose sequences depend on how they are split."""
    whole = rows(islice(loader(parse("--training.local_batch_size=16")), 2))
    assert len(whole.unique(dim=0)) == 32
    for ranks, accumulate in ((2, 1), (4, 1), (2, 2)):
        job = parse(f"--training.local_batch_size={16 // ranks // accumulate}")
        loaders = [iter(loader(job, rank, ranks)) for rank in range(ranks)]
        batches = [next(batches) for _ in range(2 * accumulate) for batches in loaders]
        assert torch.equal(rows(batches), whole)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_restored_loader_goes_on_where_the_saved_one_stopped(workers):
    """A resume, or a loader with worker processes, that repeats, skips or swaps batches."""
    job = parse(
        "--training.seq_len=16",
        "--training.local_batch_size=4",
        f"--training.dataloader.num_workers={workers}",
    )
    expected = rows(islice(loader(parse("--training.seq_len=16")), 1))[: 4 * 6]
    first = loader(job)
    batches = iter(first)
    before = list(islice(batches, 3))
    state = first.state_dict()
    restored = loader(job)
    restored.load_state_dict(state)
    assert torch.equal(rows([*before, *islice(restored, 3)]), expected)


def test_every_validation_is_on_the_same_sequences():
    """Losses of different steps that cannot be compared, or torchtitan left with our loader."""
    job = parse("--validation.local_batch_size=8", "--validation.seq_len=32")
    text = tasks.validate.build_text_validation_dataloader
    batches = validation_loader(job)
    assert tasks.validate.build_text_validation_dataloader is text
    first = rows(islice(batches, 3))
    assert torch.equal(rows(islice(batches, 3)), first)
    split = [iter(validation_loader(job, rank, 2)) for rank in (0, 1)]
    assert torch.equal(rows([next(split[0]), next(split[1]), next(split[0])]), first)


@pytest.mark.parametrize("dataset, name", SETS)
def test_evaluation_batches_are_the_validation_set(dataset, name):
    """An evaluation on other sequences than the trainer's, or whose size changes them."""
    job = parse(
        f"--validation.dataset={name}",
        *("--validation.local_batch_size=5", "--validation.seq_len=72"),
        *("--task.mqrar.pairs=8", "--training.seq_len=72"),
        config=CONFIG_OF[dataset],
    )
    expected = rows(islice(validation_loader(job), 2))
    for options in ({}, {"batch_size": 4}, {"batch_size": 100}):
        batches = list(tasks.evaluation_batches(job, name, 10, **options))
        assert max(len(b["tokens"]) for b in batches) <= options.get("batch_size", 5)
        got = torch.cat([torch.stack([b["tokens"], b["labels"]], 1) for b in batches])
        assert torch.equal(got, expected)
    (longer,) = tasks.evaluation_batches(job, name, 2, seq_len=144)
    assert longer["tokens"].shape == longer["labels"].shape == (2, 144)


def test_evaluation_sets_of_other_datasets_are_refused():
    """Errors of one task reported under the name of another."""
    assert tasks.evaluation_sets("python_stdlib") == ()
    message = r'of training.dataset = "flip_flop" \(flip_flop_validation, .*\), got \'mqrar_valid'
    with pytest.raises(ValueError, match=message):
        next(tasks.evaluation_batches(parse(), "mqrar_validation", 1))


@pytest.mark.parametrize("validation", ["--validation.enable", "--validation.no-enable"])
def test_unknown_dataset(validation):
    """Catches a search for a tokenizer, or blame for the other key, before what was mistyped."""
    message = "training.dataset must be one of flip_flop, .*, c4, .*, got 'flipflop'"
    with pytest.raises(ValueError, match=message):
        spec().build_tokenizer_fn(parse("--training.dataset=flipflop", validation))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["--training.dataset=flip_flop_dense"],
            "training.dataset must be one of flip_flop, a5_word_problem, s5_swaps, mqrar, or "
            "text, got "
            "'flip_flop_dense', which is for evaluation",
        ),
        (
            ["--validation.dataset=c4_validation"],
            "validation.dataset must be one of flip_flop_validation, flip_flop_sparse, .* for "
            "training.dataset = \"flip_flop\", got 'c4_validation'",
        ),
        (["--validation.dataset=mqrar_validation"], "got 'mqrar_validation'"),
        (["--validation.dataset=flip_flop"], "got 'flip_flop'"),
        (
            ["--training.dataset=python_stdlib"],
            "must be text for training.dataset = \"python_stdlib\", got 'flip_flop_sparse'",
        ),
        (["--training.dataset=flipflop"], "the tasks are flip_flop, a5_word_problem, s5_swaps"),
        (
            ["--training.dataset_path=/tmp"],
            "training.dataset_path must not be set for flip_flop, which is drawn, got '/tmp'",
        ),
        (
            ["--validation.dataset_path=/tmp"],
            "validation.dataset_path must not be set for flip_flop_sparse, .* got '/tmp'",
        ),
        (
            ["--validation.steps=-1"],
            "validation.steps must be a number of batches for flip_flop_sparse, .* got -1",
        ),
        (["--training.seq_len=33"], "flip_flop needs an even length of at least 4 tokens, got 33"),
        (["--validation.seq_len=2"], "flip_flop needs an even length of at least 4 tokens, got 2"),
    ],
)
def test_refusals(arguments, message):
    """A job that trains or measures something else than its keys say."""
    job = parse(*arguments)
    with pytest.raises(ValueError, match=message):
        loader(job)
        validation_loader(job)


@pytest.mark.parametrize(
    "lines, message",
    [
        ("task = 1", r"task must be a table \(keys seed, flip_flop, mqrar\), got 1"),
        ("[task]\nsed = 1", r"\[task\] takes the keys seed, .*, got task.sed = 1"),
        ("[task]\nseed = 0.5", "task.seed must be an integer, got 0.5"),
        ("[task]\nmqrar = 2", r"task.mqrar must be a table \(keys n_back, pairs\), got 2"),
        ("[task.flip_flop]\np = 1", r"\[task.flip_flop\] takes the keys p_ignore, got .*\.p = 1"),
        ("[task.flip_flop]\np_ignore = 2", r"flip_flop.p_ignore must be a number .*, got 2"),
        ("[task.mqrar]\nn_back = 0", "mqrar.n_back must be an integer >= 1, got 0"),
    ],
)
def test_wrong_table(tmp_path, lines, message):
    """A wrong key or value of [task] accepted, or refused without its name and value."""
    config = tmp_path / "job.toml"
    config.write_text(
        f'{lines}\n[job]\ncustom_config_module = "path_backend.integration.job_config"\n'
    )
    with pytest.raises(ValueError, match=message):
        parse(config=config)


def test_workers_that_repeat_text_are_refused():
    """Half of the text twice: torchtitan 0.2.2 gives each of two workers all of it."""
    text = ("--training.dataset=python_stdlib", "--validation.no_enable")
    message = "training.dataloader.num_workers must be 0 or 1 for text, got 2: .* Set 1 to"
    with pytest.raises(ValueError, match=message):
        loader(parse(*text, "--training.dataloader.num_workers=2"))


@pytest.mark.parametrize("workers", [0, 1])
def test_text_of_a_worker_is_that_of_none(workers):
    """A worker that is allowed and gives out other text, or starts again after a resume."""
    job = parse(
        *("--training.dataset=python_stdlib", "--validation.no_enable", "--training.seq_len=64"),
        *("--training.local_batch_size=2", f"--training.dataloader.num_workers={workers}"),
        f"--model.hf_assets_path={ROOT}/integration/assets/tokenizer",
    )

    def text_loader():
        tokenizer = spec().build_tokenizer_fn(job)
        return spec().build_dataloader_fn(
            dp_world_size=1, dp_rank=0, tokenizer=tokenizer, job_config=job
        )

    first = text_loader()
    batches = iter(first)
    before = list(islice(batches, 2))
    state = first.state_dict()
    job.training.dataloader.num_workers = 0
    expected = rows(islice(text_loader(), 4))
    job.training.dataloader.num_workers = workers
    restored = text_loader()
    restored.load_state_dict(state)
    assert torch.equal(rows([*before, *islice(restored, 2)]), expected)
    assert len(expected.unique(dim=0)) == 8


def test_text_goes_the_stock_way():
    """A text dataset that meets the tokenizer, loader or validator of the tasks."""
    calls = []

    def record(name):
        return lambda *args, **kwargs: calls.append((name, kwargs.get("job_config", args))) or name

    stock = llama3.get_train_spec()
    for name in ("tokenizer", "dataloader", "validator"):
        setattr(stock, f"build_{name}_fn", record(name))
    wrapped = wrap_train_spec(stock)
    job = parse("--training.dataset=c4", "--validation.dataset=c4_validation")
    assert wrapped.build_tokenizer_fn(job) == "tokenizer"
    assert (
        wrapped.build_dataloader_fn(dp_world_size=1, dp_rank=0, tokenizer=None, job_config=job)
        == "dataloader"
    )
    assert wrapped.build_validator_fn(job_config=job, tokenizer=None) == "validator"
    assert calls == [("tokenizer", (job,)), ("dataloader", job), ("validator", job)]
    args = wrapped.model_args["debugmodel"]
    args.update_from_config(job)
    assert args.vocab_size == llama3.llama3_args["debugmodel"].vocab_size


def test_flavors_are_what_their_names_say():
    """Another width, depth, number of heads or feed-forward size than the name says."""
    spec = registry.get_train_spec("llama3")
    job = parse()
    for layers in LAYERS:
        for width in WIDTHS:
            args = spec.model_args[f"task_{layers}x{width}"]
            args.update_from_config(job)
            with torch.device("meta"):
                model = spec.model_cls(args)
            assert len(model.layers) == layers
            for block in model.layers.values():
                assert block.attention.head_dim == width // 2
                assert block.attention.wk.weight.shape == (width, width)
                assert block.feed_forward.w1.weight.shape == (4 * width, width)
    assert "debugmodel" in spec.model_args
    assert "task_1x64" not in llama3.llama3_args


@pytest.mark.parametrize("attention", ["default", "path_fox"])
def test_task_flavors_start_from_small_weights(attention):
    """Weights of another size than the published runs', in one attention and not in another."""
    spec = registry.get_train_spec("llama3")
    job = parse(f"--model.attention={attention}")
    args = spec.model_args["task_2x128"]
    args.update_from_config(job)
    with torch.device("meta"):
        model = spec.model_cls(args)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert bool((parameter == 1).all()), name
        elif name.endswith("bias"):
            assert bool((parameter == 0).all()), name
        else:
            parameter = parameter.detach()
            error = 5 * 0.02 / math.sqrt(2 * parameter.numel())
            assert float(parameter.std()) == pytest.approx(0.02, abs=error), name


SMALL = {
    "flip_flop": ("--training.seq_len=32", "--validation.seq_len=32"),
    "a5_word_problem": (
        *("--training.seq_len=4", "--validation.seq_len=4"),
        "--training.local_batch_size=64",  # there are 60 answers to tell apart
    ),
    "s5_swaps": ("--training.seq_len=4", "--validation.seq_len=4"),
    "mqrar": (
        *("--training.seq_len=32", "--validation.seq_len=32", "--task.mqrar.pairs=4"),
        *("--model.flavor=task_2x64", "--task.mqrar.n_back=1"),
    ),
}
SHORT = (
    *("--training.local_batch_size=16", "--validation.local_batch_size=16"),
    *("--metrics.log_freq=1", "--checkpoint.no_enable", "--validation.steps=2"),
)


@pytest.mark.parametrize("dataset", NAMES)
def test_trains(tmp_path, dataset):
    """A dataset that the trainer does not take, or a loss divided by more than the labels asked."""
    arguments = (
        *(*SHORT, *SMALL[dataset], "--training.steps=20", "--validation.freq=20"),
        *("--optimizer.lr=1e-2", "--lr_scheduler.warmup_steps=5"),
    )
    run = train(tmp_path, *arguments, config=CONFIG_OF[dataset])
    vocabulary = {**VOCABULARY, "mqrar": 8}[dataset]
    assert run.loss[0] == pytest.approx(math.log(vocabulary), rel=0.15)  # small weights guess
    assert run.validation_loss[0] > run.loss[0] / 2  # after one step
    assert run.validation_loss[1] < run.validation_loss[0] - 0.1


@pytest.mark.parametrize("attention, learns", [("path", True), ("default", False)])
def test_path_learns_flip_flop(tmp_path, attention, learns):
    """A task that hides its answer, or one that shows it to every model."""
    arguments = (
        *(*SHORT, *SMALL["flip_flop"], f"--model.attention={attention}"),
        *("--training.local_batch_size=32", "--optimizer.lr=3e-3"),
        *("--lr_scheduler.warmup_steps=10", "--training.steps=60", "--validation.freq=60"),
    )
    run = train(tmp_path, *arguments, config=FLIP_FLOP)
    for losses in (run.loss, run.validation_loss):
        assert losses[-1] < 0.15 if learns else losses[-1] > 0.4


def test_resume_gives_the_same_losses(tmp_path):
    """A place in the data that a checkpoint misses."""
    arguments = (
        *(*SHORT, *SMALL["flip_flop"], "--checkpoint.enable", "--checkpoint.interval=3"),
        *("--lr_scheduler.total_steps=6", "--validation.no_enable", "--training.steps=6"),
    )
    whole = train(tmp_path / "whole", *arguments, config=FLIP_FLOP)
    first = train(tmp_path / "parts", *arguments, "--training.steps=3", config=FLIP_FLOP)
    second = train(tmp_path / "parts", *arguments, config=FLIP_FLOP)
    assert first.loss + second.loss == whole.loss


@dataclass(frozen=True)
class TaskColumn:
    """A job for parity.py, on a task."""

    job: tuple[str, ...] = (
        *JOB,
        *("--training.dataset=flip_flop", "--validation.dataset=flip_flop_sparse"),
        "--validation.steps=1",  # of the seed checkpoint's job; a layout says its own
        *("--model.name=llama3", "--model.flavor=task_2x64", "--model.attention=path"),
    )


@pytest.fixture(scope="module")
def parity(tmp_path_factory):
    return Parity(tmp_path_factory.mktemp("parity"))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(
            "FSDP2, gradient accumulation",
            # One batch: the validator takes the mean of batches, which differ in what they ask.
            ("--validation.local_batch_size=4", "--validation.steps=1"),
            shard=2,
            accumulate=2,
        ),
        Layout("TP2", tensor=2),
        Layout("PP2", pipeline=2),
    ],
    ids=str,
)
def test_every_layout_trains_the_same(parity, tmp_path, layout):
    """Other sequences on ranks of one data parallel group, or labels counted where none is."""
    run = parity.run(tmp_path, TaskColumn(), layout)
    assert_same_training(run, parity.one_rank(TaskColumn()), FP32)


def test_documents_are_refused(tmp_path):
    """A mask between documents of a task, which has none, met only in the first step."""
    message = "document_mask = true needs a tokenizer with an end-of-text token, got one without"
    with pytest.raises(TrainerError, match=message) as error:
        train(tmp_path, *SHORT, "--model.path.document_mask", config=FLIP_FLOP)
    assert "Trainer is initialized" not in str(error.value)
