"""Perplexity over the length: what a model predicts far beyond the length that it trained on.

A document is read from its start, up to the longest of the asked lengths that it fills. Attention
is causal, so that the losses of its first tokens are those at every shorter length too. A length's
figures are those of the documents that fill it, and of their first tokens only.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

OUTPUT_ROWS = 2048  # tokens whose logits exist at once: 1 GiB of fp32 with a vocabulary of 128 Ki


def read_folder(folder: Path) -> list[str]:
    """The non-empty UTF-8 files under `folder`, in order of their path. Others are left out.

    Raises ValueError if there is none.
    """
    documents = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            try:
                documents.append(path.read_text(encoding="utf-8"))
            except UnicodeDecodeError:
                continue
    documents = [text for text in documents if text.strip()]
    if not documents:
        raise ValueError(f"--text must be a folder with UTF-8 files, got {folder} without one")
    return documents


def long_documents(
    texts: Iterable[str], encode: Callable[[str], list[int]], lengths: Sequence[int], limit: int
) -> list[tuple[int, Tensor]]:
    """At most `limit` documents for each length, as (length, tokens [length + 1]).

    A document counts for the longest length that it fills; those too short for any are left out.
    """
    found: dict[int, list[Tensor]] = {length: [] for length in lengths}
    for text in texts:
        if all(len(held) >= limit for held in found.values()):
            break
        # No token is longer than its bytes: this spares the encoding of what is too short.
        if len(text.encode()) < min(lengths) - 1:
            continue
        tokens = encode(text)
        fitting = [length for length in lengths if len(tokens) > length]
        if fitting and len(found[max(fitting)]) < limit:
            found[max(fitting)].append(torch.tensor(tokens[: max(fitting) + 1]))
    return [(length, tokens) for length in sorted(found) for tokens in found[length]]


@torch.no_grad()
def token_losses(model: nn.Module, forward: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """Cross entropy in nats, fp32 [T], of each next token of tokens [T + 1].

    `forward` calls `model`, whose last layer is `output`. It is applied to a few rows at a time.
    """
    output = model.get_submodule("output")
    model.register_module("output", None)
    try:
        hidden = forward(tokens[None, :-1]).squeeze(0)
    finally:
        model.register_module("output", output)
    rows = zip(hidden.split(OUTPUT_ROWS), tokens[1:].split(OUTPUT_ROWS), strict=True)
    return torch.cat([F.cross_entropy(output(h).float(), t, reduction="none") for h, t in rows])


def summarize(
    losses: Sequence[tuple[int, Tensor]], lengths: Sequence[int], bucket: int
) -> list[dict[str, Any]]:
    """Per length: documents, mean loss, perplexity, and the mean loss of each `bucket` positions.

    losses: (length, loss of its first `length` tokens [length]) of every document. A length that no
    document fills has None in the place of numbers.
    """
    rows = []
    for length in sorted(lengths):
        fitting = [loss[:length] for reached, loss in losses if reached >= length]
        row: dict[str, Any] = {"length": length, "documents": len(fitting), "bucket": bucket}
        if fitting:
            mean = torch.stack(fitting).double().mean(0)
            row |= {
                "loss": mean.mean().item(),
                "perplexity": math.exp(mean.mean().item()),
                "loss_by_position": [part.mean().item() for part in mean.split(bucket)],
            }
        else:
            row |= {"loss": None, "perplexity": None, "loss_by_position": None}
        rows.append(row)
    return rows
