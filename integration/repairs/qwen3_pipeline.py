"""Not reported: qwen3 has no pipeline parallelism.

torchtitan 0.2.2 names no pipelining function for qwen3, although the model works in stages: its
forward passes over missing modules.

Applies: torchtitan 0.2.2, qwen3, every attention. refusals.py refuses flavors with tied embeddings
or experts in stages.

Delete: when qwen3's spec in the required torchtitan has a `pipelining_fn`, this file and
`with_pipeline` in train_spec.py.
"""

import dataclasses

from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.protocols.train_spec import TrainSpec


def with_pipeline(spec: TrainSpec) -> TrainSpec:
    """Returns `spec` with torchtitan's own function for stages if it names none."""
    return dataclasses.replace(spec, pipelining_fn=spec.pipelining_fn or pipeline_llm)
