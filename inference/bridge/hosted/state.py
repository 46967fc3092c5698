"""What the bridge keeps of the environment's side of an episode, and its payloads in the journal."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Self

from contracts.episodes import ToolCallRecord
from contracts.pb import bridge_pb2 as pb

_SENT = struct.Struct("<dd")
_LENGTH = struct.Struct("<I")


@dataclass(slots=True)
class Place:
    """Where the sandbox of an episode is."""

    begun_unix: float
    """When the episode was started."""
    key: str = ""
    """Idempotency key of the sandbox's creation. Empty: nobody has asked for a sandbox."""
    sandbox: str = ""
    """Its id. Empty: not known yet."""
    token: str = ""
    server: str = ""
    """Address of its envd server."""
    closed: bool = False
    """Whether it has been destroyed."""

    @property
    def held(self) -> bool:
        """Whether there may be a sandbox to destroy."""
        return bool(self.key) and not self.closed

    def payload(self) -> bytes:
        """As the journal keeps it."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def of(cls, payload: bytes) -> Self:
        """From the journal. Raises ValueError, TypeError."""
        return cls(**json.loads(payload))


@dataclass(frozen=True, slots=True)
class Sent:
    """The calls of a turn that may have been sent to the sandbox."""

    timeout_s: float
    """Of one call, part of what was sent: a repeated request must be equal to be answered and not executed."""
    unix: float
    """When they were first sent."""

    def payload(self) -> bytes:
        """As the journal keeps it."""
        return _SENT.pack(self.timeout_s, self.unix)

    @classmethod
    def of(cls, payload: bytes) -> Self:
        """From the journal. Raises struct.error."""
        return cls(*_SENT.unpack(payload))


@dataclass(frozen=True, slots=True)
class Final:
    """End of an episode that is not graded yet."""

    end: pb.StepEnd
    """Reply to the last turn, without a reward."""
    state: bytes
    """Bytes of the final state."""
    kind: str
    """Kind of the final state (contracts/final_states.py)."""

    def payload(self) -> bytes:
        """As the journal keeps it."""
        head, kind = self.end.SerializeToString(), self.kind.encode()
        return _LENGTH.pack(len(head)) + _LENGTH.pack(len(kind)) + head + kind + self.state

    @classmethod
    def of(cls, payload: bytes) -> Self:
        """From the journal. Raises struct.error, DecodeError."""
        (head,), (kind,) = _LENGTH.unpack_from(payload), _LENGTH.unpack_from(payload, _LENGTH.size)
        begin = 2 * _LENGTH.size
        end, state = begin + head, begin + head + kind
        return cls(pb.StepEnd.FromString(payload[begin:end]), payload[state:], payload[end:state].decode())


class Hosted:
    """The environment's side of one episode."""

    __slots__ = ("answers", "final", "place", "sent", "task_digest", "task_id")

    def __init__(self, task: pb.HostedTask, place: Place) -> None:
        self.task_id, self.task_digest, self.place = task.task_id, task.task_digest, place
        self.sent: Sent | None = None
        """Calls of the last turn; None: not sent, or the turn has its reply."""
        self.answers: pb.StepEnd | None = None
        """Results of those calls."""
        self.final: Final | None = None
        """None until the episode is over."""

    def replied(self) -> None:
        """Forget what a turn's reply says now."""
        self.sent = self.answers = None


def call_records(replies: Sequence[pb.StepEnd]) -> list[ToolCallRecord]:
    """Records of the calls that these turns made. replies: one a turn, from the first."""
    return [
        ToolCallRecord(index, each.name, each.arguments, each.ok, each.text)
        for index, reply in enumerate(replies)
        for each in reply.results
    ]
