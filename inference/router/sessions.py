"""Sessions: prompts that continue, with the replica that has their state."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from inference.router.fingerprint import Chain, Fingerprinter, Tokens


@dataclass
class Session:
    """A conversation whose prompts mostly continue each other."""

    namespace: int
    chain: Chain
    place: int = -1
    """Of the replica of its last turn; -1: none."""
    known: int = 0
    """Blocks of its last prompt, which are cached since."""
    resident: int = 0
    """Its tokens that count as resident there."""


class Sessions:
    """At most `most` sessions, with prompts of `blocks` blocks; beyond, the one used least recently is forgotten."""

    def __init__(self, hasher: Fingerprinter, most: int, blocks: int) -> None:
        self._hasher, self._most, self._left = hasher, most, blocks
        self._open: OrderedDict[str, Session] = OrderedDict()

    def find(self, name: str, prompt: Tokens, namespace: int) -> tuple[Session, list[Session]]:
        """The session, whose chain is now that of `prompt`, and those forgotten to make room.

        A prompt that does not continue the session, such as a compacted one, is hashed anew.
        """
        session = self._open.get(name)
        if session is None:
            session = self._open[name] = Session(namespace, Chain(self._hasher, namespace))
        else:
            self._open.move_to_end(name)
        self._left += len(session.chain.hashes)
        if session.namespace != namespace or not session.chain.follow(prompt):
            session.namespace, session.chain = namespace, Chain(self._hasher, namespace)
            session.chain.follow(prompt)
        self._left -= len(session.chain.hashes)
        forgotten = []
        while len(self._open) > self._most or (self._left < 0 and len(self._open) > 1):
            forgotten.append(self._open.popitem(last=False)[1])
            self._left += len(forgotten[-1].chain.hashes)
        return session, forgotten

    def end(self, name: str) -> Session | None:
        """Forget a session; None if it is unknown."""
        found = self._open.pop(name, None)
        if found is not None:
            self._left += len(found.chain.hashes)
        return found

    def leave(self, place: int) -> None:
        """The replica at `place` is gone: its sessions have none."""
        for session in self._open.values():
            if session.place == place:
                session.place, session.resident = -1, 0
