"""pytorch #191113: the embedding gets no gradient under tensor parallelism with compiled blocks.

The sharded embedding returns a collective in flight. On torch 2.13 a compiled block that receives
one passes no gradient back: the embedding would not train (with FSDP2) or the backward fails
(without). Here the output is copied.

Applies: torch 2.13, tensor_parallel_degree > 1 with compile.enable, every attention.

Delete: when every supported torch contains https://github.com/pytorch/pytorch/pull/191113 or is
older than 2.13, this file and `compiled_embedding.finish` in train_spec.py. The rows "TP2, compile"
of tests/integration/test_parallel.py pass without it then.
"""

from torch import nn
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims


def finish(model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig) -> None:
    """Copies the output of the embedding, if this part of the model has one and is compiled."""
    compiled = parallel_dims.tp_enabled and job_config.compile.enable
    if compiled and model.tok_embeddings is not None:
        model.tok_embeddings.register_forward_hook(lambda module, inputs, output: output.clone())
