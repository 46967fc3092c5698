"""What a person can do wrong in the UI: each gives one clear error or waits in the queue, and changes nothing."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from contracts.upkeep import check_store
from tests.acceptance.laboratory import Laboratory, processes_of
from tests.browser.desk import LOCATION, PATIENCE_MS, Brakes, Screen, contents, wait_until
from tests.webserver import ask
from triplane_dagster.iterations import next_partition

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]
TRAIN = "ops:\n  tiny_request:\n    config:\n      iterations: 1\n      reason: {reason}\n"
ROLLBACK = "ops:\n  tiny_roll_back:\n    config:\n      to: {to}\n      reason: {reason}\n"
STEPS = ("iteration_inputs", "group", "rewards", "checkpoint", "evaluation", "sampler")
"""Kinds of artifacts, one that each step to cancel commits; a group in the midst of sampling."""
KINDS = ("group", "rollouts", "rewards", "dataset", "checkpoint", "evaluation", "sampler", "report")
RUNS = "{ runsOrError { ... on Runs { results { runId status startTime endTime } } } }"


@pytest.fixture
def nothing_changes(lab: Laboratory) -> Iterator[None]:
    before = contents(lab)
    yield
    assert contents(lab) == before


@pytest.mark.usefixtures("nothing_changes")
def test_bad_keys_fail_name_the_next_key_and_can_be_removed(screen: Screen, lab: Laboratory) -> None:
    following = next_partition(lab.store, lab.experiment)
    faults = {
        "6": "is not the key of an iteration",
        "nightone": "is not the key of an iteration",
        "0020": "is ahead of the next iteration",
    }
    pages = {}
    for key in faults:
        open_iteration_dialog(screen)
        screen.launch_partition(key, new=True)
        pages[key] = screen.page.url
    for key, fault in faults.items():
        screen.page.goto(pages[key])
        said = screen.await_failure()
        assert said.startswith(f"partition '{key}' of tiny {fault}: nothing was made; materialize {following} instead")
        assert "page of tiny/iteration_inputs, the menu beside Materialize, Delete partitions" in said
        screen.keep(f"wrong-key-{key}")
    delete_partitions(screen, *faults)
    assert not set(faults) & set(partitions_of(screen))


@pytest.mark.usefixtures("nothing_changes")
@pytest.mark.parametrize(
    ("config", "said"),
    [
        (TRAIN.replace("iterations", "iteration"), 'Received unexpected config entry "iteration"'),
        (TRAIN.replace("1", "three"), 'Value "three" of type "<class \'str\'>" is not valid for expected type "Int"'),
        ("ops:\n  tiny_reqest: {}\n", 'Received unexpected config entry "tiny_reqest"'),
    ],
)
def test_an_unknown_setting_is_refused_before_the_launch(screen: Screen, config: str, said: str) -> None:
    before = runs_of(screen)
    screen.open_launchpad("tiny_train", config.replace("{reason}", "a test"))
    expect(screen.page.get_by_text(said)).to_be_visible()
    expect(screen.page.get_by_role("button", name="Launch Run")).to_be_disabled()
    screen.keep("wrong-setting")
    assert runs_of(screen) == before


@pytest.mark.usefixtures("nothing_changes")
@pytest.mark.parametrize(
    ("to", "reason", "said"),
    [
        ("ffff", "a test", "'ffff' matches no single policy that was live in tiny: give base, a change from 1 to "),
        ("base", "''", "the reason of the rollback is empty: give a few words, which the registry records"),
    ],
)
def test_a_rollback_to_nowhere_or_without_a_reason_fails(
    screen: Screen, lab: Laboratory, to: str, reason: str, said: str
) -> None:
    screen.open_launchpad("tiny_rollback", ROLLBACK.format(to=to, reason=reason))
    screen.launch_from_launchpad()
    assert screen.await_failure().startswith(said)
    screen.keep(f"wrong-rollback-{to}")


@pytest.mark.usefixtures("nothing_changes")
@pytest.mark.parametrize(("asset", "missing"), [("checkpoint", "dataset"), ("sampler", "checkpoint")])
def test_an_asset_whose_iteration_has_not_begun_fails_and_names_what_is_missing(
    screen: Screen, lab: Laboratory, asset: str, missing: str
) -> None:
    following = next_partition(lab.store, lab.experiment)
    screen.open_asset("tiny", asset)
    screen.page.get_by_role("button", name="Materialize").first.click()
    screen.launch_partition(following, new=following not in partitions_of(screen))
    assert f"has no tiny/{missing}[{following}]: materialize it first" in screen.await_failure()
    screen.keep(f"wrong-order-{asset}")


@pytest.mark.usefixtures("nothing_changes")
def test_inputs_of_an_old_iteration_made_again_stay_as_they_were_pinned(screen: Screen) -> None:
    screen.open_asset("tiny", "iteration_inputs")
    screen.page.get_by_role("button", name="Materialize").first.click()
    run = screen.launch_partition("0000", new=False)
    screen.await_success()
    screen.open("/assets/tiny/iteration_inputs?view=partitions&partition=0000")
    expect(screen.page.get_by_role("link", name=run)).to_be_visible()
    screen.keep("repeat-inputs")


@pytest.mark.usefixtures("nothing_changes")
def test_a_backfill_of_decided_iterations_backwards_changes_nothing(screen: Screen, lab: Laboratory) -> None:
    before = set(runs_of(screen))
    decisions = {each: lab.artifact("sampler", each).ref for each in ("0001", "0000")}
    open_iteration_dialog(screen)
    screen.launch_backfill(*decisions)
    expect(screen.page.get_by_text("2 partitions")).to_be_visible()
    expect(screen.page.get_by_text("100% completed")).to_be_visible(timeout=PATIENCE_MS)
    screen.keep("backfill")
    made = [run for key, run in runs_of(screen).items() if key not in before]
    assert [run["status"] for run in made] == ["SUCCESS"] * 2 and one_after_another(made)
    for iteration, decision in decisions.items():
        assert lab.artifact("sampler", iteration).ref == decision


def test_two_at_once_wait_for_one_another(screen: Screen, lab: Laboratory, brakes: Brakes) -> None:
    iteration, before = next_partition(lab.store, lab.experiment), set(runs_of(screen))
    brakes.hold("iteration_inputs")
    screen.open_launchpad("tiny_train", TRAIN.format(reason="by day"))
    screen.launch_from_launchpad()
    screen.await_success()
    brakes.await_held("iteration_inputs")
    screen.open_asset("tiny", "rewards")
    screen.page.get_by_role("button", name="Materialize").first.click()
    screen.launch_partition("0000", new=False)
    repeated = screen.page.url
    expect(screen.page.get_by_text("Queued", exact=True).first).to_be_visible()
    screen.open_launchpad("tiny_train", TRAIN.format(reason="once more"))
    screen.launch_from_launchpad()
    expect(screen.page.get_by_text("Queued", exact=True).first).to_be_visible()
    second = screen.page.url
    screen.open("/runs")
    expect(screen.page.get_by_text("Queued (2)")).to_be_visible()
    expect(screen.page.get_by_text("In progress (1)")).to_be_visible()
    screen.keep("two-at-once")
    brakes.release()
    screen.page.goto(repeated)
    screen.await_success()
    screen.page.goto(second)
    assert screen.await_failure() == (
        f"tiny: iteration {iteration} was under way (by day) when this was launched: launch it again if more iterations"
        " are wanted"
    )
    screen.keep("wrong-second-request")
    assert one_after_another([run for key, run in runs_of(screen).items() if key not in before])
    assert lab.artifact("sampler", iteration).meta["decision"] == "live"


def test_an_iteration_canceled_at_each_step_ends_as_if_it_never_was(
    screen: Screen, lab: Laboratory, brakes: Brakes, tmp_path: Path
) -> None:
    iteration, resting = next_partition(lab.store, lab.experiment), processes(lab)
    undisturbed = Laboratory(tmp_path / "copy", lab.experiment_file, environment={"OMP_NUM_THREADS": "1"})
    shutil.copytree(lab.store.url, undisturbed.store.url, dirs_exist_ok=True)
    open_iteration_dialog(screen)
    for number, kind in enumerate(STEPS):
        brakes.hold(kind)
        if number == 0:
            screen.launch_partition(iteration, new=iteration not in partitions_of(screen))
        else:
            execute_again(screen)
        brakes.await_held(kind)
        committed = contents(lab)
        screen.terminate()
        brakes.release()
        assert screen.await_end() == "Canceled"
        screen.keep(f"canceled-{kind}")
        wait_until(lambda: processes(lab) <= resting, "the end of all processes of the run")
        assert committed.items() <= contents(lab).items()
    execute_again(screen)
    screen.await_success()
    assert not check_store(lab.store).faults
    undisturbed.iterate(1)
    assert lab.digests(*KINDS) == undisturbed.digests(*KINDS)


def open_iteration_dialog(screen: Screen) -> None:
    screen.open(f"/locations/{LOCATION}/jobs/tiny_iteration")
    screen.page.get_by_role("button", name="Materialize all").click()


def execute_again(screen: Screen) -> None:
    """Re-execute all steps of the run of the open page; the new run's page opens."""
    before = screen.page.url
    screen.page.get_by_role("button", name="Re-execute all").click()
    expect(screen.page).not_to_have_url(before)
    expect(screen.page).to_have_url(re.compile("/runs/[0-9a-f]"))


