"""The agent loop: policy and sandbox make episodes; groups of them make the rollouts of an iteration.

    draw_prompts -> RolloutPlan -> run_shard (one a worker) -> group artifacts -> merge_groups -> rollouts artifact
                                   play_groups: sample each group (oversampling.py) and commit it; evaluations and
                                   the smoke episode too
                                   play_episode: query the engine, execute tool calls in the sandbox, until the policy
                                   stops

In: a plan, tasks, an engine, an envd client, a grader (injected: grading belongs to another plane). Out: `group` and
`rollouts` artifacts, or what the caller's `Commits` make of a group's episodes. May import: contracts,
inference.engines.base, envd.client and envd.tools. Imported by resources and the layers above.
"""

ROLLOUTS_VERSION = "2"
"""Part of the action key of rollouts and evaluation runs: bumped when the same inputs would give other tokens."""
