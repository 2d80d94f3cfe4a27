"""Tokenizers from the Hugging Face Hub: `[model] hf_assets_path = "hf://owner/name"`.

torchtitan reads a folder; here the tokenizer's files of a repository are downloaded into the Hub's
cache first, once, so that a job starts in one command.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import JobConfig
from torchtitan.protocols.train_spec import TrainSpec

PREFIX = "hf://"


def with_hub_tokenizer(spec: TrainSpec) -> TrainSpec:
    """`spec` with a builder of the tokenizer that knows such paths; others are torchtitan's."""
    if spec.build_tokenizer_fn is None:
        return spec
    return replace(
        spec, build_tokenizer_fn=functools.partial(_build_tokenizer, spec.build_tokenizer_fn)
    )


def _build_tokenizer(
    stock: Callable[[JobConfig], BaseTokenizer], job_config: JobConfig
) -> BaseTokenizer:
    path = job_config.model.hf_assets_path
    if path.startswith(PREFIX):
        from huggingface_hub import snapshot_download

        job_config.model.hf_assets_path = snapshot_download(
            path.removeprefix(PREFIX), allow_patterns=["tokenizer*"]
        )
    return stock(job_config)
