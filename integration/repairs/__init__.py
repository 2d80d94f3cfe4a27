"""Each file repairs one fault of torchtitan 0.2.2 or torch and says when to delete it.

The repairs are for every attention, `default` too: without them a model does not run or does not
learn, and an attention would be compared with a broken one. `torchtitan/train_spec.py` applies all
but `cpu.py`, which `job_config.py` does.

| file | fault |
|---|---|
| `pipeline_mean_loss.py` | torchtitan #2972: pipelines train on gradients of the summed loss |
| `ddp_mean_gradient.py` | torchtitan #2323: DDP averages gradients that are divided already |
| `tied_embeddings.py` | torchtitan #2522: tied embeddings do not start under FSDP2 |
| `partial_norm_gradients.py` | torchtitan #2217: a norm steps with a rank's part of its gradient |
| `compiled_embedding.py` | pytorch #191113: compiled blocks pass the embedding no gradient |
| `router_gradients.py` | torchtitan #2387: a router steps with a rank's part of its gradient |
| `context_parallel_validation.py` | torchtitan #3257, #2077: the loss is too large; qwen3 fails |
| `context_parallel_metrics.py` | torchtitan #2983, #3111: tokens and largest loss are wrong |
| `validation_data.py` | torchtitan #2636, #2791: validation losses depend on earlier rounds |
| `qwen3_pipeline.py` | not reported: qwen3 has no pipeline parallelism |
| `cpu.py` | not reported: nothing runs on a machine without an accelerator |
"""
