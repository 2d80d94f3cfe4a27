"""Data that does not depend on the layout, and four-layer flavors, for parity.py.

torchtitan imports it by `[experimental] custom_import`.

A text of torchtitan's dataset is split over data parallel ranks by whole documents, and each rank
packs its own: two ranks see other sequences than one. Here each document fills one sequence
exactly, and ranks take documents in turn, so that the 8 sequences of a step are the same on any
number of ranks, in another order. Inside a sequence, end-of-text tokens at random places make
documents for the masks.
"""

import random
from dataclasses import replace
from functools import partial

import tiny_models  # noqa: F401 (adds the flavors)
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models.llama3 import llama3_args
from torchtitan.models.moe import MoEArgs
from torchtitan.models.qwen3 import qwen3_args

from path_backend.integration.data.text import TOKENIZER_DIR, document_text

SEQUENCES = "64 x 96"  # and their tokens; training.dataset_path has others
END_OF_TEXT = "<|end_of_text|>"


def load(sequences: str, *, seed: int):
    """Texts of one token more than a sequence has, the ones that torchtitan adds included."""
    documents, length = (int(x) for x in sequences.split(" x "))
    tokenizer = Tokenizer.from_file(str(TOKENIZER_DIR / "tokenizer.json"))
    words = sorted(w for w in tokenizer.get_vocab() if w[0] == "Ġ" and w[1:].isalpha())
    words = [" " + w[1:] for w in words[:200]]
    weights = [0.05 * len(words)] + [1] * len(words)
    draw = random.Random(seed)
    texts = []
    for _ in range(documents):
        text = "".join(draw.choices([END_OF_TEXT, *words], weights, k=length - 1))
        assert len(tokenizer.encode(text).ids) == length - 1
        texts.append(text)
    return Dataset.from_dict({"text": texts}).to_iterable_dataset()  # one shard: ranks take turns


class ControlText(str):
    """A text in which the name of a special token is that token, not text."""


def control_text(sample: dict[str, str]) -> ControlText:
    return ControlText(document_text(sample))


def encode(self, text: str, *, stock=HuggingFaceTokenizer.encode, **options) -> list[int]:
    if isinstance(text, ControlText):
        self.tokenizer.encode_special_tokens = False
    return stock(self, text, **options)


HuggingFaceTokenizer.encode = encode

for name, seed in (("parity", 0), ("parity_validation", 1)):
    DATASETS[name] = DatasetConfig(SEQUENCES, partial(load, seed=seed), control_text)

for flavors in (llama3_args, qwen3_args):
    flavors["parity"] = replace(flavors["tiny"], n_layers=4)
# A pipeline cannot tie two of its stages.
qwen3_args["parity_tied"] = replace(qwen3_args["parity"], enable_weight_tying=True)
qwen3_args["parity"].enable_weight_tying = False
qwen3_args["parity_experts"] = replace(
    qwen3_args["parity"],
    moe_enabled=True,
    moe_inter_dim=64,
    moe_args=MoEArgs(
        num_experts=4,
        num_shared_experts=0,
        top_k=2,
        score_func="softmax",
        route_norm=True,
        score_before_experts=False,
        use_grouped_mm=False,  # it rounds to bf16
    ),
)


def histc(values: torch.Tensor, *arguments, stock=torch.histc, **options) -> torch.Tensor:
    """torch.histc, of integers on a CPU too: torchtitan counts the tokens of experts with it."""
    countable = values if values.is_cuda else values.float()
    return stock(countable, *arguments, **options).to(values.dtype)


torch.histc = histc
