"""Checkpoints that a job cannot go on from are refused before they are read, with a way out.

torchtitan 0.2.2 names a missing key of its files, or says that another number of data parallel
ranks is not supported.
"""

import functools
import re
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torchtitan.components.checkpoint import DATALOADER, CheckpointManager

from path_backend.integration.torchtitan.state_dict import OURS, names_in_layers, refuse_other_sizes

_RANK = re.compile(rf"{DATALOADER}\.dp_rank_\d+")


def refuse_other_checkpoints() -> None:
    """Let torchtitan call `check` before it loads a checkpoint of its own kind. Call it once."""
    load = CheckpointManager.dcp_load

    @functools.wraps(load)
    def checked(self, state_dict, checkpoint_id, from_hf, from_quantized):
        if not from_hf:
            check(state_dict, checkpoint_id)
        load(self, state_dict, checkpoint_id, from_hf, from_quantized)

    CheckpointManager.dcp_load = checked


def check(state_dict: dict[str, Any], folder: str) -> None:
    """Refuse a folder with other parameters of attention or another number of places in the data.

    Raises ValueError that names what `state_dict` asks for and what the folder holds.
    """
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    ours = {name: value for name, value in state_dict.items() if OURS.fullmatch(name)}
    missing = names_in_layers(ours.keys() - saved.keys())
    surplus: set[str] = set()
    if any(name.startswith("layers.") for name in state_dict):  # a stage may have no layer
        surplus = names_in_layers(saved.keys()) - names_in_layers(ours.keys())
    for has, names, then in (
        ("without", missing, "would stay initial"),
        ("with", surplus, "are left out"),
    ):
        if names:
            raise ValueError(
                f"{folder} must be of the same model.attention and [model.path], got one {has} "
                f"{', '.join(sorted(names))} in its layers. Through Hugging Face's format "
                f"(checkpoint.last_save_in_hf, checkpoint.initial_load_in_hf) they {then}"
            )
    tensors = {name: x for name, x in state_dict.items() if isinstance(x, Tensor)}
    refuse_other_sizes(folder, tensors, saved)
    if DATALOADER in state_dict:
        ranks = state_dict[DATALOADER].state_dict().get("world_size")
        found = sum(map(bool, map(_RANK.fullmatch, saved)))
        if ranks and found and ranks != found:
            raise ValueError(
                f"{folder} must hold the places in the data of {ranks} data parallel ranks, got "
                f'{found}: checkpoint.exclude_from_loading = ["dataloader"] starts the data again'
            )
