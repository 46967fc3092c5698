"""An episode that is graded by the requests of its sandbox."""

from __future__ import annotations

import asyncio
import dataclasses
import http.server
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from rollouts_script import POLICY, ScriptedEngine, call, make_plan, make_tasks, one_file_task, play_evaluation

from contracts.chat import ChatTokenizer, ToolCallText
from contracts.final_states import ExpectedRequest, RequestsState
from curation.verify import Verifier
from envd.client import SandboxClient
from envd.local import LocalEnvd
from inference.errors import RolloutError
from inference.rollouts.episode import Player
from inference.rollouts.replay import replay_episode


class _Accepts(http.server.BaseHTTPRequestHandler):
    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_the_requests_of_a_sandbox_are_the_final_state_and_are_not_made_again(
    tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Accepts)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (tmp_path / "rules").write_text("network: {allow: [{host: 127.0.0.0/8}]}")
    host = f"127.0.0.1:{server.server_port}"
    expected = ExpectedRequest(name="put", method="PUT", host=host, path="/switch", body={"on": True})
    task = dataclasses.replace(
        one_file_task(0), final_state=RequestsState(requests=(expected,)), hidden_files={}, tests=()
    )
    program = (
        "import http.client; c = http.client.HTTPConnection('127.0.0.1', 3128); "
        f"c.request('PUT', 'http://{host}/switch', '{{\\\"on\\\": true}}'); print(c.getresponse().status)"
    )

    def script(turn: int, seed: int) -> Sequence[ToolCallText] | str:
        return [[call("exec", command=f'python3 -c "{program}"')], "done"][turn]

    config = make_plan(make_tasks(1), 1, max_tokens=3000, max_turn_tokens=800).config

    async def run() -> None:
        with LocalEnvd("namespaces", options=["--policy", str(tmp_path / "rules")]) as envd:
            async with SandboxClient(envd.address) as client:
                player = Player.of(
                    ScriptedEngine(tokenizer, script), client, tokenizer, config, policy_version=POLICY.digest, key="k"
                )
                (episode,) = await play_evaluation(player, [task], 1)
                assert episode.tool_calls[0].result == "204\nexit 0" and episode.final_kind == "requests"
                assert (await Verifier(client, None).grade(task, episode.final_diff)).solved
                with pytest.raises(RolloutError, match="a replay would make them again"):
                    await replay_episode(episode, task, sandboxes=client, tokenizer=tokenizer, config=config)

    try:
        asyncio.run(run())
    finally:
        server.shutdown()
        server.server_close()
