"""`triplane bridge` hosts an experiment's episodes as its rollouts step plays them, and speaks TLS."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from inference.bridge.client import Bridge
from resources.refs import read_artifact
from tests.bridge.hosted_parts import check_equal
from tests.dagster.dagster_world import World
from tests.envd.test_services_tls import certificate

TINY = Path(__file__).with_name("tiny.yaml")


def rows(world: World, asset: str, table: str) -> list[dict[str, Any]]:
    found = read_artifact(world.store, "tiny", asset, "0000")
    assert found is not None
    return found.table(f"{table}.parquet").to_pylist()


@pytest.mark.slow
def test_hosted_episodes_over_tls_are_the_recorded_rollouts(ran: World, tmp_path: Path) -> None:
    episodes, sequences = rows(ran, "rollouts", "episodes"), rows(ran, "rollouts", "sequences")
    rewards = {each["episode_id"]: each["reward"] for each in rows(ran, "rewards", "rewards")}
    authority = certificate(tmp_path, "ca", None)
    for name in ("server", "trainer"):
        certificate(tmp_path, name, authority)
    command = [sys.executable, "-m", "triplane_dagster.cli", "bridge", "-e", str(TINY), "--listen", "localhost:0"]
    command += ["--policy", episodes[0]["policy_version"]]
    for option, file in (("cert", "server.crt"), ("key", "server.key"), ("client-ca", "ca.crt")):
        command += [f"--tls-{option}", str(tmp_path / file)]
    ours = {"tls_ca": tmp_path / "ca.crt", "tls_cert": tmp_path / "trainer.crt", "tls_key": tmp_path / "trainer.key"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as served:
        try:
            assert served.stdout is not None
            found = re.fullmatch(r"policy ([0-9a-f]{64}) at (localhost:\d+)\n", served.stdout.readline())
            assert found is not None
            with Bridge(found[2], **ours) as bridge:
                for row, sequence in zip(episodes, sequences, strict=True):
                    with bridge.start_task(row["task_id"], seed=row["seed"]) as episode:
                        while not episode.done:
                            episode.step()
                        check_equal(episode.end(), (row, sequence, rewards[row["episode_id"]]))
        finally:
            served.terminate()
    assert len(episodes) > 8 and served.returncode == 0
