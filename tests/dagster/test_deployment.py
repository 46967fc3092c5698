"""Before a candidate goes live it plays a smoke episode; then servers are brought to what the registry says."""

from __future__ import annotations

import asyncio
import http.server
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Thread
from typing import Any, ClassVar

import dagster as dg
import httpx
import pyarrow as pa
import pytest
from dagster_world import World
from deployment_world import (
    Stage,
    Tensors,
    an_expert_of_zeros,
    copied,
    doubled_scales,
    good_smoke,
    no_smoke,
    planted_checkpoint,
    saturated_codes,
    serving,
    spoilt,
    stage_of,
)

from assets.sampler import _smoke_metadata
from contracts.artifacts import Artifact, ArtifactRef, open_artifact
from contracts.store import LocalStore, Store
from inference.engines.base import Completion, SamplingParams
from inference.engines.builtin import BuiltinEngine
from inference.engines.config import OpenAIConfig
from inference.engines.openai import OpenAIEngine
from inference.server.app import Application
from ops.after_swap import AUTOMATIC, Swapped, is_automatic, swap_or_roll_back
from ops.deploy import bring_servers, server_metadata
from ops.deploy_decision import Decision, decide_deployment, read_decision, read_smoke
from ops.health import went_live
from ops.inputs import trainer_state_of
from ops.rollback import change_live, plan_rollback, roll_back
from ops.smoke import Smoke
from resources.deployment import fault_of, swap_servers
from resources.errors import DeploymentFailed, NotMaterialized, RegistryError
from resources.experiment import DeploymentConfig, parse_experiment
from resources.refs import require_ref, write_ref
from tests.ports import free_port


def url_of_nobody() -> str:
    return f"http://127.0.0.1:{free_port()}/v1"


def decision_artifact(stage: Stage) -> Artifact:
    found = stage.step(stage.first, stage.base, "0000").work.find()
    assert found is not None
    return found


def test_a_good_candidate_plays_a_smoke_episode_and_goes_live(ran: World) -> None:
    stage = stage_of(ran, "smoked")
    decision = stage.decide(stage.first, stage.base, "0000")
    live = stage.registry.live()
    assert decision.decision == "live" and live is not None and live.policy == stage.first
    artifact = decision_artifact(stage)
    smoke = read_smoke(artifact)
    assert smoke is not None and smoke.fault is None
    assert smoke.tokens > 0 and smoke.turns > 0 and "<|im_start|>assistant" in smoke.transcript
    outside = {entry.path for entry in artifact.manifest.files if entry.digest is None}
    assert outside == {"smoke.json"}, "what a smoke episode took must not reach the decision's digest"


def test_a_smoke_transcript_is_shown_as_it_is_and_can_not_leave_its_block() -> None:
    said = "line\n```\n<img src=x onerror=alert(1)>\n````"
    shown = _smoke_metadata(Smoke(fault=None, task_id="t", outcome="completed", transcript=said))["smoke transcript"]
    assert isinstance(shown, dg.MarkdownMetadataValue)
    assert shown.value == f"`````text\n{said}\n`````"


