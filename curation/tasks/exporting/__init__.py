"""Write a suite's tasks in the formats of other projects: SWE-bench rows over clones, and Harbor task folders.

    suite -> prepare (names of the failing tests) -> rows.write_rows | harbor.write_folders -> a new folder

In: tasks, the verifier for tasks that do not name their failing tests. Out: a folder that `triplane tasks import`
reads. May import: contracts, envd.client, curation. docs/tasks.md describes both formats.
"""
