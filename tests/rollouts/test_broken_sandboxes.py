"""Whatever an agent does to its own sandbox ends its own episode; only what a control suffers too is infrastructure,
and is retried.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from envd_servers import Server
from rollouts_script import (
    POLICY,
    GraderByDiff,
    Script,
    ScriptedEngine,
    call,
    make_plan,
    make_tasks,
    one_file_task,
    read_then_maybe_fix,
)

from contracts.artifacts import Artifact
from contracts.chat import ChatTokenizer, ToolCallText
from contracts.episodes import Episode, Outcome, Slot
from contracts.errors import InfraFault
from contracts.store import LocalStore
from curation.rewards import RewardConfig
from curation.rewards.grading import grade_episodes
from curation.verify import Verifier
from envd.client import Limits
from envd.local import LocalEnvd
from envd.operations.client import OperationsClient
from inference.rollouts.config import RolloutConfig
from inference.rollouts.episode import Player, play_episode
from inference.rollouts.merge import merge_groups
from inference.rollouts.worker import run_shard
from inference.rollouts.workspace import Workspaces

pytestmark = pytest.mark.slow

SLOT = Slot("test", "0001", "g", "task-000", 0, 5)
PRLIMIT = "import resource as r; [r.prlimit(p, r.RLIMIT_NOFILE, (0, 0)) for p in {pids}]"
ATTACKS = {
    "kill everything": "kill -9 -1",
    "kill init": "kill -9 1; kill -11 1; kill -STOP 1; kill -9 $PPID",
    "stop the agent": "for p in /proc/[0-9]*; do kill -STOP ${p#/proc/}; done",
    "prlimit on init": f"python3 -c '{PRLIMIT.format(pids='(1,)')}'",
    "prlimit on all": (
        "for p in $(ls /proc | grep '^[0-9]'); do prlimit --pid $p --nofile=0:0 --as=0:0 --nproc=0:0; done"
    ),
    "fill the disk": "dd if=/dev/zero of=zeros bs=1M; dd if=/dev/zero of=/tmp/zeros bs=1M; true",
    "fill memory": "python3 -c 'x = [bytearray(1 << 26) for _ in range(1000)]'",
    "fork bomb": "python3 -c 'import os\nwhile 1:\n try: os.fork()\n except OSError: pass' & sleep 1",
    "a name that is not UTF-8": (
        r"printf x > $'\xff.pth'; mkdir $'d\xfe'; printf y > $'d\xfe/\xfd'; ln -s $'\xfc' $'l\xfb'"
    ),
    "sixty hard links": "head -c 60000000 /dev/urandom > big; for i in $(seq 60); do ln big link$i; done",
    "many files": "mkdir many; cd many; seq 1 20000 | xargs touch",
    "no workspace": 'cd /; rm -rf "$OLDPWD"/* "$OLDPWD"/.git; chmod 000 "$OLDPWD"; mv "$OLDPWD" /tmp/away',
    "deep folders": "for i in $(seq 2000); do mkdir d && cd d || break; done; touch deep",
    "locked files": "chmod 000 m.py .; mkfifo pipe",
    "a name with escapes": r"touch $'\e[2J\n\r\t\"\\.py'",
}


def script_of(command: str) -> Script:
    turns: list[Sequence[ToolCallText] | str] = [[call("exec", command=command)], [call("read", path="m.py")], "done"]
    return lambda turn, seed: turns[turn]


def play(
    envd: LocalEnvd | Server, tokenizer: ChatTokenizer, script: Script, *, left: int = 0, **config: object
) -> Episode:
    """left: sandboxes that may live on."""
    settings = {"max_tokens": 4000, "max_turn_tokens": 600, "tool_timeout_s": 5, "episode_timeout_s": 300, **config}

    async def run() -> Episode:
        async with OperationsClient(envd.address) as client:
            rollouts = RolloutConfig.model_validate(settings)
            workspaces = Workspaces(client, Limits(), rollouts.episode_timeout_s)
            engine = ScriptedEngine(tokenizer, script)
            player = Player(engine, workspaces, tokenizer, rollouts, POLICY.digest, "k", asyncio.Semaphore(1))
            episode = await play_episode(player, one_file_task(0), SLOT, "g")
            assert (await client.info()).live <= left, "a sandbox was left behind"
            return episode

    return asyncio.run(run())


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_an_agent_does_to_its_sandbox_is_an_outcome_of_its_episode(
    attack: str, envd: LocalEnvd, tokenizer: ChatTokenizer
) -> None:
    episode = play(envd, tokenizer, script_of(ATTACKS[attack]), profile="throughput")
    assert episode.outcome in (Outcome.COMPLETED, Outcome.FAILED)
    assert (episode.failure is not None) == (episode.outcome is Outcome.FAILED)
    assert episode.telemetry["retries"] == 0, "no second chance"


@pytest.mark.parametrize(("profile", "retries"), [("throughput", 0), ("deterministic", 1)])
def test_a_final_state_that_can_not_be_read_fails_the_episode_and_says_why(
    profile: str, retries: int, envd: LocalEnvd, tokenizer: ChatTokenizer
) -> None:
    episode = play(envd, tokenizer, script_of(ATTACKS["locked files"]), profile=profile)
    assert (episode.outcome, episode.final_diff, episode.attempt) == (Outcome.FAILED, b"", 0)
    assert episode.failure == "the final state could not be read: the workspace can't be listed (permission denied)"
    assert episode.telemetry["retries"] == retries, "under the deterministic profile a repetition tells"
    assert episode.policy_tokens > 0


def test_groups_whose_agents_break_their_sandboxes_are_committed_scored_0_and_train(
    tmp_path: Path, envd: LocalEnvd, tokenizer: ChatTokenizer
) -> None:
    """No step stops: half of the agents break theirs, one group's all do."""
    tasks, store = make_tasks(3), LocalStore(tmp_path)
    plan = make_plan(tasks, 3, group_size=4, max_tokens=4000, max_turn_tokens=600, refill=True)

    def script(turn: int, seed: int) -> Sequence[ToolCallText] | str:
        if seed % 2:
            return read_then_maybe_fix(turn, seed)
        return [[call("exec", command=ATTACKS["locked files"])], "done"][turn]

    async def run() -> tuple[Artifact, pa.Table]:
        async with OperationsClient(envd.address) as client:
            await run_shard(
                plan,
                0,
                engine=ScriptedEngine(tokenizer, script),
                sandboxes=client,
                tokenizer=tokenizer,
                tasks=tasks,
                store=store,
                grader=GraderByDiff(),
            )
            rollouts = merge_groups(plan, store)
            table = rollouts.table("episodes.parquet")
            return rollouts, await grade_episodes(
                table, tasks, Verifier(client, store), RewardConfig(), lambda *_: None
            )

    rollouts, rewards = asyncio.run(run())
    episodes = rollouts.table("episodes.parquet").to_pylist()
    assert {row["outcome"] for row in episodes} == {"completed", "failed"}
    assert rollouts.meta["infra_errors"] == 0
    for episode, reward in zip(episodes, rewards.to_pylist(), strict=True):
        if episode["outcome"] == "failed":
            assert (reward["reward"], reward["solved"], reward["verdict"]) == (0.0, False, "sandbox_broken")
        else:
            assert reward["solved"] is True


