"""Components computed from an episode's row and its verdict alone. Pure functions.

Source of the length shaping: Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale"
(arXiv:2503.14476), equation 13.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, assert_never

from contracts.tasks import Task
from curation.rewards.config import (
    FormatComponent,
    LengthComponent,
    TestsComponent,
    TraceComponent,
    TurnsComponent,
)
from curation.rewards.traces import RULES, Rating, read_calls
from curation.verify import Verdict

Shaper = TestsComponent | FormatComponent | LengthComponent | TurnsComponent | TraceComponent


def shape(component: Shaper, episode: Mapping[str, Any], verdict: Verdict, task: Task) -> Rating:
    """Rating of an episode (a row of EPISODES) and its verdict by one component."""
    match component:
        case TestsComponent():
            passed, total = verdict.tests_passed, verdict.tests_total
            return Rating(passed / total if total else 0.0, f"{passed} of {total} hidden tests passed")
        case FormatComponent():
            return Rating(-float(episode["format_errors"]), f"{episode['format_errors']} calls could not be parsed")
        case LengthComponent(budget=budget, cushion=cushion):
            value = overlong(episode["policy_tokens"], budget, cushion)
            return Rating(value, f"{episode['policy_tokens']} tokens of a budget of {budget}")
        case TurnsComponent(free=free):
            return Rating(-float(max(0, episode["turns"] - free)), f"{episode['turns']} turns, {free} free")
        case TraceComponent(rule=rule):
            return RULES[rule](read_calls(episode["tool_calls"]), task)
        case _:
            assert_never(component)


def overlong(length: int, budget: int, cushion: int) -> float:
    """0 up to budget - cushion, then linear, -1 from `budget` on; ((L_max - L_cache) - |y|) / L_cache in DAPO's
    equation 13.
    """
    return max(-1.0, min(0.0, (budget - cushion - length) / cushion))
