"""The offline dataset and tokenizer, through torchtitan's own data loaders."""

import pickle
import socket
from itertools import islice
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchtitan")

from torchtitan.components.tokenizer import HuggingFaceTokenizer  # noqa: E402
from torchtitan.config import JobConfig  # noqa: E402
from torchtitan.hf_datasets import text_datasets  # noqa: E402
from torchtitan.models import llama3  # noqa: E402

from path_backend.integration.data import text  # noqa: E402
from path_backend.integration.data.hub_tokenizer import TextTokenizer  # noqa: E402
from path_backend.integration.data.make_tokenizer import BOS, EOS, VOCAB_SIZE  # noqa: E402
from path_backend.integration.torchtitan.train_spec import wrap_train_spec  # noqa: E402

SEQ_LEN = 512


@pytest.fixture(autouse=True)
def registered():
    text.register()


@pytest.fixture(scope="module")
def tokenizer():
    return HuggingFaceTokenizer(str(text.TOKENIZER_DIR))


def stdlib_part(held_out):
    config = text_datasets.DATASETS[text.VALIDATION if held_out else text.TRAINING]
    return config.loader(config.path)


def training_loader(tokenizer, rank=0, ranks=1):
    job = JobConfig()
    job.training.dataset = "python_stdlib"
    job.training.seq_len = SEQ_LEN
    job.training.local_batch_size = 2
    return text_datasets.build_text_dataloader(ranks, rank, tokenizer, job)


def write_modules(root: Path, *names: str) -> str:
    for name in names:
        path = root / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"name = {name!r}\n")
    return str(root)


def test_registering_leaves_the_other_datasets_alone():
    """Catches an overwritten c4 entry, and a second registration that fails or adds names."""
    stock = {name: text_datasets.DATASETS[name] for name in ("c4", "c4_test", "c4_validation")}
    text.register()
    assert {name: text_datasets.DATASETS[name] for name in stock} == stock
    assert set(text_datasets.DATASETS) >= {"python_stdlib", "python_stdlib_validation"}


def test_parts_are_disjoint_and_the_held_out_one_is_about_a_tenth():
    """Catches validation text that was trained on, and a part too small to measure."""
    training, validation = (set(stdlib_part(held_out)["module"]) for held_out in (False, True))
    assert not training & validation
    assert 0.05 < len(validation) / len(training | validation) < 0.2
    assert {"json.decoder", "inspect"} <= training | validation


def test_a_module_stays_in_its_part_when_others_come_and_go(tmp_path):
    """Catches a split by position: one more module would leak held-out text into training."""
    names = [f"m{i}" for i in range(60)]
    few = text.load(write_modules(tmp_path / "few", *names[:40]), held_out=True)["module"]
    many = text.load(write_modules(tmp_path / "many", *names), held_out=True)["module"]
    assert list(few) == [name for name in many if name in names[:40]]


def test_tests_packages_and_generated_tables_are_left_out(tmp_path):
    """Catches a walk into test suites or installed packages, which differ between machines."""
    skipped = (
        "test/a",
        "json/tests/b",
        "site-packages/pip/c",
        "encodings/cp037",
        "_sysconfigdata_x",
    )
    root = write_modules(tmp_path, "json/decoder", "testing", *skipped)
    (tmp_path / "empty.py").write_text("\n")
    assert sorted(name for name, _ in text.iter_modules(Path(root))) == [
        "json.decoder",
        "testing",
    ]


def test_a_module_is_read_in_its_own_encoding(tmp_path):
    """Catches decoding by the locale: such a module would crash a run or train on mojibake."""
    (tmp_path / "old.py").write_bytes("# coding: latin-1\nname = 'é'\n".encode("latin-1"))
    assert dict(text.iter_modules(tmp_path))["old"] == "# coding: latin-1\nname = 'é'\n"


def test_a_module_that_is_not_text_is_named(tmp_path):
    """Catches a run that ends over one file of thousands, and does not say which."""
    path = tmp_path / "broken.py"
    path.write_bytes(b"name = '\xff'\n")
    with pytest.raises(ValueError, match=f"in the encoding they declare, got {path}: "):
        text.load(str(tmp_path), held_out=False)


@pytest.mark.parametrize("held_out, part", [(False, "training"), (True, "validation")])
def test_an_empty_part_is_refused(tmp_path, held_out, part):
    """Catches a mistyped dataset_path, on which the infinite loader would spin for ever."""
    with pytest.raises(ValueError, match=f"got '{tmp_path}': 0 modules found, none for the {part}"):
        text.load(str(tmp_path), held_out=held_out)


