"""The curation plane: tasks, grading, and the selection of episodes that train.

In:  a task suite's configuration; rollouts (episodes and their tokens); an envd server to verify in.
Out: `task_suite`, `tokenizer`, `demonstrations`, `rewards` and `dataset` artifacts, verdicts in the store, and
intervals to decide by.

    rollouts --verify--> verdicts --rewards--> rewards --dataset--> train rows, and a reason for each row left out
                (cached by task, final state, verifier)

`verify` and `rewards` grade, `dataset` selects (DuckDB over Parquet), `statistics` compares policies, `tasks` makes
suites and demonstrations, `pipeline` makes tables of data. Holds rewards and groups, never advantages: those are the
trainer's.

May import: contracts, envd.client, envd.tools, duckdb. Never torch, dagster or another plane.
"""
