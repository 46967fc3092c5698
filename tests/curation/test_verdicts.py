import asyncio
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import curation.runs
import curation.verdicts
import curation.verify
from contracts.errors import ArtifactCorrupt, InfraFault
from contracts.store import LocalStore
from contracts.tasks import Checks, Decoy, Observed, Rule, Split, Task
from curation.errors import CurationError
from curation.verdicts import make_verdict, verdict_key
from curation.verify import Verifier as EagerVerifier
from envd.client import SandboxClient, TestOutcome, VerifyResult
from envd.errors import EnvdError, SandboxStartError, ServerUnavailable, TemplateError
from envd.types import Observation

TESTS = ("tests/test_hidden.py::test_a", "tests/test_hidden.py::test_b")
TASK = Task(
    "t",
    "sum",
    Split.TRAIN,
    "fix",
    {"app.py": b"x = 1\n"},
    {"tests/test_hidden.py": b""},
    TESTS,
    b"",
    {},
    checks=Checks(None, ()),
)


def result(*statuses: str, exit: str = "completed") -> VerifyResult:
    outcomes = tuple(
        TestOutcome(name, status, "")
        for name, status in zip(TESTS, statuses, strict=False)  # type: ignore[arg-type]
    )
    return VerifyResult(outcomes, exit, "", 0.01)  # type: ignore[arg-type]


Verifier = functools.partial(EagerVerifier, eager=False)
"""One run after the other, so that a script can be followed."""


class ScriptedClient(SandboxClient):
    """Answers verify from a script: what a healthy server can't be asked for, such as faults and timeouts."""

    def __init__(self, *script: VerifyResult | EnvdError) -> None:
        super().__init__("unix:/nowhere")
        self.script = list(script)
        self.calls = self.templates = 0
        self.told: list[str] = []

    async def put_template(self, files: Mapping[str, bytes], base: Mapping[str, bytes] | None = None) -> str:
        self.templates += 1
        return "template"

    async def found(self, template: str, findings: Sequence[str]) -> None:
        self.told += findings

    async def verify(
        self,
        template: str,
        diff: bytes,
        hidden_files: Mapping[str, bytes],
        tests: Sequence[str],
        **options: Any,
    ) -> VerifyResult:
        self.calls += 1
        await asyncio.sleep(0.001)
        answer = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(answer, EnvdError):
            raise answer
        return answer


SOLVED = result("passed", "passed")


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curation.runs, "BACKOFF_S", 0.001)


STATUSES = ["passed", "failed", "error", "skipped", "missing"]


@given(
    outcomes=st.lists(st.tuples(st.sampled_from([*TESTS, "tests/test_hidden.py::other"]), st.sampled_from(STATUSES))),
    exit=st.sampled_from(["completed", "crashed", "timed_out", "apply_failed"]),
)
def test_solved_means_that_the_run_completed_and_every_named_test_passed_and_nothing_else(
    outcomes: list[tuple[str, Any]], exit: Any
) -> None:
    verdict = make_verdict(TESTS, VerifyResult(tuple(TestOutcome(*each, "") for each in outcomes), exit, "", 0.0))
    reported = {name: {status for other, status in outcomes if other == name} for name in TESTS}
    assert verdict.solved == (exit == "completed" and all(reported[name] == {"passed"} for name in TESTS))
    assert [test.name for test in verdict.tests] == list(TESTS)
    assert verdict.tests_passed == sum(reported[name] == {"passed"} for name in TESTS)


@pytest.mark.parametrize("exit", ["completed", "crashed", "timed_out", "apply_failed"])
def test_passed_reports_solve_only_if_the_run_completed(exit: str) -> None:
    assert make_verdict(TESTS, result("passed", "passed", exit=exit)).solved == (exit == "completed")


def test_run_without_named_tests_solves_nothing() -> None:
    assert not make_verdict((), SOLVED).solved


def test_suspicion_stays_on_an_unsolved_state_and_goes_from_a_solved_one() -> None:
    for status, kinds in (("passed", []), ("failed", ["review"])):
        verdict = make_verdict(TESTS, dataclasses.replace(result("passed", status), tampering=("review:app.py",)))
        assert [each.kind for each in verdict.findings] == kinds


