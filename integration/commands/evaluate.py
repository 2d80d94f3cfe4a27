"""Evaluate a checkpoint of the trainer on one device: a CPU or a GPU.

    path-backend evaluate --config job.toml --checkpoint outputs/job/checkpoint --step 1000

A job that trains on a task is scored on the evaluation sets of the task: share of errors with a
95 % interval, at the length that it trained on or at `--seq-len`. A job that trains on text is
scored by its perplexity, up to 16 times the length that it trained on, on the held-out modules of
the standard library (or of validation.dataset_path) and on the files of every `--text` folder. The
figures go to a JSON file, and to TensorBoard beside the job's own. Further arguments override keys
of the TOML file, as the trainer's do.
"""

import argparse
import datetime
import json
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torchtitan.components.metrics import TensorBoardLogger
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools import utils
from torchtitan.tools.logging import init_logger, logger

from path_backend.benchmarks.provenance import commit, version
from path_backend.integration.commands import perplexity
from path_backend.integration.commands.arguments import check_job_file, positive_integer
from path_backend.integration.data import tasks
from path_backend.integration.data import text as text_data
from path_backend.integration.data.task_error import count_errors, error_scalars
from path_backend.integration.torchtitan.job import load_job, model_args
from path_backend.integration.torchtitan.state_dict import refuse_other_sizes

FACTORS = (1, 4, 8, 16)  # of training.seq_len: the lengths of perplexity
DOCUMENTS = 64  # of each text and length
# Of a task: 256 sequences of 512 in a forward pass, 8192 drawn at a time. Held out is one sequence
# in eight, which takes about 60 rounds of drawing however many are asked for.
TOKENS_PER_PASS, TOKENS_PER_DRAW = 2**17, 2**22
TRAINER_STATE = ("optimizer.", "lr_scheduler.", "dataloader.", "train_state.")


@dataclass
class Subject:
    """Holds what is evaluated: a model with its weights, in eval mode, and its job."""

    job: JobConfig
    model: nn.Module
    tokenizer: BaseTokenizer | None
    device: torch.device
    step: int

    def precision(self) -> AbstractContextManager:
        """The autocast that the trainer has on one device."""
        dtype = TORCH_DTYPE_MAP[self.job.training.mixed_precision_param]
        return torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32)

    def logits(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] -> [B, T, V], with the masks that the trainer's validator would ask for."""
        try:
            masks = self.model.get_attention_masks(input_batch=tokens, tokenizer=self.tokenizer)
        except TypeError:  # this job has none
            return self.model(tokens)
        return self.model(tokens, attention_masks=masks)


def load_subject(job: JobConfig, checkpoint: Path, longest: int) -> Subject:
    """The job's model with the weights of a checkpoint, able to read `longest` tokens.

    Raises ValueError if the checkpoint is of another model or attention.
    """
    device = torch.device(utils.device_type, 0 if utils.device_type != "cpu" else None)
    spec = get_train_spec(job.model.name)
    tokenizer = spec.build_tokenizer_fn(job) if spec.build_tokenizer_fn else None
    args = model_args(job)
    args.max_seq_len = max(args.max_seq_len, longest)  # the tables of RoPE have as many rows
    with torch.device("meta"), utils.set_default_dtype(TORCH_DTYPE_MAP[job.training.dtype]):
        model = spec.model_cls(args)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights()
    state = model.state_dict()
    saved = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    found = {name for name in saved if not name.startswith(TRAINER_STATE)}
    if found != state.keys():
        raise ValueError(
            f"{checkpoint} must hold the parameters of {job.model.name} {job.model.flavor} with "
            f"model.attention = {getattr(job.model, 'attention', 'default')!r}; "
            f"missing: {_names(state.keys() - found)}; not expected: {_names(found - state.keys())}"
        )
    refuse_other_sizes(str(checkpoint), state, saved)
    dcp.load(state, checkpoint_id=str(checkpoint))
    return Subject(job, model.eval(), tokenizer, device, step_of(checkpoint))


def step_of(checkpoint: Path) -> int:
    """The number in a name that the trainer gave. Raises ValueError for another name."""
    match = re.fullmatch(r"step-(\d+)", checkpoint.name)
    if not match:
        raise ValueError(f"--checkpoint must be named step-<number>, got {checkpoint}")
    return int(match[1])


