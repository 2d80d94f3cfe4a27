"""A job of the trainer, read outside the trainer."""

import importlib
from collections.abc import Sequence

from torchtitan.config import ConfigManager, JobConfig
from torchtitan.protocols.model import BaseModelArgs
from torchtitan.protocols.train_spec import get_train_spec


def load_job(arguments: Sequence[str]) -> JobConfig:
    """The job of `--job.config_file=...` and overrides, after its own imports."""
    job = ConfigManager().parse_args(list(arguments))
    if job.experimental.custom_import:
        importlib.import_module(job.experimental.custom_import)
    return job


def model_args(job: JobConfig) -> BaseModelArgs:
    """Arguments of the job's model, as the trainer makes them. They are the flavor's own object."""
    args = get_train_spec(job.model.name).model_args[job.model.flavor]
    args.update_from_config(job)
    return args
