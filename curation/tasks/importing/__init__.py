"""Import tasks: repositories with tests, Harbor tasks, or SWE-bench style rows over local clones, proved as generated
tasks are.

    folder.read_folder, harbor.read_harbor, swebench.read_rows -> Reading (tasks; what can't be one, with its reason)
                                                 |
    suite.import_suite: validate (sandboxes) -> splits -> the task_suite artifact

In: files of the user, git, an envd client. Out: a `task_suite` artifact like a generated one. May import: contracts,
envd.client, curation.errors, curation.tasks. docs/tasks.md describes both formats.
"""
