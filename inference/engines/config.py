"""Which engine serves a policy: a discriminated union, one entry a kind."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class BuiltinConfig(_Config):
    """The CPU engine in this process."""

    kind: Literal["builtin"] = "builtin"
    max_batch: int = Field(default=256, ge=1, le=4096)
    """Sequences computed at once."""
    threads: int | None = Field(default=None, ge=1)
    """Torch threads; null for torch's own default. Two beside other load are slower than one."""
    prefix_megabytes: int = Field(default=512, ge=0)
    """Memory for the state of finished turns, in MiB; 0 turns reuse off."""


class OpenAIConfig(_Config):
    """A server that takes and returns token ids over the OpenAI completions API: `python -m inference serve`, or vLLM."""

    kind: Literal["openai"] = "openai"
    base_url: str
    """Up to and including `/v1`, e.g. http://localhost:8000/v1."""
    model: str = "policy"
    """The name the server gives the policy."""
    connections: int = Field(default=256, ge=1)
    """Requests in flight at most."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Deadline of one call, in seconds."""
    retries: int = Field(default=4, ge=0, le=20)
    """More attempts after a connection fault; any answer, even an error, is final."""


EngineConfig = Annotated[BuiltinConfig | OpenAIConfig, Field(discriminator="kind")]
