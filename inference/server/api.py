"""Requests and replies of the HTTP API: OpenAI's, plus `/v1/score`, `/v1/load_weights`, `/v1/withdraw` and
`/version`.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class _Request(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Sampling(_Request):
    """Parameters of both completion endpoints."""

    model: str | None = None
    """Any name; the server serves one policy."""
    temperature: float = Field(default=1.0, ge=0, le=100)
    """0 is greedy."""
    top_p: Literal[1] | None = None
    """Only 1: the engine samples from the whole distribution, so that its logprobs are exact."""
    n: Literal[1] = 1
    """One completion a request; ask again for more."""
    seed: int | None = None
    """Fixes every random number. Without one the server draws it."""
    stream: bool = False
    """Must be false."""
    user: str | None = None
    """Ignored."""

    @model_validator(mode="after")
    def _refuse_streaming(self) -> Self:
        if self.stream:
            raise ValueError("streaming is not supported: send stream=false")
        return self


class CompletionRequest(_Sampling):
    """POST /v1/completions."""

    prompt: str | list[int]
    """Text (encoded with markup disabled) or token ids."""
    max_tokens: int = Field(default=16, ge=1)
    """Tokens to generate at most."""
    logprobs: int | None = Field(default=None, ge=0, le=1)
    """Any number: log-probabilities of the sampled tokens."""
    stop_token_ids: list[int] = Field(default_factory=list, max_length=64)
    """Tokens that end the completion and stay in it."""
    return_token_ids: bool = False
    """Also answer with `token_ids` and `policy_spans`."""
    policy_version: str | None = None
    """Refuse (409) unless this version is being served."""


class ToolFunction(BaseModel):
    """A tool the policy may call."""

    model_config = ConfigDict(frozen=True, extra="allow")
    name: str


class Tool(_Request):
    """OpenAI's wrapper of a tool."""

    type: Literal["function"] = "function"
    function: ToolFunction


class CalledFunction(_Request):
    """A call as OpenAI writes it: arguments are a JSON string (an object is accepted too)."""

    name: str
    arguments: str | dict[str, Any]


class CalledTool(_Request):
    """One entry of an assistant message's tool_calls."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(_Request):
    """One chat message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    tool_calls: list[CalledTool] = Field(default_factory=list)
    tool_call_id: str | None = None


class ChatRequest(_Sampling):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    tools: list[Tool] = Field(default_factory=list)
    """Described to the policy in the system message; answers carry `tool_calls`."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Tokens to generate at most; also as max_completion_tokens."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False


class ScoreRequest(_Request):
    """POST /v1/score."""

    token_ids: list[int] = Field(min_length=1)
    temperature: float = Field(default=1.0, gt=0)
    policy_version: str | None = None
    """Refuse (409) unless this version is being served."""


class LoadRequest(_Request):
    """POST /v1/load_weights."""

    directory: str = Field(min_length=1)
    """A checkpoint directory on the server's machine."""
    version: str = Field(min_length=1)
    """What tokens of these weights are stamped with."""


class WithdrawRequest(_Request):
    """POST /v1/withdraw."""

    reason: str = Field(min_length=1)
    """What clients are told."""