def test_iterations_play_a_smoke_episode_with_their_candidates(ran: World) -> None:
    for iteration in ran.made:
        smoke = read_smoke(open_artifact(ran.store, require_ref(ran.store, ran.experiment.name, "sampler", iteration)))
        assert smoke is not None and smoke.fault is None and smoke.tokens > 0


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (float("nan"), "model.norm.weight"),
        pytest.param(None, "model.norm.weight", marks=pytest.mark.slow),
        pytest.param(3e38, "the engine has stopped", marks=pytest.mark.slow),
    ],
)
def test_candidate_that_can_not_be_served_is_refused(ran: World, value: float | None, named: str) -> None:
    stage = stage_of(ran, f"spoilt_{str(value)[:3]}")
    bad = spoilt(ran, stage.first, "model.norm.weight", value)
    decision = stage.decide(bad, stage.base, "0000")
    assert decision.decision == "refused" and stage.registry.live() is None
    assert "smoke episode failed" in decision.reasons[0] and named in decision.reasons[0]
    assert stage.decide(bad, stage.base, "0000", no_smoke) == decision


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (an_expert_of_zeros, "1 tensor(s) are all zeros, first model.layers.0.mlp.experts.0.down_proj.weight"),
        (doubled_scales, "times those of its parent"),
        (saturated_codes, "of the codes are saturated"),
    ],
)
def test_candidate_with_unsound_weights_is_refused_though_it_passed_the_gate(
    ran: World, change: Callable[[Tensors], None], reason: str
) -> None:
    stage = stage_of(ran, change.__name__)
    bad = planted_checkpoint(ran, stage.first, change).ref
    decision = stage.decide(bad, stage.base, "0000", no_smoke)
    assert decision.decision == "refused" and stage.registry.live() is None
    assert "candidate is non-inferior to its parent" in decision.reasons[0] and reason in decision.reasons[0]


def test_candidate_that_tampered_on_the_gate_is_refused(ran: World, untouched: Path, tmp_path: Path) -> None:
    shutil.copytree(untouched, tmp_path / "store")  # other tests count the evaluations of `ran`
    world = replace(ran, store=LocalStore(tmp_path / "store"))
    stage = stage_of(world, "tampers")
    step = stage.step(stage.first, stage.base, "0000")
    evaluation = open_artifact(world.store, step.parent("evaluation"))
    played = open_artifact(world.store, evaluation.manifest.parents["candidate_gate"])
    rewards = played.table("rewards.parquet")
    verdicts = pa.array(["tampered"] * rewards.num_rows, pa.string())
    changed = rewards.set_column(rewards.schema.get_field_index("verdict"), "verdict", verdicts)
    caught = copied(world.store, played, tables={"rewards.parquet": changed})
    parents = {**evaluation.manifest.parents, "candidate_gate": caught.ref}
    made = {**step.state.made, "evaluation": copied(world.store, evaluation, parents).ref}
    caught_step = replace(step, state=replace(step.state, made=made))
    decision = read_decision(decide_deployment(caught_step, no_smoke))
    assert decision.decision == "refused" and stage.registry.live() is None
    assert f"tampered with its verdict in {rewards.num_rows} of {rewards.num_rows} gate episodes" in decision.reasons[0]


def test_an_evaluation_of_another_candidate_or_confidence_decides_nothing(ran: World) -> None:
    stage = stage_of(ran, "unevaluated")
    step = stage.step(stage.first, stage.base, "0000")
    made = {**step.state.made, "checkpoint": stage.second}  # trained again since
    promotion = stage.experiment.promotion.model_copy(update={"confidence": 0.5})
    edited = stage.experiment.model_copy(update={"promotion": promotion})
    for change, reason in (({"made": made}, "is of"), ({"experiment": edited}, "promotion.confidence is 0.5")):
        with pytest.raises(NotMaterialized, match=f"{reason}.*: materialize it again"):
            decide_deployment(replace(step, state=replace(step.state, **change)), no_smoke)
    assert stage.registry.live() is None


def test_a_candidate_whose_dataset_was_made_again_decides_nothing(ran: World) -> None:
    stage = stage_of(ran, "remade_dataset")
    trained, other = (require_ref(ran.store, "tiny", "dataset", each) for each in ("0000", "0001"))
    for dataset in (trained, other):
        write_ref(ran.store, stage.experiment.name, "dataset", "0000", dataset)
    with pytest.raises(NotMaterialized, match=f"{trained.short}, .* is {other.short}: materialize checkpoint"):
        stage.decide(stage.first, stage.base, "0000", no_smoke)
    assert stage.registry.live() is None
    write_ref(ran.store, stage.experiment.name, "dataset", "0000", trained)
    assert stage.decide(stage.first, stage.base, "0000", good_smoke).decision == "live"


