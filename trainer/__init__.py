"""The training plane: supervised warm start (`sft`) and policy gradient (`rl`) on the FP8 weights that are exported.

In: a job (`trainer.config`) that names artifacts: a tokenizer and demonstrations, or a dataset with the checkpoint and
trainer state to continue from. Out: two artifacts under the job's key, `checkpoint` (Hugging Face layout, FP8 blocks)
and `trainer_state` (float32 masters and optimizer), and metrics, one JSON object per step. Runs alone: `python -m
trainer --job job.json`.

    config -> __main__ -> sft | rl -> model (forward) -> optimizers -> export -> store
                            metrics ^      ^ parameters (masters, codes, scales)

May import: contracts, triplane_kernels, torch, safetensors, and `dagster_pipes` (only when Dagster launched the
process).
"""
