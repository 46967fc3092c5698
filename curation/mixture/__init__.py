"""Sources of a mixture for supervised training: episodes of an experiment, and files of chats, as tokens and roles.

rollouts + rewards --accepted--> solved episodes --+
                                                   +--rows--> train.parquet, validation.parquet of one artifact each
JSON lines or Parquet --chats--> tokens, roles ----+

A row of a task that the experiment reserves for its gate or reports is refused, or left out: see `reserved`.
"""
