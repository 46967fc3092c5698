"""The inference plane: engines that sample from policies, and the agent loop that joins policy and sandbox into
episodes.

In:  a checkpoint directory (contracts.checkpoints), prompts as token ids, tasks, sandboxes.
Out: completions with log-probabilities and policy versions; episodes and sequences as tables.

    rollouts (agent loop) --token ids--> engines (builtin, openai) <--HTTP-- server (`python -m inference serve`)
                                              | several servers    <--gRPC-- bridge (`python -m inference bridge`)
                                              +--> router, which chooses one by what each has cached

May import: contracts, triplane_kernels and, in rollouts, `envd.client` and `envd.tools`.
"""