def delete_partitions(screen: Screen, *keys: str) -> None:
    """Remove partitions as the error says: the menu beside Materialize."""
    screen.open_asset("tiny", "iteration_inputs")
    screen.page.get_by_role("button", name="Materialize").first.locator("xpath=following::button[1]").click()
    screen.page.get_by_text("Delete partitions").click()
    dialog = screen.page.get_by_role("dialog").filter(has_text="Delete tiny partitions")
    screen.choose(dialog, *keys)
    dialog.get_by_role("button", name=re.compile("Delete")).click()
    expect(dialog).to_contain_text("have been deleted")
    dialog.get_by_role("button", name="Done").click()


def partitions_of(screen: Screen) -> list[str]:
    query = '{ assetNodes(assetKeys: [{ path: ["tiny", "rollouts"] }]) { partitionKeys } }'
    (node,) = ask(screen.url, query)["assetNodes"]
    keys: list[str] = node["partitionKeys"]
    return keys


def runs_of(screen: Screen) -> dict[str, dict[str, Any]]:
    """All runs by id."""
    return {run["runId"]: run for run in ask(screen.url, RUNS)["runsOrError"]["results"]}


def one_after_another(runs: list[dict[str, Any]]) -> bool:
    """Whether each run started after the one before it had ended."""
    times = sorted((run["startTime"], run["endTime"]) for run in runs)
    return all(earlier[1] <= later[0] for earlier, later in pairwise(times))


def processes(lab: Laboratory) -> set[str]:
    """Processes of the laboratory; the tracker of multiprocessing stays once the first run was launched."""
    return {line for line in processes_of(lab.folder) if "resource_tracker" not in line}
