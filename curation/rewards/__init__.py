"""Rewards: the value of each episode's final state and conduct.

    reward = solved * [hidden tests pass on the final state] + valid * [ended by itself, no format error, an edit that
    took, a final state that neither tampers nor is ungradable]
             + sum over components of weight * clip(value)

In:  episodes (and their tokens, where a component reads transcripts), tasks, an envd server to verify in, endpoints of
judges. Out: a row of REWARDS an episode, rows of EVIDENCE for its components; verdicts and answers in the store.

`config` is the experiment's section; `shapers` need no endpoint; `traces` are rules over recorded tool calls;
`prompt` and `judges` write requests and read replies, `endpoint` and `answers` send each request once; `grading` joins
them.
"""

from curation.rewards.config import RewardConfig
from curation.rewards.grading import (
    REWARDS_VERSION,
    UNSCORED,
    Graded,
    grade_episodes,
    grade_rollouts,
    is_valid,
    reward_row,
)
from curation.rewards.tables import EVIDENCE, FLIPS, REWARDS, flips

__all__ = [
    "EVIDENCE",
    "FLIPS",
    "REWARDS",
    "REWARDS_VERSION",
    "UNSCORED",
    "Graded",
    "RewardConfig",
    "flips",
    "grade_episodes",
    "grade_rollouts",
    "is_valid",
    "reward_row",
]
