"""Settings of the sources of a mixture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

_DATA = "data:"


class _Source(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = Field(default="", pattern=r"^[a-z0-9_-]{0,40}$")
    """Name in metrics and lineage: lower case letters, digits, - and _; empty: that of the kind."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the rows that are trained, relative to the other sources."""

    @property
    def called(self) -> str:
        """The name."""
        return self.name or str(getattr(self, "kind"))  # noqa: B009 - each kind declares its own


class ScriptedSource(_Source):
    """The scripted expert episodes of `base.demonstrations`."""

    kind: Literal["scripted"]
    """Selects this kind of source."""


class _Foreign(_Source):
    reserved: Literal["refuse", "leave_out"] = "refuse"
    """What to do with rows of tasks that this experiment's suite has in gate, held_out or unseen: refuse the source,
    with an error that names the first one, or leave them out and count them.
    """

    @property
    def slice(self) -> dict[str, Any]:
        """Settings that affect the rows, beyond what the source reads."""
        return self.model_dump(mode="json", exclude={"name", "weight", "path", "experiment", "iterations"})


class EpisodesSource(_Foreign):
    """Accepted episodes of another experiment's iterations (rejection sampling): graded as solved, ended by the policy,
    not tampered with and not quarantined, with the very tokens that were sampled.
    """

    kind: Literal["episodes"]
    """Selects this kind of source."""
    experiment: str = Field(pattern=r"^[a-z][a-z0-9_]{0,62}$")
    """Name of the experiment, in the same store. Its policies must have this base policy's tokenizer."""
    iterations: tuple[Annotated[str, Field(pattern=r"^[0-9]{4,}$")], ...] = Field(min_length=1)
    """Keys of its iterations, such as "0003", which must be graded."""
    per_task: int | None = Field(default=None, ge=1)
    """Accepted episodes of one task, at most; null: all."""

    @field_validator("iterations")
    @classmethod
    def _are_distinct(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        twice = next((each for each in value if value.count(each) > 1), None)
        if twice is not None:
            raise ValueError(f"{twice} is named twice, which would train its episodes twice: name it once")
        return value


class ChatsSource(_Foreign):
    """Chats in a file or of a data pipeline: of OpenAI's messages, or by `triplane episodes export --tokens`."""

    kind: Literal["chats"]
    """Selects this kind of source."""
    path: str = Field(min_length=1)
    """File on the machine that materializes base_policy, *.jsonl or *.parquet; or data:NAME@VERSION of a data pipeline,
    whose latest version data:NAME names. The content is part of the key, the place is not.
    """

    @property
    def data(self) -> str | None:
        """NAME@VERSION of a data pipeline, or None for a file."""
        return self.path.removeprefix(_DATA) if self.path.startswith(_DATA) else None

    @property
    def file(self) -> Path:
        """The file."""
        return Path(self.path)


Source = Annotated[ScriptedSource | EpisodesSource | ChatsSource, Field(discriminator="kind")]
