"""The `dataset` section of an experiment: rules that leave episodes out of training, all but one off by default.

Each rule changes which episodes the policy gradient is an average over; docs/dataset.md gives the bias of each.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator


class _Rule(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Requirement(_Rule):
    """Bounds of one reward component's value. An episode without a value, since its agent broke its own sandbox, is
    left out.
    """

    component: str
    """Name in `rewards.components`. The value is the clipped one, before its weight, which may be 0."""
    at_least: float | None = None
    """Lowest value that trains; null: no bound."""
    at_most: float | None = None
    """Highest value that trains; null: no bound."""

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if self.at_least is None and self.at_most is None:
            raise ValueError(f"require of {self.component} has no bound: set at_least or at_most")
        if self.at_least is not None and self.at_most is not None and self.at_least > self.at_most:
            raise ValueError(f"at_least {self.at_least} exceeds at_most {self.at_most}: swap them")
        return self


class Agreement(_Rule):
    """Judgements that must agree. Otherwise the episode counts as not graded, in its group's mean too."""

    components: tuple[str, ...] = Field(min_length=1)
    """Names in `rewards.components`, whose values are compared; or one judge with several `samples`, whose judgements
    of the episode are.
    """
    within: float = Field(ge=0)
    """Largest difference between the highest and the lowest of them; a judge's scale is 0 to 1."""

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        if len(set(self.components)) < len(self.components):
            raise ValueError(f"agree compares {', '.join(self.components)}: name each component once")
        return self


class Distinct(_Rule):
    """Leave out near-duplicates: of similar episodes of one group with the same test result, the one with the lowest
    sample number trains.
    """

    similarity: float = Field(gt=0, le=1)
    """Jaccard index of two episodes' sets of n-grams from which they are similar: 1 for equal sets. For more than 512
    different n-grams it is estimated, with a standard error of at most 0.022.
    """
    ngram: int = Field(default=8, ge=1, le=64)
    """Length of the n-grams, in tokens that the policy sampled."""


class Cap(_Rule):
    """Bound on the number of groups of one kind that train in an iteration. The rest is chosen at random, by seed."""

    by: Literal["task", "template", "family", "pass_rate"]
    """Kind of a group: its task, the files that its sandboxes start from, its task's family, or the share of its own
    graded episodes that are solved.
    """
    max_groups: int = Field(ge=1)
    """Groups of each kind that train, of those that other rules leave."""
    bins: int | None = Field(default=None, ge=2, le=100)
    """Equal intervals that pass rates are divided into; null: 4. Only `by: pass_rate` has any."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of the choice."""

    @property
    def intervals(self) -> int:
        """Intervals that pass rates are divided into."""
        return self.bins or 4

    @model_validator(mode="after")
    def _bins_are_used(self) -> Self:
        if self.bins is not None and self.by != "pass_rate":
            raise ValueError(f"bins={self.bins}: only by pass_rate divides into bins: leave it out")
        return self


class DatasetConfig(_Rule):
    """Rules that leave episodes out of training."""

    drop_zero_variance: bool = True
    """Leave out groups without variance in the value that `variance_of` names."""
    variance_of: Literal["solved", "reward"] = "solved"
    """Value that must differ within a group that trains. solved: the result of the hidden tests, which
    `rollouts.refill` compares too (dynamic sampling of DAPO, arXiv:2503.14476, without shaping). reward: the whole
    reward, to learn from judges and other components where all members have the same test result; requires
    `rollouts.refill: false`.
    """
    max_tokens: int | None = Field(default=None, ge=1)
    """Longest sequence to train on, in tokens; null: no limit."""
    drop_truncated: bool = False
    """Leave out episodes that ran out of tokens or turns. They still count in their group's mean."""
    min_deviation: float = Field(default=0.0, ge=0)
    """Least standard deviation (divisor n - 1) of the rewards of a group that trains. Where advantages are divided by
    it, smaller ones would magnify noise.
    """
    min_reward: float | None = None
    """Least reward to train on; null: no limit. Episodes below it still count in their group's mean."""
    require: tuple[Requirement, ...] = ()
    """Bounds of components that an episode must meet to train. Others still count in their group's mean."""
    agree: tuple[Agreement, ...] = ()
    """Judgements that must agree on an episode; otherwise it counts as not graded."""
    min_policy_tokens: int = Field(default=1, ge=1)
    """Fewest tokens that the policy sampled in an episode to train on. Shorter ones still count in their group's mean.
    """
    distinct: Distinct | None = None
    """Rule against near-duplicates; null: none. Those left out still count in their group's mean."""
    caps: tuple[Cap, ...] = ()
    """Bounds on the groups of one kind, applied in order after all other rules."""

    @model_serializer(mode="wrap")
    def _leave_out_unset(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Dump the fields. Newer ones are left out if unset, so that action keys stay as they are without them."""
        values: dict[str, Any] = dump(self)
        kept = ("drop_zero_variance", "variance_of", "max_tokens", "drop_truncated")
        fields = type(self).model_fields
        return {
            name: value for name, value in values.items() if name in kept or getattr(self, name) != fields[name].default
        }

    @property
    def components(self) -> frozenset[str]:
        """Names of the components whose values the rules read."""
        required = (each.component for each in self.require)
        return frozenset(required).union(*(each.components for each in self.agree))

    @property
    def by_family(self) -> bool:
        """Whether a rule reads the families of tasks."""
        return any(each.by == "family" for each in self.caps)