def test_infrastructure_fault_decides_nothing(ran: World) -> None:
    # no turn fits into a millisecond, which the deterministic profile calls a fault of the infrastructure
    rollouts = ran.experiment.rollouts.model_copy(update={"max_attempts": 1, "episode_timeout_s": 0.001})
    stage = stage_of(ran, "no_time", rollouts=rollouts)
    with pytest.raises(DeploymentFailed, match="nothing was decided"):
        stage.decide(stage.first, stage.base, "0000")
    assert stage.registry.live() is None
    again = stage_of(ran, "no_time")
    assert again.decide(again.first, again.base, "0000").decision == "live"


@pytest.mark.slow
def test_a_canary_plays_the_smoke_episode_where_one_is_named(ran: World) -> None:
    base = open_artifact(ran.store, stage_of(ran, "canary").base)
    with serving(base) as url:
        stage = stage_of(ran, "canary", deployment=DeploymentConfig(canary=url))
        assert stage.smoke(stage.first).fault is None
        assert httpx.get(url.replace("/v1", "/version")).json()["version"] == stage.first.digest
    gone = stage_of(ran, "canary", deployment=DeploymentConfig(canary=url, timeout_s=2.0))
    with pytest.raises(DeploymentFailed, match="nothing was decided"):
        gone.decide(gone.first, gone.base, "0000")


@pytest.mark.slow
def test_a_smoke_episode_asks_no_server_for_routing(ran: World) -> None:
    rollouts = ran.experiment.rollouts.model_copy(update={"record_routing": True})
    with serving(open_artifact(ran.store, stage_of(ran, "unrouted").base)) as url:
        evaluation = ran.experiment.evaluation.model_copy(update={"engine": OpenAIConfig(base_url=url)})
        for server in ({"evaluation": evaluation}, {"deployment": DeploymentConfig(canary=url)}):
            stage = stage_of(ran, "unrouted", rollouts=rollouts, **server)
            assert stage.smoke(stage.first).fault is None


@pytest.mark.parametrize("value", [pytest.param(float("nan"), marks=pytest.mark.slow), None])
def test_a_canary_that_refuses_bad_weights_refuses_the_candidate(ran: World, value: float | None) -> None:
    stage = stage_of(ran, f"bad_{str(value).lower()}")
    bad = spoilt(ran, stage.first, "model.norm.weight", value)
    with serving(open_artifact(ran.store, stage.base)) as url:
        stage = replace(stage, experiment=stage_of(ran, "bad", deployment=DeploymentConfig(canary=url)).experiment)
        decision = stage.decide(bad, stage.base, "0000")
    assert decision.decision == "refused" and "model.norm.weight" in decision.reasons[0]


class Answering(http.server.BaseHTTPRequestHandler):
    """What stands where a canary should be."""

    status, body = 503, b"<html>no backend</html>"

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.body)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        """Quiet."""


class Foreign(Answering):
    """An engine of somebody else that serves just this name."""

    status, body = 200, b'{"data": [{"id": "policy", "owned_by": "vllm", "root": "policy"}]}'


class Missing(Answering):
    """A server on which our paths lead nowhere."""

    status, body = 404, b"not found"


@pytest.mark.parametrize(
    "what", [Answering, *(pytest.param(each, marks=pytest.mark.slow) for each in (Foreign, Missing))]
)
def test_foreign_server_as_canary_decides_nothing(ran: World, what: type[Answering]) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), what) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        deployment = DeploymentConfig(canary=f"http://127.0.0.1:{server.server_address[1]}/v1")
        stage = stage_of(ran, what.__name__.lower(), deployment=deployment)
        try:
            with pytest.raises(DeploymentFailed, match="nothing was decided"):
                stage.decide(stage.first, stage.base, "0000")
        finally:
            server.shutdown()
            thread.join()
    assert stage.registry.live() is None
    assert (
        replace(stage, experiment=stage_of(ran, stage.experiment.name).experiment)
        .decide(stage.first, stage.base, "0000", good_smoke)
        .decision
        == "live"
    ), "nothing was recorded that a later run would find"


