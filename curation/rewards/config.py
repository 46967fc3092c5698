"""The `rewards` section of an experiment: weights of the two usual components, and a list of further ones.

    reward = solved * [hidden tests pass] + valid * [well conducted] + sum over components of weight * clip(value)

Each component's docstring gives its sign. Penalties have values <= 0, so that a positive weight always penalizes. The
components that need no endpoint are in `shapers`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from curation.endpoint import Endpoint
from curation.rewards.component import Component
from curation.rewards.prompt import JUDGE_TEMPLATE, MODEL_TEMPLATE, check_template
from curation.rewards.shapers import AnyShaper, TestsComponent
from curation.verdicts import CONFIRMED_VERSION

COMPONENTS_VERSION = "2"
"""Bump if a component's value may change for the same episode. Part of the rewards' key only if there are components.
"""

USUAL = ("solved", "valid")


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class _Asked(Component):
    model: str = Field(min_length=1)
    """Model name at the endpoint."""
    revision: str = ""
    """Distinguishes this model from an earlier one of the same name; changing it sends all requests again."""
    max_chars: int = Field(default=60_000, ge=200)
    """Maximum characters of each part in the request; the middle of a longer part is left out."""
    extra: dict[str, JsonValue] = Field(default_factory=dict)
    """Further fields of the request, e.g. {chat_template_kwargs: {enable_thinking: false}}. A null removes a default
    field.
    """
    endpoint: Endpoint
    """Endpoint of the model."""


class JudgeComponent(_Asked):
    """A language model's judgement, in [0, 1] from worst to best, over an OpenAI-compatible chat endpoint."""

    kind: Literal["judge"]
    """Selects this component."""
    template: str = JUDGE_TEMPLATE
    """Prompt of the judge. {task}, {diff}, {transcript} and {reference} are replaced by parts of the episode, fenced
    and marked as data.
    """
    lowest: float = 0.0
    """Worst score on the scale in the prompt."""
    highest: float = 10.0
    """Best score on that scale."""
    samples: int = Field(default=1, ge=1, le=64)
    """Number of judgements of one episode, which are averaged. Each has its own seed, which matters above temperature
    0.
    """
    temperature: float = Field(default=0.0, ge=0, le=2)
    """Sampling temperature of the judge."""
    max_tokens: int = Field(default=512, ge=1)
    """Maximum tokens of the judge's reply."""
    structured: Literal["json_schema", "json_object", "none"] = "json_schema"
    """Value of OpenAI's response_format, which requests the schema in addition to the prompt; none for a server that
    lacks it.
    """

    @model_validator(mode="after")
    def _askable(self) -> Self:
        check_template(self.template)
        if self.lowest >= self.highest:
            raise ValueError(f"lowest {self.lowest} is not below highest {self.highest}: raise highest or lower lowest")
        return self


class RewardModelComponent(_Asked):
    """A reward model's score, as the server returns it, over one of vLLM's scoring routes."""

    kind: Literal["reward_model"]
    """Selects this component."""
    api: Literal["classify", "score", "pooling"] = "classify"
    """Format of request and reply, independent of the URL."""
    input: Literal["text", "chat", "tokens"] = "text"
    """text: the rendered template. chat: the task as the user's message, the template as the assistant's. tokens: the
    token ids of the episode's last context, for a model that shares the policy's tokenizer.
    """
    template: str = MODEL_TEMPLATE
    """Text to score. Placeholders as in a judge's template, without fences."""
    index: int = Field(default=-1, ge=-4096, le=4096)
    """Index into the vector that classify and pooling return; of one vector per token, the last token's is used."""
    activation: bool | None = None
    """Whether the server applies softmax or sigmoid (`use_activation`); null leaves it to the server."""

    @model_validator(mode="after")
    def _askable(self) -> Self:
        check_template(self.template)
        if self.api == "score" and self.input != "text":
            raise ValueError("api score compares two texts: use input text, or api classify or pooling")
        return self


Asked = JudgeComponent | RewardModelComponent
AnyComponent = Annotated[AnyShaper | JudgeComponent | RewardModelComponent, Field(discriminator="kind")]


class RewardConfig(_Part):
    """Weights of the reward's components."""

    solved: float = 1.0
    """Reward for a final state that passes every hidden test."""
    valid: float = 0.1
    """Reward for an episode that the policy ended without a format error and with at least one successful edit, unless
    its final state tampered with its verdict or can't be graded.
    """
    max_ungraded: float = Field(default=0.05, ge=0, le=1)
    """Largest share of episodes left ungraded by infrastructure faults; above it the step fails. Under the
    deterministic profile, without judges, no episode may stay ungraded: the same rollouts always get the same rewards.
    """
    components: tuple[AnyComponent, ...] = ()
    """Further components, added to `solved` and `valid`; see docs/rewards.md."""

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        names = [*USUAL, *(each.name for each in self.components)]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"components: the name {twice} is used twice: give each component its own")
        return self

    @model_serializer(mode="wrap")
    def _leave_out_unset(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Serialize `components` only if set, so that existing action keys stay."""
        values: dict[str, Any] = dump(self)
        if not self.components:
            values.pop("components", None)
        return values

    @property
    def asked(self) -> tuple[Asked, ...]:
        """Components that an endpoint answers. With any of them, repeated grading is equivalent, not identical."""
        return tuple(each for each in self.components if isinstance(each, Asked))

    @property
    def pays_tests(self) -> bool:
        """Whether a component is the share of the tests that passed, so that unsolved states are confirmed."""
        return any(isinstance(each, TestsComponent) for each in self.components)

    def slice(self) -> dict[str, Any]:
        """Settings that affect rewards: all fields except the endpoints."""
        if not self.components:
            return self.model_dump(mode="json")
        values = self.model_dump(mode="json", exclude={"components": {"__all__": {"endpoint"}}})
        versions = {"components_version": COMPONENTS_VERSION}
        return values | versions | ({"confirmed_version": CONFIRMED_VERSION} if self.pays_tests else {})
