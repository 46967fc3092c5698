"""Tasks: their sources, their proof in sandboxes, and the scripted expert that demonstrates solutions.

In: a `TaskSuiteConfig` (numbers and a seed) and an envd client. Out: the artifacts `task_suite` and `demonstrations`.

    names, families -> bugs -> suite (Task rows) -> validate (sandboxes) -> build    the task_suite artifact
                         |
                         +--> expert (tool calls and their answers) -> demonstrations     for the base policy's warm-up

May import: contracts, envd.client, envd.tools, curation.errors. `inspect` renders tasks for the command line.
"""
