"""Text to train on: what every Python interpreter carries, and FineWeb-Edu from the Hub.

`python_stdlib` is real text that needs no network.

A document is one module of the running interpreter's standard library. Left out are test suites,
installed packages, and files made by a generator (codec tables, pydoc topics, _sysconfigdata).
The text differs between Python versions, and so do losses.

The documents are sorted by the SHA-256 of their module name, which shuffles them the same way on
every rank. Names whose digest starts low (about one in ten) are `python_stdlib_validation`, the
held-out part; adding or removing other modules moves no document across that line.

In training, sharding by rank, packing into sequences and resuming are torchtitan's own: each part
is a map-style `datasets.Dataset`, as torchtitan's `c4_test` is, and every data-parallel rank needs
at least one document. `repairs.validation_data` shares out validation.

`fineweb_edu` is the Hub's sample of 100B tokens, streamed. Nothing is asked of the network before a
job loads it.
"""

import hashlib
import sysconfig
import tokenize
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset, load_dataset
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS

TRAINING = "python_stdlib"
VALIDATION = "python_stdlib_validation"
FINEWEB_EDU = "fineweb_edu"
TOKENIZER_DIR = Path(__file__).resolve().parents[1] / "assets" / "tokenizer"

_SKIPPED_FOLDERS = {
    *("test", "tests", "idle_test"),
    *("site-packages", "dist-packages", "lib-dynload", "__pycache__"),
    *("encodings", "pydoc_data"),
}
_HELD_OUT_BELOW = 26  # of 256 values of the digest's first byte


def register() -> None:
    """Add them to torchtitan's table of datasets. Calling it again changes nothing."""
    for name, held_out in ((TRAINING, False), (VALIDATION, True)):
        DATASETS[name] = DatasetConfig(
            path=sysconfig.get_path("stdlib"),
            loader=partial(load, held_out=held_out),
            sample_processor=document_text,
        )
    DATASETS[FINEWEB_EDU] = DatasetConfig(
        path="HuggingFaceFW/fineweb-edu", loader=stream_sample, sample_processor=document_text
    )


def stream_sample(path: str) -> IterableDataset:
    """The sample of 100B tokens of FineWeb-Edu, or of a repository or folder like it."""
    return load_dataset(path, name="sample-100BT", split="train", streaming=True)


def load(path: str, *, held_out: bool) -> Dataset:
    """One part of the modules under `path`, with columns `module` and `text`, in digest order.

    `path` is the standard library unless the job sets `dataset_path`, which may name any folder of
    Python files. Raises ValueError if the part is empty.
    """
    modules = dict(iter_modules(Path(path)))
    names = sorted((name for name in modules if is_held_out(name) == held_out), key=_digest)
    if not names:
        part = "validation" if held_out else "training"
        raise ValueError(
            f"dataset_path must be a folder of Python modules, got {path!r}: "
            f"{len(modules)} modules found, none for the {part} part"
        )
    return Dataset.from_dict({"module": names, "text": [modules[name] for name in names]})


def iter_modules(root: Path) -> Iterator[tuple[str, str]]:
    """Dotted module name and source text of every non-empty module under `root`.

    Raises ValueError for a module that is not text in the encoding it declares (UTF-8 if none).
    """
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if _SKIPPED_FOLDERS.intersection(relative.parts) or path.name.startswith("_sysconfigdata"):
            continue
        try:
            with tokenize.open(path) as source:  # honours the module's coding cookie
                text = source.read()
        except (SyntaxError, UnicodeDecodeError) as error:
            raise ValueError(
                f"dataset_path must hold modules in the encoding they declare, got {path}: {error}"
            ) from error
        if text.strip():
            yield ".".join(relative.with_suffix("").parts), text


def is_held_out(module: str) -> bool:
    """Whether a module belongs to the validation part; depends on its dotted name alone."""
    return _digest(module)[0] < _HELD_OUT_BELOW


def document_text(sample: dict[str, Any]) -> str:
    """The text of one document, as torchtitan's `sample_processor`."""
    return sample["text"]


def _digest(module: str) -> bytes:
    return hashlib.sha256(module.encode()).digest()
