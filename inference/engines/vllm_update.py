"""Load a policy into a vLLM server and prove that it is served. Tokens sampled meanwhile belong to no policy.

pause -> mark unproven -> load -> reset the prefix cache -> compare tensors and layers -> resume -> compare probes ->
mark with the version

Each update has a unique unproven mark, which the workers store with the loaded weights. The server's mark and the
workers' mark are checked before the server resumes, before it is marked with the version, and after that. If two
clients update one server concurrently, the one that finds the other's mark raises StaleVersion, so no weights keep a
wrong version.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference.engines.http import JsonClient, reading
from inference.engines.marks import UNPROVEN, fresh_mark, unproven
from inference.engines.probes import Probe, difference
from inference.errors import EngineError, EngineUnreachable, StaleVersion, WeightsDiffer

_SHOWN = 6
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Policy:
    """Policy to be served, with its expected results."""

    version: str
    served: Path
    """The directory that the server loads."""
    probes: list[Probe]
    exact: bool
    tolerance: float
    """Largest difference of a probe's log-probability, in nats."""


@dataclass(frozen=True)
class _Update:
    """One client's attempt to make a server serve a policy."""

    client: JsonClient
    policy: Policy
    mark: str
    """Unique version until the weights are proven."""
    loaded: str
    """Mark that the workers report if their weights are from this update."""


async def load_policy(client: JsonClient, policy: Policy, drain_s: float, *, asleep: bool = False) -> None:
    """Replace the server's weights.

    Requests in flight finish with their initial weights, or are aborted after `drain_s` seconds. asleep: wake the
    server, first its weights' memory, and the cache after they are loaded. Raises WeightsDiffer, or StaleVersion if
    another client updates the server, which then keeps its unproven mark.
    """
    mark = fresh_mark(policy.version)
    update = _Update(client, policy, mark, loaded=mark)
    try:
        await pause(client, drain_s)
        await _mark(client, mark)
        if asleep:
            await client.call("POST", "/wake_up", tags="weights")
        await _command(client, "triplane_load", {"directory": str(policy.served), "mark": mark})
        if asleep:
            await client.call("POST", "/wake_up", tags="kv_cache")
        await reset_prefix_cache(client)
        await _compare_tensors(client, policy)
        await _require(update, mark)
    finally:
        await client.call("POST", "/resume")
    await _conclude(update)


async def prove_policy(client: JsonClient, policy: Policy) -> None:
    """Prove that a server that was started on the policy's checkpoint serves it, and mark it.

    Raises WeightsDiffer, StaleVersion.
    """
    update = _Update(client, policy, fresh_mark(policy.version), loaded="")
    await _mark(client, update.mark)
    await _compare_tensors(client, policy)
    await _conclude(update)


async def serves(client: JsonClient, version: str) -> bool:
    """Whether the server was proven to serve this version: it has its mark and has loaded no other weights."""
    if await served_version(client) != version:
        return False
    return all(not loaded or loaded.startswith(unproven(version)) for loaded in await _loaded(client))


async def served_version(client: JsonClient) -> str:
    """Version with which the server will mark its next token; "default" for a server without a mark."""
    return await client.read("GET", "/weight_info", lambda reply: str(reply["weight_version"]))


async def put_to_sleep(client: JsonClient, drain_s: float) -> None:
    """Free the server's weights and cache (sleep level 2), after requests in flight end or are aborted.

    The server is first marked as unproven, so that nobody takes it for a server of its last policy, whoever wakes it.
    Raises EngineError if it does not sleep.
    """
    await pause(client, drain_s)
    await _mark(client, f"{UNPROVEN}asleep:{uuid.uuid4().hex}")
    try:
        await client.call("POST", "/sleep", level="2", mode="abort")
    except EngineUnreachable:
        raise
    except EngineError as error:
        raise EngineError(f"{error}; start it with --enable-sleep-mode, or set engine.idle to stop or keep") from error
    if not await is_asleep(client):
        raise EngineError(f"{client.base} answered /sleep and is awake: set engine.idle to stop or keep")


async def is_asleep(client: JsonClient) -> bool:
    """Whether the server's weights or cache are freed."""
    return await client.read("GET", "/is_sleeping", lambda reply: bool(reply["is_sleeping"]))


async def is_paused(client: JsonClient) -> bool:
    """Whether the server's scheduler stands still, as after an update whose client was killed."""
    return await client.read("GET", "/is_paused", lambda reply: bool(reply["is_paused"]))


async def pause(client: JsonClient, drain_s: float) -> None:
    """Stop the server's scheduler after the requests in flight, or abort them."""
    try:
        async with asyncio.timeout(drain_s):
            await client.call("POST", "/pause", mode="wait")
    except TimeoutError:
        _log.warning("requests still run after %g s: they are aborted, and will be sampled again", drain_s)
        await client.call("POST", "/pause", mode="abort")


