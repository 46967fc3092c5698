"""Requests and replies of the HTTP API: OpenAI's, plus `/v1/score`, `/v1/load_weights`, `/v1/withdraw` and
`/version`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class _Request(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StreamOptions(_Request):
    """What a stream has beside tokens."""

    include_usage: bool = False
    """A last event with the numbers of tokens."""


class _Sampling(_Request):
    """Parameters of both completion endpoints."""

    model: str | None = None
    """Any name; the server serves one policy."""
    temperature: float = Field(default=1.0, ge=0, le=100)
    """0 is greedy."""
    top_p: Literal[1] | None = None
    """Only 1: the engine samples from the whole distribution, so that logprobs are exact."""
    n: Literal[1] = 1
    """Only 1: one completion per request."""
    seed: int | None = None
    """Determines all random numbers. Default: the server draws a seed."""
    user: str | None = None
    """Ignored."""
    stream: bool = False
    """Send the answer in parts, while it is sampled, as server-sent events."""
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are those of a stream: send stream=true, or leave them out")
        return self


class CompletionRequest(_Sampling):
    """POST /v1/completions."""

    prompt: str | list[TokenId]
    """Text (encoded with markup disabled) or token ids."""
    max_tokens: int = Field(default=16, ge=1)
    """Tokens to generate at most."""
    logprobs: int | None = Field(default=None, ge=0, le=1)
    """0 or 1: also return log-probabilities of the sampled tokens."""
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=64)
    """Tokens that end the completion and stay in it."""
    return_token_ids: bool = False
    """Also return `token_ids` and `policy_spans` and, unless streamed, `prompt_token_ids` of a text."""
    policy_version: str | None = None
    """Return 409 unless this version is served."""


class ToolFunction(BaseModel):
    """A tool the policy may call."""

    model_config = ConfigDict(frozen=True, extra="allow")
    name: str


class Tool(_Request):
    """OpenAI's wrapper of a tool."""

    type: Literal["function"] = "function"
    function: ToolFunction


class CalledFunction(_Request):
    """A call in OpenAI's format: arguments are a JSON string (an object is accepted, too)."""

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
    """Tools for the system message; replies have `tool_calls`."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens to generate; also accepted as max_completion_tokens."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False


class ScoreRequest(_Request):
    """POST /v1/score."""

    token_ids: list[TokenId] = Field(min_length=1)
    temperature: float = Field(default=1.0, gt=0)
    policy_version: str | None = None
    """Return 409 unless this version is served."""


class LoadRequest(_Request):
    """POST /v1/load_weights."""

    directory: str = Field(min_length=1)
    """A checkpoint directory on the server's machine."""
    version: str = Field(min_length=1)
    """Policy version of tokens from these weights."""


class WithdrawRequest(_Request):
    """POST /v1/withdraw."""

    reason: str = Field(min_length=1)
    """Reason in error replies to clients."""