def find_checkpoint(folder: Path, step: int | None) -> Path:
    """The folder `step-<step>` of a checkpoint folder, or the latest; also one that is given."""
    if (folder / ".metadata").is_file() and step is None:
        step_of(folder)
        return folder
    steps = {step_of(path.parent): path.parent for path in folder.glob("step-*/.metadata")}
    if step is None and steps:
        return steps[max(steps)]
    if step not in steps:
        known = ", ".join(map(str, sorted(steps))) or "none"
        raise ValueError(
            f"--checkpoint must hold a checkpoint{'' if step is None else f' of step {step}'} "
            f"(steps there: {known}), got {folder}"
        )
    return steps[step]


def evaluate_task(subject: Subject, predictions: int, length: int) -> dict[str, Any]:
    """Errors on every evaluation set of the job's task, on `predictions` predictions each."""
    results = {}
    for name in tasks.evaluation_sets(subject.job.training.dataset):
        batches = tasks.evaluation_batches(
            subject.job,
            name,
            sequences=predictions,  # each has at least one
            batch_size=max(1, TOKENS_PER_DRAW // length),
            seq_len=length,
            device=subject.device,
        )
        passes = _split(batches, max(1, TOKENS_PER_PASS // length))
        with subject.precision():
            results[name] = count_errors(subject.logits, passes, predictions)
        logger.info(f"{name}: {_short(results[name])}")
    return results


def _split(batches: Iterable[dict[str, Tensor]], rows: int) -> Iterator[dict[str, Tensor]]:
    """The same sequences, at most `rows` at a time."""
    for batch in batches:
        for first in range(0, len(batch["tokens"]), rows):
            yield {name: x[first : first + rows] for name, x in batch.items()}


def evaluate_text(
    subject: Subject, folders: Sequence[Path], factors: Sequence[int], limit: int
) -> dict[str, Any]:
    """Perplexity over the length, on held-out modules and on each folder."""
    trained = subject.job.training.seq_len
    lengths = [factor * trained for factor in factors]
    tokenizer = subject.tokenizer
    assert tokenizer is not None

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_bos=True, add_eos=True)

    results = {}
    for name, texts in _texts(subject.job, folders).items():
        losses = []
        for length, tokens in perplexity.long_documents(texts, encode, lengths, limit):
            with subject.precision():
                loss = perplexity.token_losses(
                    subject.model, subject.logits, tokens.to(subject.device)
                )
            losses.append((length, loss.cpu()))
        results[name] = perplexity.summarize(losses, lengths, bucket=max(1, trained // 2))
        for row in results[name]:
            logger.info(f"{name}: {_short(row)}")
            if not row["documents"]:
                logger.warning(f"no document of {name} has {row['length'] + 1} tokens")
    return results


def _texts(job: JobConfig, folders: Sequence[Path]) -> dict[str, Sequence[str]]:
    held_out = text_data.DATASETS[text_data.VALIDATION]
    validates = job.validation.dataset == text_data.VALIDATION
    path = (job.validation.dataset_path if validates else None) or held_out.path
    texts: dict[str, Sequence[str]] = {text_data.VALIDATION: held_out.loader(path)["text"]}
    return texts | {str(folder): perplexity.read_folder(folder) for folder in folders}


def describe(job: JobConfig, command: str) -> dict[str, Any]:
    """Returns what a result depends on: command, job, card, versions, date."""
    on_gpu = torch.cuda.is_available()
    return {
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "versions": {
            "path-backend": commit(),
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            **{name: version(name) for name in ("triton", "torchtitan")},
        },
        "job": {
            "config_file": job.job.config_file,
            "model": f"{job.model.name} {job.model.flavor}",
            "attention": getattr(job.model, "attention", "default"),
            "dataset": job.training.dataset,
            "dataset_path": job.training.dataset_path,
            "validation_dataset_path": job.validation.dataset_path,
            "seq_len": job.training.seq_len,
            "batch_size": job.training.local_batch_size,
            "precision": job.training.mixed_precision_param,
            "lr": job.optimizer.lr,
            "seed": job.debug.seed,
        },
    }


def evaluate(
    job: JobConfig,
    checkpoint: Path,
    *,
    predictions: int,
    seq_len: int | None = None,
    text: Sequence[Path] = (),
    factors: Sequence[int] | None = None,
    documents: int | None = None,
    command: str,
) -> dict[str, Any]:
    """Load a checkpoint and score it; the result is what the JSON file holds.

    `seq_len` is of a task's sequences, that of training if None; `text`, `factors` and `documents`
    are of text (by default `FACTORS` and `DOCUMENTS`).
    """
    is_task = bool(tasks.evaluation_sets(job.training.dataset))
    if is_task:
        what = "is a task"
        foreign = {"--text": text, "--factors": factors, "--documents": documents}
    else:
        what, foreign = "is text, whose lengths are --factors", {"--seq-len": seq_len}
    for name, value in foreign.items():
        if value:
            raise ValueError(
                f'{name} must be left out for training.dataset = "{job.training.dataset}", which '
                f"{what}, got {value}"
            )
    length, factors = seq_len or job.training.seq_len, factors or FACTORS
    longest = length * (1 if is_task else max(factors))
    subject = load_subject(job, checkpoint, longest)
    result = describe(job, command) | {
        "checkpoint": str(checkpoint),
        "step": subject.step,
        "parameters": sum(p.numel() for p in subject.model.parameters()),
    }
    if is_task:
        difficulty = {"length": length, "task": tasks.describe(job)}
        return result | difficulty | {"sets": evaluate_task(subject, predictions, length)}
    return result | {"perplexity": evaluate_text(subject, text, factors, documents or DOCUMENTS)}


def other_length(result: dict[str, Any]) -> str:
    """Returns what names of files and scalars add: nothing at the length of training."""
    length = result.get("length", result["job"]["seq_len"])
    return "" if length == result["job"]["seq_len"] else f"_at_{length}"


def scalars(result: dict[str, Any]) -> dict[str, float]:
    """A result as TensorBoard's scalars."""
    values: dict[str, float] = {}
    for name, scores in result.get("sets", {}).items():
        place = f"evaluation/{name}{other_length(result)}"
        values |= error_scalars(place, scores) | {f"{place}/loss": scores["loss"]}
    for name, rows in result.get("perplexity", {}).items():
        for row in rows:
            if row["perplexity"] is not None:
                values[f"evaluation/{name}/perplexity_at_{row['length']}"] = row["perplexity"]
    return values


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="path-backend evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, required=True, help="TOML file of the job")
    parser.add_argument(
        "--checkpoint", type=Path, required=True, help="the job's checkpoint folder"
    )
    parser.add_argument("--step", type=int, help="step of the checkpoint (default: the latest)")
    parser.add_argument("--output", type=Path, help="JSON file (default: in job.dump_folder)")
    parser.add_argument(
        "--predictions", type=positive_integer, default=100_000, help="per evaluation set of a task"
    )
    parser.add_argument(
        "--seq-len", type=positive_integer, help="tokens of a task's sequence (default: as trained)"
    )
    parser.add_argument(
        "--text", type=Path, action="append", default=[], help="folder of UTF-8 files; repeatable"
    )
    parser.add_argument(
        "--factors",
        type=positive_integer,
        nargs="+",
        help="lengths of text / training.seq_len (default: 1 4 8 16)",
    )
    parser.add_argument(
        "--documents",
        type=positive_integer,
        help=f"documents per text and longest length they fill (default: {DOCUMENTS})",
    )
    options, overrides = parser.parse_known_args(arguments)
    init_logger()
    check_job_file("--config", options.config)
    job = load_job([f"--job.config_file={options.config}", *overrides])
    checkpoint = find_checkpoint(options.checkpoint, options.step)
    result = evaluate(
        job,
        checkpoint,
        predictions=options.predictions,
        seq_len=options.seq_len,
        text=options.text,
        factors=options.factors,
        documents=options.documents,
        command=f"path-backend evaluate {shlex.join(arguments)}",
    )
    folder = Path(job.job.dump_folder)
    name = f"step-{result['step']}{other_length(result)}.json"
    output = options.output or folder / "evaluation" / name
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")
    board = TensorBoardLogger(str(folder / job.metrics.save_tb_folder / "evaluation"))
    board.log(scalars(result), result["step"])
    board.close()
    logger.info(f"Written to {output}")


def _names(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _short(values: dict[str, Any]) -> str:
    """The numbers of a result on one line."""
    flat = {name: value for name, value in values.items() if not isinstance(value, dict | list)}
    return "  ".join(
        f"{name} {value:.5g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in flat.items()
    )


if __name__ == "__main__":
    main()