@pytest.mark.slow
def test_a_canary_that_another_run_takes_over_decides_nothing(ran: World) -> None:
    stage = stage_of(ran, "shared")
    other = open_artifact(ran.store, stage.second)

    class TakenOver(Application):
        """Another run loads its policy right after ours."""

        async def swap(self, directory: Path, version: str) -> None:
            await super().swap(directory, version)
            await super().swap(other.directory(), other.ref.digest)

    with serving(open_artifact(ran.store, stage.base), TakenOver) as url:
        stage = stage_of(ran, "shared", deployment=DeploymentConfig(canary=url))
        with pytest.raises(DeploymentFailed, match="nothing was decided"):
            stage.decide(stage.first, stage.base, "0000")
    assert stage.registry.live() is None


@pytest.mark.parametrize(
    ("completion", "fault"),
    [
        (Completion([1, 2], [-0.5, -1.0], [("v", 0, 2)], "stop"), None),
        (Completion([], [], [], "stop"), "no token came back"),
        (Completion([1], [-1.0], [("v", 0, 1)], "abort"), "the engine aborted the request"),
        (Completion([1, 2], [-1.0], [("v", 0, 2)], "stop"), "2 tokens came back with 1 logprobs"),
        (Completion([1, 2], [-1.0, float("nan")], [("v", 0, 2)], "stop"), "the logprob of token 1 is nan"),
        (Completion([1], [0.5], [("v", 0, 1)], "stop"), "the logprob of token 0 is 0.5"),
        (Completion([1], [-1.0], [("w", 0, 1)], "stop"), "tokens were sampled with policy w instead of v"),
        (Completion([1, 2], [-1.0, -1.0], [("v", 1, 2)], "stop"), "the policy spans leave gaps"),
        (Completion([1, 2], [-1.0, -1.0], [("v", 0, 1)], "stop"), "some tokens are stamped with no policy"),
    ],
)
def test_impossible_completions_are_reported(completion: Completion, fault: str | None) -> None:
    assert fault_of(completion, "v") == fault


@pytest.fixture
def server(ran: World) -> Iterator[str]:
    with serving(open_artifact(ran.store, stage_of(ran, "any").base)) as url:
        yield url


def test_servers_are_swapped_and_one_that_can_not_be_is_named(ran: World, server: str) -> None:
    nobody = url_of_nobody()
    deployment = DeploymentConfig(servers=(server, nobody), attempts=1, timeout_s=20.0)
    stage = stage_of(ran, "served", deployment=deployment)
    stage.promote(stage.first, stage.base, "0000")
    swapped, missing = bring_servers(ran.store, stage.experiment, stage.base)
    assert swapped.policy == stage.first.digest and swapped.fault is None
    assert missing.fault is not None and nobody in missing.fault and "by hand" in missing.fault
    shown = server_metadata([swapped, missing])
    assert (shown["servers live"], shown["servers behind"]) == (1, 1) and missing.fault in shown["servers"].value
    done = roll_back(ran.store, stage.experiment, plan_rollback(ran.store, "served", None), "a drill")
    assert [each.policy for each in done.servers] == [stage.base.digest, None]
    assert httpx.get(server.replace("/v1", "/version")).json()["version"] == stage.base.digest


def test_a_server_that_refuses_the_live_policy_is_withdrawn_until_it_takes_one(ran: World, server: str) -> None:
    stage = stage_of(ran, "refusing", deployment=DeploymentConfig(servers=(server,), attempts=2))
    bad = spoilt(ran, stage.first, "model.norm.weight", None)
    state = require_ref(ran.store, ran.experiment.name, "checkpoint", "0000")
    stage.registry.promote(bad, state, parent=stage.base.digest, iteration="0000")
    (refused,) = bring_servers(ran.store, stage.experiment, stage.base)
    assert refused.fault is not None and "model.norm.weight" in refused.fault and "withdrawn" in refused.fault
    assert httpx.get(server.replace("/v1", "/health")).status_code == 503
    assert httpx.post(f"{server}/completions", json={"prompt": [5]}).json()["error"]["code"] == "withdrawn"
    roll_back(ran.store, stage.experiment, plan_rollback(ran.store, "refusing", "base"), "can't be served")
    assert httpx.get(server.replace("/v1", "/health")).status_code == 200


