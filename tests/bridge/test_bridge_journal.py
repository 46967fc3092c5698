"""The journal: what was appended is read again, a torn end is cut off, and disk use is bounded."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from contracts.pb import bridge_pb2 as pb
from inference.bridge import journal as journal_module
from inference.bridge import replay
from inference.bridge.checks import Limits, check_start
from inference.bridge.episode import Episode
from inference.bridge.errors import JournalError
from inference.bridge.hosted.state import Final, Hosted, Place, Sent
from inference.bridge.journal import MAGIC, Frame, Journal, frame, split
from inference.bridge.metrics import Counts
from inference.bridge.registry import Bounds, Registry
from inference.bridge.replay import Kind
from inference.bridge.sessions import Sessions
from inference.engines.delegating import DelegatingEngine
from tests.bridge.bridge_harness import ids, new_id, start_request

Said = tuple[int, int, bytes]
LIMITS = Limits(96, 256)


def read(folder: Path) -> list[Said]:
    journal = Journal(folder)
    found = [(each.kind, each.handle, each.payload) for each in journal.read()]
    journal.close()
    return found


def written(folder: Path, frames: list[Said]) -> None:
    journal = Journal(folder)
    list(journal.read())
    for kind, handle, payload in frames:
        journal.append(kind, handle, payload)
    journal.close()


def test_frames_are_read_in_order_over_several_openings(tmp_path: Path) -> None:
    chance = random.Random(1)
    frames = [(chance.randrange(255), chance.getrandbits(63), chance.randbytes(size)) for size in range(90)]
    for part in range(3):
        written(tmp_path, frames[part * 30 : part * 30 + 30])
    assert read(tmp_path) == frames


def test_torn_end_is_cut_at_every_length(tmp_path: Path) -> None:
    frames = [(1, 1, b"first"), (2, 1, b""), (3, 2, b"third" * 3)]
    data = MAGIC + b"".join(frame(*each) for each in frames)
    ends = [end for _, end in split(data, len(MAGIC))]
    for cut in range(len(data)):
        folder = tmp_path / str(cut)
        folder.mkdir()
        (folder / "00000001.journal").write_bytes(data[:cut])
        whole = sum(end <= cut for end in ends)
        assert read(folder) == frames[:whole]
        written(folder, [(9, 9, b"after")])
        assert read(folder) == [*frames[:whole], (9, 9, b"after")], "new frames follow the cut"


def test_flipped_bit_ends_the_segment(tmp_path: Path) -> None:
    data = bytearray(MAGIC + frame(1, 1, b"first") + frame(2, 1, b"second"))
    data[-1] ^= 1
    (tmp_path / "00000001.journal").write_bytes(data)
    assert read(tmp_path) == [(1, 1, b"first")]


def test_journal_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "00000001.journal").write_bytes(b"tpbridg0" + frame(1, 1, b"first"))
    with pytest.raises(JournalError, match="not of this release"):
        read(tmp_path)


def test_folder_with_another_programs_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.journal").write_text("groceries")
    with pytest.raises(JournalError, match=r"has notes\.journal, which is no part of a journal: name another"):
        Journal(tmp_path)
    (tmp_path / "notes.journal").unlink()
    Journal(tmp_path).close()


def test_second_process_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with pytest.raises(JournalError, match="another bridge uses the journal"):
        Journal(tmp_path)
    journal.close()
    Journal(tmp_path).close()


def test_full_disk_leaves_the_journal_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, real = Journal(tmp_path), os.write
    list(journal.read())
    journal.append(1, 1, b"kept")

    def half(fd: int, data: bytes) -> int:
        if len(data) < 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, memoryview(data)[:5])

    monkeypatch.setattr("inference.bridge.journal.os.write", half)
    with pytest.raises(JournalError, match="free some space"):
        journal.append(1, 2, b"lost")
    monkeypatch.undo()
    journal.append(1, 3, b"kept too")
    journal.close()
    assert read(tmp_path) == [(1, 1, b"kept"), (1, 3, b"kept too")]


def full(fd: int, data: bytes) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_full_disk_at_the_start_is_an_error_of_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path)
    monkeypatch.setattr("inference.bridge.journal.os.write", full)
    with pytest.raises(JournalError, match="free some space"):
        list(journal.read())
    journal.close()


async def synced(journal: Journal, condition: Callable[[], bool]) -> None:
    """Run `Journal.sync` until a condition holds."""
    syncing = asyncio.create_task(journal.sync())
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    syncing.cancel()
    assert condition()


def segments_in(folder: Path) -> list[int]:
    return sorted(int(path.stem) for path in folder.glob("*.journal"))


def test_full_disk_while_cleaning_loses_no_handle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path, segment_bytes=256)
    list(journal.read())
    journal.append(1, 7, b"kept")
    for handle in range(100, 112):
        journal.append(1, handle, bytes(250))
        journal.forget(handle)

    def clean() -> None:
        journal.clean(lambda handle: [frame(1, handle, b"kept")])

    with monkeypatch.context() as patched:
        patched.setattr("inference.bridge.journal.os.write", full)
        with pytest.raises(JournalError, match="free some space"):
            clean()
    clean()
    asyncio.run(synced(journal, lambda: 1 not in segments_in(tmp_path)))
    journal.close()
    assert [(handle, payload) for _, handle, payload in read(tmp_path) if handle == 7] == [(7, frame(1, 7, b"kept"))]


def test_segments_are_deleted_in_order_after_a_failed_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, real = Journal(tmp_path, segment_bytes=64), journal_module._sync
    list(journal.read())
    synced_fds: list[set[int]] = []

    def failing(descriptors: Sequence[int], unneeded: Sequence[Path]) -> None:
        synced_fds.append(set(descriptors))
        if len(synced_fds) == 1:
            raise OSError(errno.EIO, "Input/output error")
        real(descriptors, unneeded)

    def passing(handle: int) -> None:
        """Fill a segment with what counts no more."""
        journal.append(1, handle, bytes(64))
        journal.forget(handle)
        journal.clean(lambda handle: [])

    async def run() -> None:
        for handle in range(3):
            passing(handle)
        await synced(journal, lambda: segments_in(tmp_path) == [3])

    monkeypatch.setattr(journal_module, "_sync", failing)
    monkeypatch.setattr(journal_module, "RETRY_S", 0.01)
    asyncio.run(run())
    assert synced_fds == [synced_fds[0]] * 2, "what was not synced is synced again, although nothing is appended"
    journal.close()


def bytes_in(folder: Path) -> int:
    """Bytes of a journal, whose files may be deleted meanwhile."""
    total = 0
    for path in folder.glob("*.journal"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def test_disk_use_stays_bounded_and_nothing_that_counts_is_lost(tmp_path: Path) -> None:
    async def run() -> None:
        journal, chance = Journal(tmp_path, segment_bytes=4096), random.Random(2)
        list(journal.read())
        syncing = asyncio.create_task(journal.sync())
        counts: dict[int, bytes] = {}
        most = 0
        for handle in range(3000):
            counts[handle] = chance.randbytes(100)
            journal.append(1, handle, counts[handle])
            if handle >= 10:  # one in a hundred is long-lived
                old = handle - 10
                if old % 100:
                    journal.append(2, old)
                    journal.forget(old)
                    del counts[old]
            journal.clean(lambda wanted: [frame(1, wanted, counts[wanted])])
            if handle % 100 == 0:
                deadline = time.monotonic() + 20  # a busy disk syncs, and so deletes, late
                while bytes_in(tmp_path) >= 60_000 and time.monotonic() < deadline:
                    await asyncio.sleep(0.02)
                await asyncio.sleep(0.02)
                most = max(most, bytes_in(tmp_path))
        await asyncio.sleep(0.2)
        syncing.cancel()
        journal.close()
        assert most < 60_000, "of 400,000 bytes that were written"
        found: dict[int, bytes] = {}
        for kind, handle, payload in read(tmp_path):
            if kind == 2:
                found.pop(handle, None)
            else:
                found[handle] = payload if kind == 1 else next(split(payload))[0].payload
        assert found == counts

    asyncio.run(run())


def episode_of_two_turns() -> tuple[Episode, list[bytes]]:
    """An episode, and the frames that made it."""
    request = start_request(new_id(), group_id="g", labels={"task_id": "t"}, rule=pb.FOLLOW)
    episode = Episode("owner", request, check_start(request, LIMITS), "v1", 60.0, 7)
    frames = [frame(Kind.START, 7, replay.start_payload(episode, request))]
    for step, observed in ((1, []), (2, [9, 10])):
        message = pb.StepRequest(step=step, observation_ids=ids(observed))
        if step == 2:
            message.sampling.CopyFrom(pb.Sampling(temperature=0.5, max_tokens=3, seed=1 << 63, stop_token_ids=[3]))
        frames.append(frame(Kind.TURN, 7, message.SerializeToString()))
        for version in ("v1", "v2"):
            frames.append(frame(Kind.TOKENS, 7, replay.tokens_payload(version, ids([step, 20]), ids([1, 2]))))
        frames.append(frame(Kind.FINISH, 7, bytes([pb.STOP])))
    ended = pb.EndEpisodeRequest(episode_id=request.episode_id, reward=0.5, components={"a": 1.0})
    frames.append(frame(Kind.END, 7, ended.SerializeToString()))
    (found,) = replay.replay(each for each, _ in split(b"".join(frames))).values()
    return found, frames


def test_snapshot_of_an_episode_says_what_its_frames_said() -> None:
    episode, _ = episode_of_two_turns()
    snapshot = Frame(Journal.SNAPSHOT, 7, b"".join(replay.snapshot(episode)))
    (again,) = replay.replay([snapshot]).values()
    assert [turn.spans for turn in episode.turns] == [[("v1", 0, 2), ("v2", 2, 4)]] * 2
    for field in Episode.__slots__:
        if field != "turns":
            assert getattr(again, field) == getattr(episode, field), field
    for before, after in zip(episode.turns, again.turns, strict=True):
        for field in before.__slots__:
            assert getattr(after, field) == getattr(before, field), field


def hosted_frames() -> list[bytes]:
    """Frames of a hosted episode after one replied turn and the calls of the next, and of its end."""
    request = start_request(new_id(), hosted=pb.HostedTask(task_id="t", task_digest="d"))
    request.sampling.temperature = 0.7
    episode = Episode("owner", request, check_start(request, LIMITS), "v1", 60.0, 7)
    results = pb.StepEnd(results=[pb.ToolResult(name="read", arguments="{}", ok=True, text="x")])
    reply = pb.StepEnd(results=results.results, observation_ids=ids([9]))
    place = Place(5.0, "key", "sandbox", "token", "unix:/s")
    over = pb.StepEnd(results=results.results, done=True, outcome="completed")
    frames: list[tuple[Kind, bytes]] = [
        (Kind.START, replay.start_payload(episode, request)),
        (Kind.PLACE, place.payload()),
        (Kind.TURN, pb.StepRequest(step=1).SerializeToString()),
        (Kind.TOKENS, replay.tokens_payload("v1", ids([1, 2]), ids([3, 4]))),
        (Kind.FINISH, bytes([pb.STOP])),
        (Kind.CALLS, Sent(0.5, 6.0).payload()),
        (Kind.ANSWERS, results.SerializeToString()),
        (Kind.REPLY, reply.SerializeToString()),
        (Kind.TURN, pb.StepRequest(step=2, observation_ids=ids([9])).SerializeToString()),
        (Kind.TOKENS, replay.tokens_payload("v1", ids([5]), ids([6]))),
        (Kind.FINISH, bytes([pb.STOP])),
        (Kind.CALLS, Sent(0.25, 8.0).payload()),
        (Kind.ANSWERS, results.SerializeToString()),
        (Kind.FINAL, Final(over, b"diff", "diff").payload()),
        (Kind.REPLY, over.SerializeToString()),
    ]
    return [frame(kind, 7, payload) for kind, payload in frames]


@pytest.mark.parametrize("count", range(2, 16))
def test_snapshot_of_a_hosted_episode_says_what_its_frames_said(count: int) -> None:
    frames = hosted_frames()[:count]
    (episode,) = replay.replay(each for each, _ in split(b"".join(frames))).values()
    snapshot = Frame(Journal.SNAPSHOT, 7, b"".join(replay.snapshot(episode)))
    (again,) = replay.replay([snapshot]).values()
    assert episode.hosted is not None and again.hosted is not None
    assert episode.sampling.temperature == again.sampling.temperature == 0.7
    for field in Hosted.__slots__:
        assert getattr(again.hosted, field) == getattr(episode.hosted, field), field
    assert [turn.reply for turn in again.turns] == [turn.reply for turn in episode.turns]
    assert (again.phase, again.ids) == (episode.phase, episode.ids)


def test_snapshot_replaces_earlier_frames_and_later_ones_are_added() -> None:
    episode, frames = episode_of_two_turns()
    before = [each for each, _ in split(b"".join(frames))]
    snapshot = Frame(Journal.SNAPSHOT, 7, b"".join(replay.snapshot(episode)))
    (found,) = replay.replay([*before[:3], snapshot]).values()
    assert found.tokens == episode.tokens and found.ended == episode.ended
    assert not replay.replay([*before, snapshot, Frame(Kind.FORGET, 7, b"")])
    assert not replay.replay(before[1:]), "frames without a start are of a forgotten episode"


def test_journal_is_cleaned_after_restarts_that_dropped_episodes(tmp_path: Path) -> None:
    for start in range(6):
        journal = Journal(tmp_path)
        registry = Registry(Bounds(), journal, lambda episode: True, Counts())
        if start == 0:
            for _ in range(2):
                request = start_request(new_id())
                registry.add("owner", request, check_start(request, LIMITS), "v1", b"x" * 32).expires = 0.0
        assert registry.open == (2 if start == 0 else 0)
        registry.sweep()
        if start < 5:
            journal.close()
    asyncio.run(synced(journal, lambda: segments_in(tmp_path) == [6]))
    journal.close()


def test_hosted_episode_that_a_full_disk_refused_is_started_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = start_request(new_id(), hosted=pb.HostedTask(task_id="t", task_digest="d"))
    sampling, real, writes = check_start(request, LIMITS), os.write, []

    def second(fd: int, data: bytes) -> int:
        writes.append(data)
        return real(fd, data) if len(writes) == 1 else full(fd, data)

    def registered() -> tuple[Journal, Registry]:
        journal = Journal(tmp_path)
        return journal, Registry(Bounds(), journal, lambda episode: True, Counts())

    journal, registry = registered()
    with monkeypatch.context() as patched, suppress(JournalError):
        patched.setattr("inference.bridge.journal.os.write", second)
        registry.add("owner", request, sampling, "v1", b"x" * 32)
    if registry.get("owner", request.episode_id) is None:
        registry.add("owner", request, sampling, "v1", b"x" * 32)
    journal.close()
    journal, registry = registered()
    assert registry.open == len(registry) == 1
    journal.close()


@pytest.mark.parametrize(("stops", "finish"), [((20,), pb.STOP), ((), pb.LENGTH)])
def test_turn_cut_before_its_finish_ends_as_its_last_token_says(
    tmp_path: Path, stops: tuple[int, ...], finish: int
) -> None:
    request = start_request(new_id(), sampling=pb.Sampling(max_tokens=2, stop_token_ids=stops))
    episode = Episode("owner", request, check_start(request, LIMITS), "v1", 60.0, 7)
    written(
        tmp_path,
        [
            (Kind.START, 7, replay.start_payload(episode, request)),
            (Kind.TURN, 7, pb.StepRequest(step=1).SerializeToString()),
            (Kind.TOKENS, 7, replay.tokens_payload("v1", ids([1, 20]), ids([3, 4]))),
        ],
    )

    async def resumed() -> None:
        journal, woken = Journal(tmp_path), asyncio.Event()
        sessions = Sessions(DelegatingEngine(None), LIMITS, Bounds(), journal)  # an engine that can't be asked
        step = pb.StepRequest(episode_id=request.episode_id, step=1, from_token=2)
        reader, event = sessions.step("owner", step, lambda _: woken.set()), pb.StepEvent()
        await asyncio.wait_for(woken.wait(), 20)
        assert reader.take(event) and (event.end.finish, event.end.tokens) == (finish, 2)
        journal.close()

    asyncio.run(resumed())


@pytest.mark.parametrize("payload", [b"", b"123", b"\xff" * 60])
def test_whole_frame_that_makes_no_sense_is_an_error(payload: bytes) -> None:
    with pytest.raises(JournalError, match="can't be read"):
        replay.replay([Frame(Kind.START, 1, payload)])