async def reset_prefix_cache(client: JsonClient) -> None:
    """Drop all cached prefixes. Raises EngineError if that fails."""
    if not await client.read("POST", "/reset_prefix_cache", lambda reply: (reply or {}).get("success")):
        raise EngineError(
            f"{client.base} did not reset its prefix cache: restart it, its cached prefixes belong to older weights"
        )


async def score(client: JsonClient, token_ids: list[int], salt: str) -> tuple[list[float], list[dict[str, Any]]]:
    """(log-probability of each token given the previous ones, 0.0 at index 0; versions in the server's reply)."""
    params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False, "ignore_eos": True}
    body = {"token_ids": token_ids, "sampling_params": params, "cache_salt": salt}
    answer = await client.call("POST", "/inference/v1/generate", body)
    with reading(client.base):
        choice = answer["choices"][0]
        if choice["finish_reason"] == "abort" or answer["prompt_logprobs"] is None:
            raise EngineUnreachable(f"{client.base} ended a scoring request early: retry")
        found = zip(token_ids[1:], answer["prompt_logprobs"][1:], strict=True)
        return [0.0, *(entry[str(token)]["logprob"] for token, entry in found)], choice["weight_versions"] or []


async def _conclude(update: _Update) -> None:
    """Compare the server's results, and set its version."""
    await _compare_probes(update)
    await _require(update, update.mark)
    await _mark(update.client, update.policy.version)
    await _require(update, update.policy.version)


async def _require(update: _Update, version: str) -> None:
    """Raise StaleVersion unless the server is marked with `version` and holds the weights of this update.

    If another update came in between, remove a version that belongs to other weights.
    """
    client, policy = update.client, update.policy
    ours = set(await _loaded(client)) == {update.loaded}
    found = await served_version(client)
    if ours and found == version:
        return
    if not found.startswith(UNPROVEN) and (ours or found == policy.version):
        await _mark(client, update.mark)
    raise StaleVersion(
        f"{client.base} was updated or restarted by another client while policy {policy.version[:12]} was loaded (it"
        f" is marked {found[:24]!r}): use one server per client, and run this again"
    )


async def _loaded(client: JsonClient) -> list[str]:
    """Mark of the update that loaded the weights, of every worker; "" for the initial weights."""
    return [str(each) for each in await _command(client, "triplane_loaded", {})]


async def _mark(client: JsonClient, version: str) -> None:
    await client.call("POST", "/update_weight_version", {"new_version": version})


async def _command(client: JsonClient, method: str, arguments: dict[str, Any]) -> list[Any]:
    """Call a method of the worker extension on every worker of the server."""
    try:
        body = {"method": method, "kwargs": arguments}
        return await client.read("POST", "/collective_rpc", lambda reply: list(reply["results"]), body)
    except EngineUnreachable:
        raise
    except EngineError as error:
        raise EngineError(
            f"{error}; if it lacks {method}: start it with VLLM_SERVER_DEV_MODE=1, our folder vllm_side on PYTHONPATH"
            " and --worker-extension-cls triplane_vllm.WorkerExtension, see docs/engines.md"
        ) from error


async def _compare_tensors(client: JsonClient, policy: Policy) -> None:
    arguments = {"directory": str(policy.served), "exact": policy.exact}
    workers = await _command(client, "triplane_verify", arguments)
    with reading(client.base):
        found = [f"{each['name']} {each['detail']}" for worker in workers for each in worker]
    if found:
        shown = list(dict.fromkeys(found))
        raise WeightsDiffer(_refusal(client, policy, shown))


async def _compare_probes(update: _Update) -> None:
    """Compare the server's log probabilities with the expected ones."""
    client, policy, salt = update.client, update.policy, f"probe of {update.mark}"
    scored = await asyncio.gather(*(score(client, probe.token_ids, salt) for probe in policy.probes))
    if any({str(each["version"]) for each in marks} != {update.mark} for _, marks in scored):
        await _require(update, update.mark)
        raise StaleVersion(
            f"{client.base} did not answer the probes of policy {policy.version[:12]} as marked: restart it"
        )
    found = difference(policy.probes, [logprobs for logprobs, _ in scored], policy.tolerance)
    if found:
        raise WeightsDiffer(_refusal(client, policy, [found]))
    _log.info("%s serves %s", client.base, policy.version[:12])


def _refusal(client: JsonClient, policy: Policy, found: list[str]) -> str:
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return (
        f"{client.base} does not serve policy {policy.version[:12]} from {policy.served}:"
        f" {'; '.join(found[:_SHOWN])}{more}. It is not used: restart it on that checkpoint"
    )
