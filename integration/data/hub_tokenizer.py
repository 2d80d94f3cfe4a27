"""The tokenizer of text: from a folder, or the Hub with `[model] hf_assets_path = "hf://owner/name"`.

torchtitan reads a folder; here the tokenizer's files of a repository are downloaded into the Hub's
cache first, once, so that a job starts in one command. Text that spells a special token stays text.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

from torchtitan.components.tokenizer import (
    BaseTokenizer,
    HuggingFaceTokenizer,
    build_hf_tokenizer,
)
from torchtitan.config import JobConfig
from torchtitan.protocols.train_spec import TrainSpec

PREFIX = "hf://"


def with_hub_tokenizer(spec: TrainSpec) -> TrainSpec:
    """Returns `spec` with a builder that knows such paths and makes a `TextTokenizer`.

    A spec that has another builder than torchtitan's own keeps the tokenizer which that one makes.
    """
    if spec.build_tokenizer_fn is None:
        return spec
    return replace(
        spec, build_tokenizer_fn=functools.partial(_build_tokenizer, spec.build_tokenizer_fn)
    )


class TextTokenizer(HuggingFaceTokenizer):
    """torchtitan's tokenizer, for which "<|end_of_text|>" inside a text is ordinary text.

    torchtitan 0.2.2 encodes it as the control token, and a document that quotes one would end
    there. Beginning and end of a document are added by their ids.
    """

    def encode(self, *args, **kwargs) -> list[int]:
        self.tokenizer.encode_special_tokens = True  # each time: a copy in a worker loses it
        return super().encode(*args, **kwargs)


def _build_tokenizer(
    stock: Callable[[JobConfig], BaseTokenizer], job_config: JobConfig
) -> BaseTokenizer:
    path = job_config.model.hf_assets_path
    if path.startswith(PREFIX):
        from huggingface_hub import snapshot_download

        job_config.model.hf_assets_path = snapshot_download(
            path.removeprefix(PREFIX), allow_patterns=["tokenizer*"]
        )
    if stock is build_hf_tokenizer:
        return TextTokenizer(job_config.model.hf_assets_path)
    return stock(job_config)
