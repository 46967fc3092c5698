"""Ctrl-C in the plain client ends the turn, not the episode."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from inference.bridge.client import Bridge, Finish, Sampling
from tests.bridge.bridge_harness import process
from tests.inference.conftest import write_checkpoint


def test_interrupt_cancels_the_turn_and_the_episode_goes_on(tmp_path: Path) -> None:
    policy = write_checkpoint(tmp_path / "p", 0, max_position_embeddings=16384)
    with process(policy, f"unix:{tmp_path / 'b.sock'}") as (_, address), Bridge(address) as bridge:
        episode = bridge.start([5, 6, 7], sampling=Sampling(max_tokens=16000, seed=1))
        interrupt = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            episode.step()
        after = episode.step([8], sampling=Sampling(max_tokens=4))
        assert len(after.token_ids) == 4
        cut = episode.turns[0]
        assert cut.finish is Finish.CANCELLED and len(cut.token_ids) < 16000
        assert episode.inner.digest() == bridge.run(lambda _: episode.inner.state()).digest