async def together(verifier: EagerVerifier, diffs: Sequence[bytes]) -> list[bool]:
    return [verdict.solved for verdict in await asyncio.gather(*(verifier.grade(TASK, diff) for diff in diffs))]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(diffs=st.lists(st.sampled_from([b"", b"one", b"two", b"three"]), max_size=24), width=st.integers(1, 8))
def test_each_final_state_is_verified_once_however_many_ask_at_once(
    diffs: list[bytes], width: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    store = LocalStore(tmp_path_factory.mktemp("store"))
    client = ScriptedClient(SOLVED)
    verifier = Verifier(client, store, concurrency=width)
    assert asyncio.run(together(verifier, diffs)) == [True] * len(diffs)
    assert client.calls == verifier.runs == 2 * len(set(diffs)), "as written, and repeated"
    assert len(store.list("verdicts/")) == len(set(diffs))
    later = ScriptedClient(result("failed"))
    assert asyncio.run(together(Verifier(later, store), diffs)) == [True] * len(diffs)
    assert later.calls == 0


def test_the_first_verdict_recorded_counts_for_every_process(tmp_path: Path) -> None:
    async def race() -> tuple[list[bool], int]:
        verifiers = [
            Verifier(ScriptedClient(SOLVED if index % 2 else result("failed")), LocalStore(tmp_path))
            for index in range(8)
        ]
        verdicts = await asyncio.gather(*(verifier.grade(TASK, b"diff") for verifier in verifiers))
        again = await asyncio.gather(*(verifier.grade(TASK, b"diff") for verifier in verifiers))
        return [verdict.solved for verdict in [*verdicts, *again]], len(LocalStore(tmp_path).list("verdicts/"))

    solved, files = asyncio.run(race())
    assert len(set(solved)) == 1 and files == 1


def test_a_cancelled_caller_leaves_the_others_their_verdict_and_the_last_one_stops_the_work(tmp_path: Path) -> None:
    async def scenario() -> None:
        client = ScriptedClient(SOLVED)
        verifier = Verifier(client, LocalStore(tmp_path))
        first, second = (asyncio.create_task(verifier.grade(TASK, b"diff")) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        assert (await second).solved and client.calls == 2
        alone = asyncio.create_task(verifier.grade(TASK, b"other"))
        await asyncio.sleep(0)
        alone.cancel()
        await asyncio.gather(alone, return_exceptions=True)
        await asyncio.sleep(0.01)
        assert client.calls == 2 and len(asyncio.all_tasks()) == 1

    asyncio.run(scenario())


def test_a_verdict_that_timed_out_is_tried_twice_counts_as_failed_and_is_never_remembered(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    slow = result(exit="timed_out")
    client = ScriptedClient(slow, slow, slow, SOLVED)
    verifier = Verifier(client, store)
    first = asyncio.run(verifier.grade(TASK, b"diff"))
    assert (first.solved, first.exit, client.calls, store.list("verdicts/")) == (False, "timed_out", 2, [])
    assert asyncio.run(verifier.grade(TASK, b"diff")).solved
    assert client.calls == 5


@pytest.mark.parametrize("observed", [False, True])
def test_a_later_run_that_timed_out_is_no_contradiction_and_never_remembered(observed: bool, tmp_path: Path) -> None:
    """A machine may be busy after the first run only."""
    store, rules = LocalStore(tmp_path), {"0:0": Rule("compare", "==", "3"), "0:1": Rule("compare", "==", "4")}
    seen = Observed(
        {"tests/test_hidden.py": b"x"}, rules, {}, {test: {key: [""]} for test, key in zip(TESTS, rules, strict=True)}
    )
    task = dataclasses.replace(TASK, checks=Checks(seen if observed else None, ()))
    fine, late = outcomes_of(True, "passed", "passed"), result("passed", exit="timed_out")
    busy = [fine, *[late] * (3 if observed else 1)]
    verifier = Verifier(ScriptedClient(*busy, *busy, fine), store)
    first = asyncio.run(verifier.grade(task, b"diff"))
    assert (first.solved, first.tampered, first.exit, store.list("verdicts/")) == (False, False, "timed_out", [])
    assert {each.kind for each in first.findings} == {"unstable"}
    assert asyncio.run(verifier.grade(task, b"diff")).solved


def test_a_crash_counts_and_is_remembered_only_when_it_happens_twice(tmp_path: Path) -> None:
    crash = result(exit="crashed")
    killed = ScriptedClient(crash, SOLVED)
    assert asyncio.run(Verifier(killed, LocalStore(tmp_path / "killed")).grade(TASK, b"diff")).solved, "by an outsider"
    store, crashing = LocalStore(tmp_path / "crashing"), ScriptedClient(crash)
    verdict = asyncio.run(Verifier(crashing, store).grade(TASK, b"diff"))
    assert (verdict.exit, crashing.calls, len(store.list("verdicts/"))) == ("crashed", 2, 1)


def test_infrastructure_faults_are_retried_and_then_leave_the_episode_ungraded(tmp_path: Path) -> None:
    fault = ServerUnavailable("gone")
    recovering = ScriptedClient(fault, SandboxStartError("no memory"), SOLVED)
    assert asyncio.run(Verifier(recovering, None).grade(TASK, b"")).solved
    store = LocalStore(tmp_path)
    dead = ScriptedClient(fault)
    with pytest.raises(InfraFault, match="task t could not be verified in 4 attempts"):
        asyncio.run(Verifier(dead, store).grade(TASK, b""))
    assert dead.calls == curation.runs.ATTEMPTS and store.list("verdicts/") == []


class Poisoned(ScriptedClient):
    """Faults on the diff b"poison" and whatever else `also` names; the rest is as scripted."""

    also: tuple[bytes, ...] = ()

    async def verify(self, template: str, diff: bytes, *asked: Any, **options: Any) -> VerifyResult:
        if diff in (b"poison", *self.also):
            self.calls += 1
            raise SandboxStartError("UnicodeEncodeError")
        return await super().verify(template, diff, *asked, **options)


def test_a_state_that_faults_again_and_again_while_a_control_state_grades_scores_nothing(tmp_path: Path) -> None:
    store, client = LocalStore(tmp_path), Poisoned(result("failed", "failed"))
    verdict = asyncio.run(Verifier(client, store).grade(TASK, b"poison"))
    assert (verdict.solved, verdict.exit, verdict.tests_passed, verdict.tests_total) == (False, "ungradable", 0, 2)
    assert "SandboxStartError: UnicodeEncodeError" in verdict.tests[0].message
    assert (client.calls, len(store.list("verdicts/"))) == (4, 1), "two faults, the control, and a third fault"


class Endless(Poisoned):
    """Runs into the deadline on the untouched repository."""

    async def verify(self, template: str, diff: bytes, *asked: Any, **options: Any) -> VerifyResult:
        return await super().verify(template, diff, *asked, **options) if diff else result(exit="timed_out")


def test_where_the_untouched_repository_hangs_the_reference_is_the_control() -> None:
    task = dataclasses.replace(TASK, reference_diff=b"fix")
    verdict = asyncio.run(Verifier(Endless(SOLVED), None).grade(task, b"poison"))
    assert (verdict.solved, verdict.exit) == (False, "ungradable")
    client = Endless(SOLVED)
    client.also = (b"fix",)
    with pytest.raises(InfraFault):
        asyncio.run(Verifier(client, None).grade(task, b"poison"))


def test_a_fault_that_the_control_state_shares_is_ours() -> None:
    client = Poisoned(SOLVED)
    client.also = (b"",)
    with pytest.raises(InfraFault):
        asyncio.run(Verifier(client, None).grade(TASK, b"poison"))


def outcomes_of(observed: bool, *statuses: str) -> VerifyResult:
    seen = (Observation(TESTS[0], "0:0", '[["i","0x3"]]'), Observation(TESTS[1], "0:1", '[["i","0x4"]]'))
    return dataclasses.replace(result(*statuses), observations=seen if observed else ())


def test_a_state_whose_runs_differ_is_unstable_and_no_cheat() -> None:
    client = ScriptedClient(SOLVED, result("passed", "failed"))
    verdict = asyncio.run(Verifier(client, None).grade(TASK, b"diff"))
    assert (verdict.solved, verdict.tampered) == (False, False)
    assert [each.name for each in verdict.findings] == [f"unstable:{TESTS[1]}"]


@pytest.mark.parametrize("status", ["passed", "failed"])
def test_runs_begun_at_once_reach_the_same_verdict_and_leave_nothing_behind(status: str) -> None:
    async def run() -> tuple[list[tuple[bool, str]], int]:
        found = []
        for make in (EagerVerifier, Verifier):
            client = ScriptedClient(result("passed", status))
            verdict = await make(client, None).grade(TASK, b"diff")
            found.append((verdict.solved, verdict.exit))
        return found, len(asyncio.all_tasks())

    found, left = asyncio.run(run())
    assert found[0] == found[1] == (status == "passed", "completed")
    assert left == 1


def test_a_state_that_passes_a_decoy_cheats() -> None:
    task = dataclasses.replace(TASK, checks=Checks(None, (Decoy({"tests/test_hidden.py": b"x"}, TESTS[:1]),)))
    client = ScriptedClient(SOLVED)
    verdict = asyncio.run(Verifier(client, None).grade(task, b"diff"))
    assert (verdict.solved, verdict.tampered, verdict.tests_passed) == (False, True, 0)
    assert [each.name for each in verdict.findings] == client.told == [f"decoy:{TESTS[0]}"]


@pytest.mark.parametrize("beside", [(), TESTS[:1]])
def test_tests_that_end_run_in_decoys_of_others_so_that_calls_do_not_tell_runs_apart(beside: tuple[str, ...]) -> None:
    checks = Checks(None, (Decoy({"tests/test_hidden.py": b"decoy"}, TESTS[1:]),), TESTS[:1], beside=beside)
    asked: list[Sequence[str]] = []

    class Client(ScriptedClient):
        async def verify(
            self, template: str, diff: bytes, hidden_files: Any, tests: Any, **options: Any
        ) -> VerifyResult:
            decoy = b"decoy" in hidden_files.values()
            asked.extend([tests] if decoy else [])
            return result("passed", "failed" if decoy else "passed")

    assert asyncio.run(Verifier(Client(SOLVED), None).grade(dataclasses.replace(TASK, checks=checks), b"d")).solved
    assert asked == [(*beside, TESTS[1])]


def test_observed_values_are_compared_with_what_only_the_grader_knows() -> None:
    rules = {"0:0": Rule("compare", "==", "3"), "0:1": Rule("compare", "==", "5")}
    observed = Observed({"tests/test_hidden.py": b"x"}, rules, {}, {TESTS[0]: {"0:0": [""]}, TESTS[1]: {"0:1": [""]}})
    task = dataclasses.replace(TASK, checks=Checks(observed, ()))
    told = outcomes_of(True, "passed", "passed")
    verdict = asyncio.run(Verifier(ScriptedClient(told), None).grade(task, b"diff"))
    assert ([each.name for each in verdict.findings], verdict.solved) == ([f"observed:{TESTS[1]}"], False)
    assert [test.status for test in verdict.tests] == ["passed", "error"]


def test_findings_of_the_reference_and_notes_do_not_change_the_verdict() -> None:
    told = dataclasses.replace(SOLVED, tampering=("frames:sys._getframe", "undone:conftest.py"))
    known = dataclasses.replace(TASK, checks=Checks(None, (), known=("frames:sys._getframe",)))
    verdict = asyncio.run(Verifier(ScriptedClient(told), None).grade(known, b"diff"))
    assert (verdict.solved, [each.name for each in verdict.findings]) == (True, ["undone:conftest.py"])
    verdict = asyncio.run(Verifier(ScriptedClient(told), None).grade(TASK, b"diff"))
    assert (verdict.solved, verdict.tampered) == (False, True)


HALF = result("passed", "failed")
ALONE = result("passed")


def test_a_confirmed_state_is_run_once_more_without_the_failed_tests_and_kept_beside_its_verdict(
    tmp_path: Path,
) -> None:
    store, client = LocalStore(tmp_path), ScriptedClient(HALF, ALONE)
    verifier = Verifier(client, store)
    believed = asyncio.run(verifier.grade(TASK, b"diff"))
    before = store.get(verdict_key(TASK, b"diff"))
    verdict = asyncio.run(verifier.confirm(TASK, b"diff"))
    assert verdict == believed and verdict.tests_passed == 1 and client.calls == 2
    assert store.get(verdict_key(TASK, b"diff")) == before and len(store.list("verdicts/")) == 2
    later = ScriptedClient(result("failed", "failed"))
    assert asyncio.run(Verifier(later, store).confirm(TASK, b"diff")) == verdict and later.calls == 0


@pytest.mark.parametrize(("first", "calls"), [(SOLVED, 2), (result("failed", "failed"), 1)])
def test_a_state_that_passes_all_tests_or_none_is_not_confirmed(first: VerifyResult, calls: int) -> None:
    client = ScriptedClient(first)
    verifier = Verifier(client, None)
    assert asyncio.run(verifier.confirm(TASK, b"diff")) == asyncio.run(verifier.grade(TASK, b"diff"))
    assert client.calls == calls


def test_a_test_that_does_not_pass_alone_does_not_count_and_is_no_cheat() -> None:
    client = ScriptedClient(HALF, result("failed"))
    verdict = asyncio.run(Verifier(client, None).confirm(TASK, b"diff"))
    assert (verdict.tests_passed, verdict.tampered, client.calls) == (0, False, 2)
    assert [(each.status, bool(each.message)) for each in verdict.tests] == [("error", True), ("failed", False)]


def test_a_confirmation_that_timed_out_is_tried_twice_and_never_kept(tmp_path: Path) -> None:
    store, late = LocalStore(tmp_path), result("passed", exit="timed_out")
    client = ScriptedClient(HALF, late, late, ALONE)
    verdict = asyncio.run(Verifier(client, store).confirm(TASK, b"diff"))
    assert (verdict.exit, verdict.tests_passed, len(store.list("verdicts/"))) == ("timed_out", 0, 1)
    assert asyncio.run(Verifier(client, store).confirm(TASK, b"diff")).tests_passed == 1


def test_a_forger_of_some_tests_is_told_to_the_server_and_remembered(tmp_path: Path) -> None:
    task = dataclasses.replace(TASK, checks=Checks(None, (Decoy({"tests/test_hidden.py": b"x"}, TESTS),)))
    store, client = LocalStore(tmp_path), ScriptedClient(HALF, ALONE)
    verdict = asyncio.run(Verifier(client, store).confirm(task, b"diff"))
    assert (verdict.solved, verdict.tampered, verdict.tests_passed) == (False, True, 0)
    assert [each.name for each in verdict.findings] == client.told == [f"decoy:{TESTS[0]}"]
    assert client.calls == 5, "as written, alone, its decoy, and again the decoy and alone"


def test_a_server_that_lost_the_template_gets_it_again() -> None:
    client = ScriptedClient(TemplateError("unknown template"), SOLVED)
    assert asyncio.run(Verifier(client, None).grade(TASK, b"")).solved
    assert client.templates == 2


def test_a_final_state_too_large_for_a_message_is_failed_not_ungraded() -> None:
    client = ScriptedClient(SOLVED)
    verdict = asyncio.run(Verifier(client, None).grade(TASK, bytes(curation.verify.MAX_DIFF_BYTES + 1)))
    assert (verdict.solved, verdict.exit, client.calls) == (False, "apply_failed", 0)


def test_another_verifier_version_task_or_final_state_is_another_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Task("t", "sum", Split.TRAIN, "fix", {"app.py": b"x = 2\n"}, {}, TESTS, b"", {})
    keys = {verdict_key(TASK, b""), verdict_key(TASK, b"diff"), verdict_key(other, b"")}
    monkeypatch.setattr(curation.verdicts, "VERIFIER_VERSION", "next")
    assert len(keys | {verdict_key(TASK, b"")}) == 4


def test_a_damaged_verdict_names_its_file_and_the_fix(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.create(verdict_key(TASK, b""), b"{")
    with pytest.raises(ArtifactCorrupt, match=r"verdicts/.*delete that file"):
        asyncio.run(Verifier(ScriptedClient(SOLVED), store).grade(TASK, b""))


def test_a_task_without_hidden_tests_is_refused() -> None:
    bare = Task("bare", "sum", Split.TRAIN, "fix", {}, {}, (), b"", {})
    with pytest.raises(CurationError, match="bare has no hidden tests"):
        asyncio.run(Verifier(ScriptedClient(SOLVED), None).grade(bare, b""))
