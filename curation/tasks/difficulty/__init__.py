"""Difficulty of tasks: how often a policy or a scripted agent solves each, and what its fix looks like.

    suite + agent  -> agent_run ------\
    suite + policy -> evaluation_run --> difficulty: pass rate with its interval, pass@k and static features by task

In: runs with the verdicts of graded episodes. Out: the artifact `difficulty`, from which `tasks.difficulty` of an
experiment selects training tasks. May import: contracts, envd.client, curation.
"""
