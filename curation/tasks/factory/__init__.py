"""Make tasks of any repository that has tests: bugs are put into it, and those that its tests notice become tasks.

    source -> baseline -> strategies -> screen -> choose -> prove -> make       the task_suite artifact, with a card
              (sandbox)   candidates    (sandbox) order     text, leaks
                                                            (sandbox)

Each step is a function of its inputs, cached in the store by their digest (`steps`), so that a killed run resumes and
ends with the same suite. The repository's code runs in sandboxes only (`guest`, `inside`). May import: contracts,
envd.client, curation.errors, curation.verify, other modules of curation.tasks.
"""
