"""What an attack is: data for the one test that runs them all, and for the table in docs/attacks.md."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from envd.types import Limits

BACKENDS = ("namespaces", "gvisor", "qemu")
"""What the attacks run against; plain isolates nothing and says so."""
SMALL = Limits(memory_mb=128, pids=32, cpu=1, disk_mb=16, lifetime_s=120)
"""What bombs get, so that two cores and the tests beside them survive."""
KERNEL = "the sandbox's kernel refuses it, and the server does not see system calls"
NOWHERE = "nothing is refused: what it looks for is not there"
CONTAINED = "nothing is refused: it is let happen where it harms nobody"
UNTOLD = dict.fromkeys(("gvisor", "qemu"), "a kernel of its own answers, and the server does not see system calls")
"""Where nobody tells the server of a refused system call."""
OWN_KERNEL = "root of a virtual machine of its own, whose wall is the machine"


@dataclass(frozen=True)
class Attack:
    """One attempt. Exactly one of `script`, `shell`, `act` and `verify` says what is done."""

    name: str
    family: str
    what: str
    """For the table: what is tried."""
    blocked: str
    """A pattern that the attempt's words must hold: how it was refused. A line with BREACH is a finding, whatever else
    is said.
    """
    script: str = ""
    """Python, run in the sandbox after `from attempts import *`."""
    shell: str = ""
    """Bash, run in the sandbox."""
    act: Callable[[Any], Awaitable[str]] | None = None
    """What a client does with the `Arena`; returns the words."""
    verify: Mapping[str, str] | None = None
    """Files of a final state that is verified; its `calc.py` is wrong, so no test may pass."""
    hidden: Mapping[str, bytes] | None = None
    """Hidden tests in place of the usual ones."""
    audit: tuple[str, ...] = ()
    """Kinds of events that tell of its refusal: one of them is enough."""
    unseen: str = ""
    """Where no event tells of its refusal: why not. The trail of calls then names what was run."""
    unseen_on: Mapping[str, str] = field(default_factory=dict)
    """Backends on which no event tells of its refusal, and why."""
    mark: str = ""
    """What the trail says of what an `act` runs, where nothing else tells of it. The others' marks follow from what
    they are.
    """
    harmless_on: Mapping[str, str] = field(default_factory=dict)
    """Backends on which it may succeed inside the sandbox, and why that is no escape; host and neighbour are looked at
    all the same.
    """
    not_on: Mapping[str, str] = field(default_factory=dict)
    """Backends it is not run on, and why."""
    succeeds_on: Mapping[str, str] = field(default_factory=dict)
    """Backends on which it is not stopped yet, and what it does there: expected to fail, so that whoever stops it has
    to say so here.
    """
    limits: Limits = SMALL
    create: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `SandboxClient.create`."""
    timeout_s: float = 20
    plain: bool = False
    """It succeeds (BREACH) on the plain backend: a test shows that, so that the attempt is known to be a real one."""

    @property
    def file(self) -> str:
        """Where its script lies in the workspace."""
        return f"attack-{self.name}.py"

    @property
    def called(self) -> str:
        """Words that a call of the trail must hold."""
        if self.script:
            return self.file
        return self.mark or self.shell[:40] or "Verifier/Verify"

    def told_on(self, backend: str) -> frozenset[str]:
        """Kinds of which one must tell of its refusal on a backend; none where only the trail tells of it."""
        return frozenset() if backend in self.unseen_on else frozenset(self.audit)

    @property
    def quiet(self) -> bool:
        """It asks its own sandbox only, and for little: others may be tried beside it."""
        return bool(self.script or self.shell) and self.family != "bombs"

    def __post_init__(self) -> None:
        assert sum(map(bool, (self.script, self.shell, self.act, self.verify))) == 1, self.name
        assert bool(self.audit) != bool(self.unseen), f"{self.name}: an event, or why there is none"
        if self.act is not None and (self.unseen or self.unseen_on):
            assert self.mark, f"{self.name}: what the trail of calls says of what it runs"
