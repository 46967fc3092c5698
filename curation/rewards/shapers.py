"""Shapers: components of the reward that are computed from an episode's row and its verdict alone.

To add one, write its class here and name it in `AnyShaper`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from contracts.tasks import Task
from curation.rewards.component import Component
from curation.rewards.traces import RULES, Rating, RuleName, read_calls
from curation.verdicts import Verdict


class Shaper(Component):
    """Base of components computed from an episode's row and its verdict alone."""

    @abstractmethod
    def rate(self, episode: Mapping[str, Any], verdict: Verdict, task: Task) -> Rating:
        """Rating of an episode (a row of EPISODES). A pure function."""


class TestsComponent(Shaper):
    """Share of the task's hidden tests that passed, in [0, 1], also of an unsolved state confirmed by decoys and
    observations; see docs/rewards.md.
    """

    __test__ = False
    kind: Literal["tests"]
    """Selects this component."""

    def rate(self, episode: Mapping[str, Any], verdict: Verdict, task: Task) -> Rating:
        """See Shaper.rate."""
        passed, total = verdict.tests_passed, verdict.tests_total
        return Rating(passed / total if total else 0.0, f"{passed} of {total} hidden tests passed")


class FormatComponent(Shaper):
    """Minus the number of tool calls that could not be parsed."""

    kind: Literal["format"]
    """Selects this component."""

    def rate(self, episode: Mapping[str, Any], verdict: Verdict, task: Task) -> Rating:
        """See Shaper.rate."""
        return Rating(-float(episode["format_errors"]), f"{episode['format_errors']} calls could not be parsed")


class LengthComponent(Shaper):
    """Soft penalty for long episodes, in [-1, 0]: DAPO's overlong shaping, by the tokens that the policy sampled."""

    kind: Literal["length"]
    """Selects this component."""
    budget: int = Field(ge=1)
    """Policy tokens at which the value reaches -1."""
    cushion: int = Field(ge=1)
    """Tokens before the budget over which the value falls linearly from 0 to -1."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.cushion > self.budget:
            raise ValueError(f"cushion {self.cushion} exceeds budget {self.budget}: lower it")
        return self

    def rate(self, episode: Mapping[str, Any], verdict: Verdict, task: Task) -> Rating:
        """See Shaper.rate."""
        value = overlong(episode["policy_tokens"], self.budget, self.cushion)
        return Rating(value, f"{episode['policy_tokens']} tokens of a budget of {self.budget}")


def overlong(length: int, budget: int, cushion: int) -> float:
    """0 up to budget - cushion, then linear, -1 from `budget` on.

    ((L_max - L_cache) - |y|) / L_cache in equation 13 of Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning
    System at Scale" (arXiv:2503.14476).
    """
    return max(-1.0, min(0.0, (budget - cushion - length) / cushion))


class TurnsComponent(Shaper):
    """Minus the number of turns beyond the free ones."""

    kind: Literal["turns"]
    """Selects this component."""
    free: int = Field(default=0, ge=0)
    """Turns that cost nothing."""

    def rate(self, episode: Mapping[str, Any], verdict: Verdict, task: Task) -> Rating:
        """See Shaper.rate."""
        return Rating(-float(max(0, episode["turns"] - self.free)), f"{episode['turns']} turns, {self.free} free")


class TraceComponent(Shaper):
    """A named rule over the recorded tool calls, in [0, 1]. `triplane experiments raters` lists the rules."""

    kind: Literal["trace"]
    """Selects this component."""
    rule: RuleName
    """Name of the rule."""

    def rate(self, episode: Mapping[str, Any], verdict: Verdict, task: Task) -> Rating:
        """See Shaper.rate."""
        return RULES[self.rule](read_calls(episode["tool_calls"]), task)


AnyShaper = TestsComponent | FormatComponent | LengthComponent | TurnsComponent | TraceComponent
