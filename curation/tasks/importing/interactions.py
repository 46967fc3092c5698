"""Import recorded interactions: a user's request to an assistant, and the change that the user accepted.

    messages, repo, base_commit, accepted_patch, tests  ->  an instance as SWE-bench writes it  ->  a task like any
    other

The accepted change is the reference, and tests must distinguish it from the state before. Interactions without them are
left out and named. The task contains no text of the assistant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from contracts.digests import digest_of
from curation.errors import TaskError
from curation.tasks.importing.reading import DELIVERABLES_KEYS, faults_of


class _Text(BaseModel):
    model_config = ConfigDict(extra="ignore")

    type: Literal["text"]
    text: str


class _Message(BaseModel):
    model_config = ConfigDict(extra="ignore")

    role: str
    content: str | list[_Text] | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""


class Interaction(BaseModel):
    """One recorded conversation. Of further keys only an instance's `split`, `deliverables`, `test_patch`,
    `PASS_TO_PASS` and `triplane_environment` are read.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    interaction_id: str = Field(min_length=1)
    """Id of the task."""
    messages: list[_Message]
    """The conversation in OpenAI's format, text only."""
    instruction: str = ""
    """Instructions that replace the opening messages, if those depend on later messages."""
    accepted_patch: str = ""
    """Accepted change, as a diff against base_commit."""

    @property
    def opening(self) -> str:
        """Text that the user wrote before the assistant's first reply."""
        asked = []
        for message in self.messages:
            if message.role == "assistant":
                break
            if message.role == "user":
                asked.append(message.text)
        return "\n\n".join(text for text in asked if text.strip())


def is_interaction(values: Mapping[str, Any]) -> bool:
    """Whether a row of a JSONL file is a recorded conversation."""
    return "messages" in values and "instance_id" not in values


def as_instance(values: Mapping[str, Any]) -> dict[str, Any]:
    """The row as a SWE-bench style instance. Raises TaskError that names what is missing."""
    try:
        found = Interaction.model_validate(dict(values))
    except ValidationError as error:
        raise TaskError(f"its interaction is wrong at {faults_of(error)}") from None
    instruction = found.instruction or found.opening
    if not instruction.strip():
        raise TaskError("no user message comes before the assistant's first: write what was asked under instruction")
    if not found.accepted_patch.strip():
        raise TaskError("its accepted_patch is empty: only a change that was kept can prove a task")
    passed_on = {name: values[name] for name in _PASSED_ON if name in values}
    conversation = [[message.role, message.text] for message in found.messages]
    return {
        **passed_on,
        "instance_id": found.interaction_id,
        "problem_statement": instruction,
        "patch": found.accepted_patch,
        "conversation": digest_of(conversation),
    }


_PASSED_ON = (
    "repo",
    "base_commit",
    "test_patch",
    "FAIL_TO_PASS",
    "PASS_TO_PASS",
    "split",
    "triplane_environment",
    *DELIVERABLES_KEYS,
)
