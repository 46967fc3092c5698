"""The live sandboxes of a server: create them, find them by a random id and a token, list them, and end them when their
lifetime is over.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import secrets
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from envd.backends.base import Backend, Box, BoxSpec, Forgets, OffersProxy, TellsRefusals
from envd.errors import EnvdError, SandboxGone, SandboxUnknown, ServerDraining
from envd.server.admission import Wanted, decide
from envd.server.audit import AuditLog, Kind
from envd.server.egress import Egress
from envd.server.egress_record import RequestRecord
from envd.server.escapes import Escapes
from envd.server.idempotency import Answers
from envd.server.limits_watch import LimitsWatch
from envd.server.live import Live
from envd.server.quotas import Claim, Quotas
from envd.server.rules import Decisions, Rules, load_rules
from envd.server.runtimes import Runtimes
from envd.server.snapshots import Snapshots, remove_tree
from envd.server.templates import Templates

T = TypeVar("T")
_GONE = "it was finished, crashed, or outlived its lifetime"
_REMEMBERED = 1024
"""Number of ended sandboxes whose reason is kept for callers that hold their token."""
_IDENTITY = re.compile(r"[A-Za-z0-9_-]{16,64}")
_log = logging.getLogger("envd")


class Sandboxes:
    """All sandboxes of a server, on all backends."""

    def __init__(
        self,
        backends: Mapping[str, Backend],
        templates: Templates,
        snapshots: Snapshots,
        runtimes: Runtimes,
        *,
        rules: Rules,
        audit: AuditLog,
        quotas: Quotas | None = None,
    ) -> None:
        self.backends, self.templates, self.snapshots, self.runtimes = backends, templates, snapshots, runtimes
        self.rules, self.audit = rules, audit
        self.quotas = Quotas(rules.quotas, audit) if quotas is None else quotas
        templates.on_removed = runtimes.on_removed = self._removed
        self.answers = defaultdict[str, Answers](lambda: Answers(most=4096, most_bytes=16 << 20))
        """Idempotent answers of calls that name no sandbox, by bearer key: no client evicts another one's."""
        self.limits = LimitsWatch(audit)
        self.escapes = Escapes(audit)
        self.egress = Egress(audit)
        self._rules_of = functools.lru_cache(maxsize=256)(lambda text: load_rules(text).under(rules))
        self._live: dict[str, Live] = {}
        self._restoring: set[str] = set()
        """Ids of the sandboxes that are being restored."""
        self._ended: OrderedDict[str, Live] = OrderedDict()
        self.draining = False
        """Whether the server ends soon, so that it takes no new sandboxes and no verifications."""
        self._starting = 0
        self._names = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._live)

    @property
    def idle(self) -> bool:
        """Whether no sandbox lives or starts."""
        return not self._live and not self._starting

    def require_admitting(self) -> None:
        """Raise ServerDraining if the server takes nothing new."""
        if self.draining:
            raise ServerDraining("this envd server is draining and takes nothing new: use another one, or retry later")

    def find(self, identity: str, token: str) -> Live:
        """Return the live sandbox with this id. Raises SandboxGone for a wrong token and for an unknown id."""
        self.notice(identity)
        live = self._live.get(identity)
        if live is not None and live.is_token(token):
            return live
        ended = self._ended.get(identity)
        why = ended.ended if ended is not None and ended.is_token(token) else _GONE
        if live is not None:
            self.audit.record("auth.denied", identity, what="sandbox token")
        elif ended is None:
            self.audit.record("auth.denied", "", what="unknown sandbox", id=identity)
        kind = SandboxUnknown if live is None and ended is None else SandboxGone
        raise kind(f"no sandbox {identity[:40]!r}: {why}")

    def knows(self, identity: str, token: str) -> bool:
        """Whether a live sandbox has this id and token. Records no audit event."""
        live = self._live.get(identity)
        return live is not None and live.is_token(token)

    def answers_of(self, identity: str, token: str) -> Answers:
        """Idempotent answers of a sandbox, also shortly after its end. Raises as `find`."""
        ended = self._ended.get(identity)
        if ended is not None and ended.is_token(token):
            return ended.answers
        return self.find(identity, token).answers

    def all(self, labels: Mapping[str, str]) -> list[Live]:
        """Live sandboxes that have all of these labels, oldest first."""
        wanted = labels.items()
        return [live for live in self._live.values() if wanted <= live.labels.items()]

    async def create(self, wanted: Wanted) -> Live:
        """Start a sandbox and return once it answers calls.

        Raises ServerDraining, RulesDenied, TemplateError, SandboxStartError.
        """
        self.require_admitting()
        await self._prepare_template(wanted)
        backend, spec, decisions = self.plan(wanted)
        box, claim = await self._claimed(spec, lambda: backend.create(spec))
        live = Live(*_identity(), backend, spec, box, decisions, wanted.rules_yaml, wanted.labels, claim=claim)
        live.toolset = wanted.toolset
        live.requests = RequestRecord() if wanted.record_requests else None
        return self.admit(live)

    async def restore(
        self, wanted: Wanted, state: Path, *, host_name: str, like: tuple[str, str] | None = None
    ) -> Live:
        """Start a sandbox from a state that `Box.snapshot` wrote. like: the (id, token) to keep; None: new ones."""
        self.require_admitting()
        await self._prepare_template(wanted)
        backend, spec, decisions = self.plan(wanted, host_name)
        identity, token = like or _identity()
        if not _IDENTITY.fullmatch(identity) or len(token) < 16 or identity in self._live.keys() | self._restoring:
            raise EnvdError(
                f"sandbox id {identity[:40]!r} can't be kept: it exists on this server, or no envd server issued it"
            )
        self._restoring.add(identity)
        try:
            box, claim = await self._claimed(spec, lambda: backend.restore(state, spec))
        finally:
            self._restoring.remove(identity)
        lost = () if backend.features.keeps_processes else ("processes",)
        labels = wanted.labels
        live = Live(identity, token, backend, spec, box, decisions, wanted.rules_yaml, labels, lost=lost, claim=claim)
        live.toolset = wanted.toolset
        return self.admit(live)

    async def _claimed(self, spec: BoxSpec, start: Callable[[], Coroutine[Any, Any, Box]]) -> tuple[Box, Claim]:
        """Claim the quotas, hold the template and start a box. Raises QuotaExceeded, SandboxStartError.

        If the caller is cancelled meanwhile, the box is destroyed once it has started, and only then released.
        """
        claim = self.quotas.claim(spec.limits.memory_mb)
        self._hold(spec)
        self._starting += 1
        task = self.background(start())
        try:
            box = await asyncio.shield(task)
        except asyncio.CancelledError:
            self.background(self._abandon(task, spec, claim))
            raise
        except BaseException:
            self._not_started(spec, claim)
            raise
        self._starting -= 1
        return box, claim

    async def _abandon(self, task: asyncio.Task[Box], spec: BoxSpec, claim: Claim) -> None:
        try:
            await asyncio.wait([task])
            if not task.cancelled() and task.exception() is None:
                await task.result().destroy()
        finally:
            self._not_started(spec, claim)

    def _not_started(self, spec: BoxSpec, claim: Claim) -> None:
        self._starting -= 1
        claim.release()
        self._release(spec)

    def _hold(self, spec: BoxSpec) -> None:
        self.templates.hold(spec.template)
        self.runtimes.hold(spec.runtime)

    def _release(self, spec: BoxSpec) -> None:
        self.templates.release(spec.template)
        self.runtimes.release(spec.runtime)

    async def _removed(self, digest: str) -> None:
        for backend in self.backends.values():
            if isinstance(backend, Forgets):
                await backend.forget(digest)

    def plan(self, wanted: Wanted, host_name: str = "sandbox") -> tuple[Backend, BoxSpec, Decisions]:
        """Backend, box specification and decisions for a request. Raises RulesDenied, TemplateError."""
        backend, decisions = self._decide(wanted)
        template = self.templates.shown(self.templates.require(wanted.template), decisions.hidden)
        runtime = self.runtimes.require(wanted.runtime, backend)
        spec = BoxSpec(
            name=self.fresh_name(),
            template=template,
            template_dir=self.templates.directory_of(template),
            limits=decisions.limits,
            runtime=runtime,
            env=runtime.environment(wanted.env) if runtime else wanted.env,
            host_name=host_name,
            network=decisions.network,
            read_only=decisions.read_only,
        )
        return backend, spec, decisions

    def decide(self, wanted: Wanted, live: int = -1) -> tuple[Backend, Decisions]:
        """Backend and decisions for work outside of clients' sandboxes, as a Create would get them.

        Raises EnvdError, RulesDenied.
        """
        return decide(wanted, self.backends, self._rules_of(wanted.rules_yaml), self.audit, live)

    def _decide(self, wanted: Wanted) -> tuple[Backend, Decisions]:
        return self.decide(wanted, len(self._live) + self._starting)

    async def _prepare_template(self, wanted: Wanted) -> None:
        """Make the directory that the sandbox gets: without the files that the rules hide, so that no program in the
        sandbox can read them.

        Separate from `plan`, so that no await lies between its count of live sandboxes and the start.
        """
        rules, _ = self._rules_of(wanted.rules_yaml)
        if rules.filesystem.hidden:
            _, decisions = self._decide(wanted)
            self.templates.require(wanted.template)
            await self.templates.ready(await self.templates.without(wanted.template, decisions.hidden))
        else:
            await self.templates.ready(wanted.template)

    def fresh_name(self) -> str:
        """Return a new box name, unique on this server."""
        self._names += 1
        return f"box-{self._names}"

    def admit(self, live: Live) -> Live:
        """Register a sandbox, so that `find` returns it until its lifetime is over."""
        self._live[live.identity] = live
        self.listen(live)
        self.expire_in(live, live.spec.limits.lifetime_s)
        return live

    def listen(self, live: Live) -> None:
        """Record the system calls that the box is refused, if the box reports them, and open the sandbox's egress
        proxy, if its rules allow one.
        """
        box: object = live.box
        if live.spec.network and isinstance(box, OffersProxy) and box.proxy_listener is not None:
            live.proxy = self.egress.open(box.proxy_listener, live.spec.network, live.identity, live.requests)
        if isinstance(box, TellsRefusals):
            box.tell_refusals(functools.partial(self._refused, live))

    def _refused(self, live: Live, call: str, count: int) -> None:
        self.audit.record("syscall.refused", live.identity, call=call, count=count)

    def expire_in(self, live: Live, seconds: float) -> None:
        """Set the sandbox's remaining lifetime, in seconds, at most its `lifetime_s` limit."""
        seconds = min(max(seconds, 0), live.spec.limits.lifetime_s)
        if live.timer is not None:
            live.timer.cancel()
        live.expires = time.monotonic() + seconds
        live.timer = asyncio.get_running_loop().call_later(seconds, self._expire, live)

    async def end(self, live: Live, why: str = _GONE) -> None:
        """Destroy a sandbox and all its data, also if the caller is cancelled. Idempotent. A state change in progress
        ends first.
        """
        if not live.ended:
            self.forget(live, why)
            await self.finished(self.clear(live))

    async def clear(self, live: Live) -> None:
        """Destroy a forgotten sandbox's box and stored state, and release its quotas and its template."""
        async with live.alone():
            box, live.box = live.box, None
            stored, live.stored = live.stored, None
            try:
                if box is not None:
                    await self.limits.look_last(live, box)
                    await self.destroy(live, box)
                if stored is not None:
                    await remove_tree(stored)
            finally:
                if live.claim is not None and not live.claim.released:
                    live.claim.release()
                    self._release(live.spec)

    async def destroy(self, live: Live, box: Box) -> None:
        """Stop a sandbox's egress proxy, then destroy its box."""
        if live.proxy is not None:
            await live.proxy.stop()
            live.proxy = None
        await box.destroy()

    def forget(self, live: Live, why: str) -> None:
        """Unregister a sandbox. `find` then raises with this reason for callers that hold its token."""
        live.ended = why
        if live.timer is not None:
            live.timer.cancel()
        if self._live.get(live.identity) is live:
            del self._live[live.identity]
        self._ended[live.identity] = live
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
        self.audit.forget(live.identity)

    def notice(self, identity: str) -> None:
        """Forget and clear a sandbox that ended by itself, or whose agent was closed for an invalid message."""
        live = self._live.get(identity)
        reason = None if live is None else live.died()
        if live is not None and reason is not None:
            kind: Kind = "guest.malformed" if "protocol" in reason else "sandbox.died"
            self.audit.record(kind, identity, reason=reason, backend=live.backend.name)
            self.forget(live, reason)
            self.background(self.clear(live))

    def sign_of_limit(self, live: Live) -> None:
        """Schedule a check of a sandbox's limits, after an event that a limit may have caused."""
        if self.limits.sign(live):
            self.background(self.limits.look_soon(live))

    def sign_of_escape(self, live: Live, *paths: str) -> None:
        """Schedule a check of these paths for links out of the workspace, after a failure that such links cause."""
        self.background(self.escapes.look(live, paths))

    def background(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start work that continues when its caller is cancelled."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._background_ended)
        return task

    async def finished(self, work: Coroutine[Any, Any, T]) -> T:
        """Await work that must not stop halfway: it continues when its caller is cancelled."""
        return await asyncio.shield(self.background(work))

    async def stop(self) -> None:
        """End every sandbox and wait for all background work."""
        while self._live or self._tasks:
            await asyncio.gather(*(self.end(live) for live in list(self._live.values())), return_exceptions=True)
            if self._tasks:
                await asyncio.wait(set(self._tasks))
        self.egress.stop()

    def _expire(self, live: Live) -> None:
        if not live.ended:
            _log.warning("sandbox %s outlived its lifetime and was destroyed", live.identity)
            seconds = round(time.monotonic() - live.created, 1)
            self.audit.record("lifetime.expired", live.identity, seconds=seconds)
            self.background(self.end(live, "it outlived its lifetime"))

    def _background_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, EnvdError):
            _log.error("a sandbox's change failed", exc_info=error)


def _identity() -> tuple[str, str]:
    return secrets.token_urlsafe(16), secrets.token_urlsafe(24)
