"""Graders of final states other than a diff, one file a kind.

In: what a task expects (contracts/final_states.py) and an episode's state. Out: a `VerifyResult` as hidden tests give
one, or hidden tests, so that verdicts, rewards and reports treat all kinds alike. Expected values never enter the
agent's sandbox.
"""