def promoted_but_broken(stage: Stage) -> ArtifactRef:
    """A live policy that lacks a tensor: it went live before any server had to load it."""
    bad = spoilt(stage.world, stage.first, "model.norm.weight", None)
    state = trainer_state_of(stage.world.store, stage.first)
    assert stage.registry.promote(bad, state, parent=stage.base.digest, iteration="0000") is not None
    return bad


def test_a_policy_that_no_server_can_serve_is_rolled_back_once(ran: World, server: str) -> None:
    stage = stage_of(ran, "automatic", deployment=DeploymentConfig(servers=(server,), attempts=1))
    bad = promoted_but_broken(stage)

    def swap() -> Swapped:
        return swap_or_roll_back(ran.store, stage.experiment, stage.base, bad, "0000")

    done = swap()
    live = stage.registry.live()
    assert live is not None and live.policy == stage.base and is_automatic(live) and done.rolled_back is not None
    assert live.rollback is not None and "model.norm.weight" in live.rollback.reason
    assert [(each.policy, each.fault) for each in done.servers] == [(stage.base.digest, None)]
    assert httpx.get(server.replace("/v1", "/health")).status_code == 200
    shown = went_live(
        Decision(decision="live", reasons=["good"], candidate=bad, parent=stage.base, pointer_number=1),
        stage.registry.rolled_back()[bad.digest],
    )
    assert not shown.passed and str(shown.description).startswith("rolled back automatically: change 2")
    assert swap().rolled_back is None and len(stage.registry.history()) == 2
    roll_back(ran.store, stage.experiment, plan_rollback(ran.store, "automatic", "1"), "the operator insists")
    assert swap().rolled_back is None and stage.registry.history()[-1].policy == bad


def test_a_run_killed_after_its_automatic_rollback_only_updates_the_servers(ran: World, server: str) -> None:
    stage = stage_of(ran, "killed_after", deployment=DeploymentConfig(servers=(server,), attempts=1))
    bad = promoted_but_broken(stage)
    bring_servers(ran.store, stage.experiment, stage.base)  # withdrawn, then the registry changes, then the kill
    request = f"{AUTOMATIC}0000/{bad.digest}"
    change_live(ran.store, "killed_after", plan_rollback(ran.store, "killed_after", None), "unservable", request)
    again = swap_or_roll_back(ran.store, stage.experiment, stage.base, bad, "0000")
    assert [each.policy for each in again.servers] == [stage.base.digest] and again.rolled_back is None
    assert len(stage.registry.history()) == 2


def test_an_unreachable_server_causes_no_rollback(ran: World, server: str) -> None:
    nobody = url_of_nobody()
    for name, servers in (("nobody", (nobody,)), ("one_of_two", (server, nobody))):
        stage = stage_of(ran, name, deployment=DeploymentConfig(servers=servers, attempts=1, timeout_s=20.0))
        bad = promoted_but_broken(stage)
        done = swap_or_roll_back(ran.store, stage.experiment, stage.base, bad, "0000")
        assert done.rolled_back is None and all(each.fault for each in done.servers)
        assert [entry.policy for entry in stage.registry.history()] == [bad]


def test_a_server_that_serves_the_new_policy_prevents_a_rollback(ran: World, server: str) -> None:
    stage = stage_of(ran, "serves", deployment=DeploymentConfig(servers=(server,)))
    stage.promote(stage.first, stage.base, "0000")
    done = swap_or_roll_back(ran.store, stage.experiment, stage.base, stage.first, "0000")
    assert done.rolled_back is None and [each.policy for each in done.servers] == [stage.first.digest]


