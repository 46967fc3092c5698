"""Training backends behind one protocol (`base.Backend`). The loops, `trainer.sft` and `trainer.rl`, call nothing else.

In: weights, microbatches and a loss. Out: gradients applied, weights to export, and the trainer state.

    base        protocol, futures, optimizer rules
    torch       the whole model in every process, in fused buffers
    sharded     what the two below share: `policy` (the model as modules), `shards` (optimizer, gathering, staging),
                `expert_parallel` (tokens sent to the ranks of their experts)
    fsdp2       torch's fully_shard
    deepspeed   ZeRO 1 to 3
    choose      opens the backend that a job names

Imports nothing of the loops. DeepSpeed is imported only by a job that names it.
"""