def test_ranks_read_different_documents_and_nothing_from_the_network(tokenizer, monkeypatch):
    """Catches ranks that train on the same text, and a loader that asks a hub."""

    def refuse(*args):
        raise AssertionError("the loader opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    modules = stdlib_part(held_out=False)
    half = (len(modules) + 1) // 2
    for rank, first in ((0, modules[0]), (1, modules[half])):
        inputs, labels = next(iter(training_loader(tokenizer, rank, ranks=2)))
        expected = tokenizer.encode(first["text"], add_bos=True, add_eos=True)[:SEQ_LEN]
        assert inputs["input"][0, : len(expected)].tolist() == expected
        assert torch.equal(inputs["input"][:, 1:], labels[:, :-1])


def test_a_restored_loader_goes_on_where_the_saved_one_stopped(tokenizer):
    """Catches a resume that repeats or skips text."""
    loader = training_loader(tokenizer)
    batches = iter(loader)
    list(islice(batches, 3))
    state = loader.state_dict()
    expected = list(islice(batches, 3))

    restored = training_loader(tokenizer)
    restored.load_state_dict(state)
    for (got, got_labels), (want, want_labels) in zip(islice(restored, 3), expected, strict=True):
        assert torch.equal(got["input"], want["input"])
        assert torch.equal(got_labels, want_labels)


def test_validation_reads_the_held_out_part(tokenizer):
    """Catches a validation name that torchtitan cannot use or that yields training text."""
    job = JobConfig()
    job.validation.dataset = "python_stdlib_validation"
    job.validation.seq_len = 64
    loader = text_datasets.build_text_validation_dataloader(1, 0, tokenizer, job)
    first = stdlib_part(held_out=True)[0]["text"]
    expected = tokenizer.encode(first, add_bos=True, add_eos=True)[:64]
    assert next(iter(loader))[0]["input"][0, : len(expected)].tolist() == expected


def test_tokenizer_marks_both_ends_of_a_document(tokenizer):
    """Catches a BOS or EOS that torchtitan does not recognise: documents could not be cut."""
    assert (tokenizer.bos_token, tokenizer.eos_token) == (BOS, EOS)
    ids = tokenizer.encode("pass\n", add_bos=True, add_eos=True)
    assert ids[0] == tokenizer.bos_id == 0
    assert ids[-1] == tokenizer.eos_id == 1
    assert not {0, 1} & set(ids[1:-1])


def test_text_that_spells_a_special_token_is_text(tokenizer):
    """A document that quotes the end-of-text token, cut there: attention would stop inside it."""
    quoting = f"a = '{EOS}'\nb = '{BOS}'\n"
    assert tokenizer.encode(quoting).count(tokenizer.eos_id) == 1  # torchtitan's
    ours = TextTokenizer(str(text.TOKENIZER_DIR))
    for copy in (ours, pickle.loads(pickle.dumps(ours))):  # as a worker process has it
        ids = copy.encode(quoting, add_bos=True, add_eos=True)
        assert (ids[0], ids[-1]) == (copy.bos_id, copy.eos_id)
        assert not {copy.bos_id, copy.eos_id} & set(ids[1:-1])
        assert copy.decode(ids[1:-1]) == quoting
    assert ours.encode("plain") == tokenizer.encode("plain")


def test_a_job_reads_such_text_from_its_data(tmp_path):
    """A tokenizer that is right and not the one that a job gets."""
    (tmp_path / "m0.py").write_text(f"a = '{EOS}'\n")
    assert not text.is_held_out("m0")
    job = JobConfig()
    job.model.hf_assets_path = str(text.TOKENIZER_DIR)
    job.training.dataset, job.training.dataset_path = text.TRAINING, str(tmp_path)
    job.training.seq_len, job.training.local_batch_size = 64, 1
    spec = wrap_train_spec(llama3.get_train_spec())
    tokenizer = spec.build_tokenizer_fn(job)
    loader = spec.build_dataloader_fn(
        dp_world_size=1, dp_rank=0, tokenizer=tokenizer, job_config=job
    )
    ids = next(iter(loader))[0]["input"][0].tolist()
    ends = [i for i, token in enumerate(ids[:-1]) if token == tokenizer.eos_id]
    assert ends and all(ids[i + 1] == tokenizer.bos_id for i in ends)


def test_tokenizer_fits_the_debug_flavours():
    """Catches a vocabulary larger than the embedding: an index error on the first batch."""
    from torchtitan.models.llama3 import llama3_args

    tokenizer = HuggingFaceTokenizer(str(text.TOKENIZER_DIR))
    assert tokenizer.get_vocab_size() == VOCAB_SIZE == llama3_args["debugmodel"].vocab_size


@pytest.mark.parametrize(
    "text", ["def f(x):\n\treturn  x\r\n\n", "naïve 漢字 🙂", bytes(range(128)).decode()]
)
def test_tokenizer_loses_nothing(tokenizer, text):
    """Catches a normaliser, a prefix space or a missing byte."""
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokenizer_compresses_code(tokenizer):
    """Catches an asset whose merges were lost: it would still load, at one byte per token."""
    text = stdlib_part(held_out=True)[0]["text"]
    assert len(text.encode()) > 2.5 * len(tokenizer.encode(text))


def test_fineweb_edu_is_streamed_when_it_is_loaded(monkeypatch):
    """Another sample or split than the paper's text, or the Hub asked before a job needs it."""
    calls = []
    monkeypatch.setattr(text, "load_dataset", lambda *a, **k: calls.append((a, k)))
    config = text_datasets.DATASETS["fineweb_edu"]
    assert not calls
    config.loader(config.path)
    expected = {"name": "sample-100BT", "split": "train", "streaming": True}
    assert calls == [(("HuggingFaceFW/fineweb-edu",), expected)]
    assert config.sample_processor({"text": "words"}) == "words"