def test_impossible_tokens_after_the_swap_are_the_policys_fault_but_aborted_ones_are_not(ran: World) -> None:
    for name, completion, rolls in (
        ("impossible", {"logprobs": [0.5] * 3}, True),
        ("aborting", {"finish_reason": "abort"}, False),
    ):
        stage = stage_of(ran, name)
        base = open_artifact(ran.store, stage.base)

        class Odd(BuiltinEngine):
            changed: ClassVar[dict[str, Any]] = completion

            async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
                found = await super().generate(prompt_ids, replace(params, max_tokens=3))
                return replace(found, **self.changed) if len(found.token_ids) == 3 else found

        with serving(base, engine_class=Odd) as url:
            stage = stage_of(ran, name, deployment=DeploymentConfig(servers=(url,), attempts=1))
            stage.promote(stage.first, stage.base, "0000")
            done = swap_or_roll_back(ran.store, stage.experiment, stage.base, stage.first, "0000")
        assert (done.rolled_back is not None) == rolls, done.servers


def test_swapped_server_ends_on_the_live_policy(ran: World, server: str) -> None:
    stage = stage_of(ran, "changing")
    seen = iter([stage.first, stage.second])
    last = stage.second

    def live() -> Artifact:
        return open_artifact(ran.store, next(seen, last))

    (state,) = asyncio.run(swap_servers(DeploymentConfig(servers=(server,)), live))
    assert state.policy == last.digest and state.fault is None

    async def sample() -> Completion:
        engine = OpenAIEngine(server, "policy", version=last.digest)
        completion = await engine.generate([5, 6], SamplingParams(1.0, 4, 0))
        await engine.close()
        return completion

    assert fault_of(asyncio.run(sample()), last.digest) is None


def test_a_promotion_whose_record_was_lost_is_found_again_even_after_a_rollback(ran: World) -> None:
    stage = stage_of(ran, "killed")
    stage.promote(stage.first, stage.base, "0000")
    roll_back(ran.store, stage.experiment, plan_rollback(ran.store, "killed", None), "while it was down")
    decision = stage.decide(stage.first, stage.base, "0000", no_smoke)
    live = stage.registry.live()
    assert (decision.decision, decision.pointer_number) == ("live", 1)
    assert live is not None and live.policy == stage.base and live.number == 2


def test_a_killed_run_finds_its_promotion_whatever_the_margin_asks_by_then(ran: World) -> None:
    stage = stage_of(ran, "stricter")
    stage.promote(stage.first, stage.base, "0000")
    strict = stage_of(ran, "stricter", promotion=ran.experiment.promotion.model_copy(update={"margin": 0.0}))
    decision = strict.decide(strict.first, strict.base, "0000", no_smoke)
    assert (decision.decision, decision.pointer_number) == ("live", 1)
    assert "went live as change 1 before" in decision.reasons[0]


def test_a_run_whose_smoke_fails_while_another_of_its_iteration_promotes_says_live(ran: World) -> None:
    stage = stage_of(ran, "overtaken")

    def overtaken() -> Smoke:
        stage.promote(stage.first, stage.base, "0000")
        return Smoke(fault="its own canary is on fire", task_id="none", outcome=None)

    assert stage.decide(stage.first, stage.base, "0000", overtaken).decision == "live"


class Overtaken:
    """A store in which another run promotes, once, right after this one has looked at what is live."""

    def __init__(self, store: Store, prefix: str, promote: Callable[[], None]) -> None:
        self._store, self._prefix, self._promote = store, prefix, promote
        self.looks = 0

    def list(self, prefix: str) -> list[str]:
        found = list(self._store.list(prefix))
        if prefix == self._prefix:
            self.looks += 1
            if self.looks == 1:
                self._promote()
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_run_overtaken_between_two_registry_reads_is_not_stale(ran: World) -> None:
    stage = stage_of(ran, "between")
    store = Overtaken(ran.store, "pointers/live/between/", lambda: stage.promote(stage.first, stage.base, "0000"))
    late = replace(stage, world=replace(ran, store=store))
    decision = late.decide(stage.first, stage.base, "0000", no_smoke)
    assert store.looks > 1 and (decision.decision, decision.pointer_number) == ("live", 1)


