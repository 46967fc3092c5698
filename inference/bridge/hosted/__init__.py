"""Hosted episodes: the bridge plays the environment, too.

    StartEpisode names a task --hosting--> prompt, sampling
    Step --turns--> a turn that ended --acting--> tool calls in a sandbox --> observation, or the end and its reward

    state      what the journal keeps of the environment's side
    hosting    the tasks that are served, by which settings, and who grades
    acting     the environment's side of one turn after the other, and the sandboxes

The rules are those of the rollouts (inference.rollouts.environment).
"""
