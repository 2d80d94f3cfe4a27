"""Flavor `tiny` of llama3 and qwen3 for the trainer tests: two layers, grouped key/value heads.

torchtitan imports it by `[experimental] custom_import`, before it asks for a train spec.
"""

from torchtitan.models.llama3 import TransformerModelArgs, llama3_args
from torchtitan.models.qwen3 import Qwen3ModelArgs, qwen3_args

VOCABULARY = 2048

llama3_args["tiny"] = TransformerModelArgs(
    dim=64, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=VOCABULARY, multiple_of=32
)
qwen3_args["tiny"] = Qwen3ModelArgs(
    dim=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    hidden_dim=128,
    vocab_size=VOCABULARY,
    enable_weight_tying=True,
)

# What the throughput of training is measured on: the shape of Llama 3.2 1B, small vocabulary.
llama3_args["1B"] = TransformerModelArgs(
    dim=2048,
    n_layers=16,
    n_heads=32,
    n_kv_heads=8,
    ffn_dim_multiplier=1.5,
    multiple_of=1024,
    rope_theta=500000,
    vocab_size=VOCABULARY,
    max_seq_len=8192,
)