def test_a_rolled_back_candidate_is_not_promoted_again_by_another_decision(ran: World) -> None:
    stage = stage_of(ran, "twice")
    assert stage.decide(stage.first, stage.base, "0000", good_smoke).decision == "live"
    roll_back(ran.store, stage.experiment, plan_rollback(ran.store, "twice", None), "it cheats")
    promotion = ran.experiment.promotion.model_copy(update={"margin": 0.99})
    other = stage_of(ran, "twice", promotion=promotion)
    assert other.decide(other.first, other.base, "0000", no_smoke).pointer_number == 1
    elsewhere = other.decide(other.first, other.base, "0001", no_smoke)
    assert elsewhere.decision == "stale" and "triplane rollback --to 1" in elsewhere.reasons[0]
    assert [entry.policy for entry in stage.registry.history()] == [stage.first, stage.base]


def test_a_candidate_of_a_rolled_back_parent_is_stale(ran: World) -> None:
    stage = stage_of(ran, "orphan")
    stage.promote(stage.first, stage.base, "0000")
    roll_back(ran.store, stage.experiment, plan_rollback(ran.store, "orphan", "base"), "it cheats")
    decision = stage.decide(stage.second, stage.first, "0001", no_smoke)
    assert decision.decision == "stale" and "restored by a rollback (it cheats)" in decision.reasons[0]
    assert stage.registry.history()[-1].policy == stage.base


def at_once(*works: Callable[[Callable[[], Smoke]], None]) -> None:
    """Run each in a thread; each is given a smoke episode that ends when all of them have come as far."""
    start = Barrier(len(works))

    def meet() -> Smoke:
        start.wait(60)
        return good_smoke()

    threads = [Thread(target=work, args=(meet,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)


def test_concurrent_rollback_and_promotion_succeed_once(ran: World) -> None:
    stage = stage_of(ran, "racing")
    stage.promote(stage.first, stage.base, "0000")
    plan = plan_rollback(ran.store, "racing", "base")
    decisions, refusals = list[Decision](), list[str]()

    def back(meet: Callable[[], Smoke]) -> None:
        meet()
        try:
            roll_back(ran.store, stage.experiment, plan, "a drill")
        except RegistryError as error:
            refusals.append(str(error))

    at_once(lambda meet: decisions.append(stage.decide(stage.second, stage.first, "0001", meet)), back)
    live = stage.registry.live()
    assert live is not None and live.number == 2, "exactly one change was made"
    if live.rollback is None:
        assert decisions[0].decision == "live" and stage.second.short in refusals[0]
    else:
        assert decisions[0].decision == "stale" and "a drill" in decisions[0].reasons[0] and not refusals


def test_concurrent_promotions_succeed_once(ran: World) -> None:
    stage = stage_of(ran, "rivals")
    decisions: dict[str, Decision] = {}

    def deploy(candidate: ArtifactRef, iteration: str) -> Callable[[Callable[[], Smoke]], None]:
        def work(meet: Callable[[], Smoke]) -> None:
            decisions[candidate.short] = stage.decide(candidate, stage.base, iteration, meet)

        return work

    at_once(deploy(stage.first, "0000"), deploy(stage.second, "0001"))
    (live,) = stage.registry.history()
    winner = decisions.pop(live.policy.short)
    (loser,) = decisions.values()
    assert (winner.decision, winner.pointer_number) == ("live", 1)
    assert loser.decision == "stale" and f"{live.policy.short} is" in loser.reasons[0]


def test_a_wrong_deployment_is_refused_by_name() -> None:
    for deployment, named in (
        ({"servers": ["localhost:8000"]}, "http://host:8000/v1"),
        ({"servers": ["http://a:1/v1"], "canary": "http://a:1/v1"}, "whose clients would get candidates"),
        ({"servers": ["http://a:1/v1", "http://a:1/v1"]}, "twice"),
    ):
        with pytest.raises(Exception, match=named):
            parse_experiment({"name": "one", "deployment": deployment})
