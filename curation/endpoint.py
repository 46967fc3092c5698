"""Settings of an endpoint of a model: of a judge, a reward model, or one that writes tasks or columns."""

from __future__ import annotations

import re
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from contracts.environment import VARIABLE

_HOST = re.compile(r"https?://[^/@?#\s]+(/[^@?#\s]*)?")


class Endpoint(BaseModel):
    """Endpoint of a judge or a reward model. Not part of any key: moving a model repeats no request."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    url: str
    """http:// or https:// URL. A judge's URL ends in /v1; a reward model's is the scoring route, such as
    http://host:8000/classify.
    """
    api_key_env: str | None = Field(default=None, pattern=VARIABLE)
    """NAME of the environment variable that holds the API key, never the key itself. null: no key is sent."""
    timeout_s: float = Field(default=120.0, gt=0, le=86_400)
    """Timeout of one attempt, in seconds."""
    concurrency: int = Field(default=16, ge=1, le=4096)
    """Maximum number of requests in flight. They run concurrently with the hidden tests."""
    attempts: int = Field(default=5, ge=1, le=20)
    """Attempts per request after infrastructure faults: no connection, timeout, HTTP 408, 425, 429 or 5xx."""

    @model_validator(mode="after")
    def _plain_url(self) -> Self:
        if not _HOST.fullmatch(self.url):
            raise ValueError("endpoint.url must be http(s)://host[:port]/path without user, password or query")
        return self
