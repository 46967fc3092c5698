"""Graders of final states that no hidden test grades, one file a kind.

In: what a task expects (contracts/final_states.py) and an episode's state. Out: a `VerifyResult`, as hidden tests give
one, so that verdicts, rewards and reports treat all kinds alike. The expected values never enter a sandbox.
"""