@pytest.fixture
def server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="envd") as folder:
        found = Server(Path(folder))
        found.start()
        yield found
        found.kill()


@pytest.mark.parametrize("profile", ["throughput", "deterministic"])
@pytest.mark.parametrize("when", ["between calls", "during a call"])
def test_a_server_that_is_killed_and_comes_back_costs_a_retry_and_no_score(
    profile: str, when: str, server: Server, tokenizer: ChatTokenizer
) -> None:
    """The restarted server works, so a control passes; that it does not know the sandbox shows whose fault it was."""

    def restart() -> None:
        server.kill()
        server.start()

    def script(turn: int, seed: int) -> Sequence[ToolCallText] | str:
        if turn == 1 and server.starts == 1:
            if when == "between calls":
                restart()
            else:
                threading.Timer(0.5, restart).start()
                return [call("exec", command="sleep 3")]
        return [[call("read", path="m.py")], [call("read", path="m.py")], "done"][turn]

    episode = play(server, tokenizer, script, profile=profile, max_attempts=8)
    assert (episode.outcome, server.starts) == (Outcome.COMPLETED, 2)
    assert episode.telemetry["retries"] >= 1 and episode.failure is None


@pytest.mark.parametrize("profile", ["throughput", "deterministic"])
def test_a_local_server_that_is_killed_costs_one_retry(profile: str, tokenizer: ChatTokenizer) -> None:
    killed: list[int] = []

    def script(turn: int, seed: int) -> Sequence[ToolCallText] | str:
        if turn == 1 and not killed:
            assert envd._process is not None
            killed.append(envd._process.pid)
            os.kill(killed[0], signal.SIGKILL)
        return [[call("read", path="m.py")], [call("read", path="m.py")], "done"][turn]

    with LocalEnvd(revive=True) as envd:
        episode = play(envd, tokenizer, script, profile=profile, max_attempts=2)
    assert (episode.outcome, episode.telemetry["retries"], episode.failure) == (Outcome.COMPLETED, 1, None)


def test_unreachable_sandbox_server_is_never_scored(
    server: Server, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envd.client.RPC_GRACE_S", 0.5)
    monkeypatch.setattr("inference.rollouts.workspace._RETURN_S", 0.5)

    def script(turn: int, seed: int) -> Sequence[ToolCallText] | str:
        if turn == 1:
            server.kill()
        return [[call("read", path="m.py")], [call("read", path="m.py")], "done"][turn]

    with pytest.raises(InfraFault, match="did not answer"):
        play(server, tokenizer, script, max_attempts=2)


class Relay:
    """A socket before a server's, whose connections can be cut."""

    def __init__(self, server: Server, folder: Path) -> None:
        self._server, self._ends = server.address.removeprefix("unix:"), list[socket.socket]()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{folder}/relay")
        self._listener.listen()
        server.address = f"unix:{folder}/relay"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Cut all connections; new ones are taken."""
        while self._ends:
            with contextlib.suppress(OSError):
                self._ends.pop().shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            near, far = self._listener.accept()[0], socket.socket(socket.AF_UNIX)
            far.connect(self._server)
            self._ends += (near, far)
            for ends in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)


@pytest.mark.parametrize("profile", ["throughput", "deterministic"])
def test_a_connection_that_breaks_during_a_call_costs_a_retry_and_no_score(
    profile: str, server: Server, tokenizer: ChatTokenizer
) -> None:
    """Server and sandbox live on, and a control passes; no agent reaches the connection."""
    with tempfile.TemporaryDirectory() as folder:
        relay, cuts = Relay(server, Path(folder)), list[int]()

        def script(turn: int, seed: int) -> Sequence[ToolCallText] | str:
            if turn == 1 and not cuts:
                cuts.append(turn)
                threading.Timer(0.3, relay.cut).start()
                return [call("exec", command="sleep 1")]
            return [[call("read", path="m.py")], [call("read", path="m.py")], "done"][turn]

        episode = play(server, tokenizer, script, profile=profile, left=1)
    assert (episode.outcome, episode.telemetry["retries"], episode.failure) == (Outcome.COMPLETED, 1, None)
