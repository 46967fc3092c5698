"""Events are numbered, bounded, followed, and outlive a killed server."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from contracts.rpc import caller
from envd.errors import EnvdError
from envd.operations import audit_check
from envd.operations.audit_check import check_audit_log, run_audit_check
from envd.server import audit, audit_file
from envd.server.audit import BURST, KINDS, AuditLog, Event, leaves_root, signature


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_events_are_numbered_and_kept_in_file_and_memory(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit")
    log.record("policy.denied", "a", rule="isolation")
    log.record("tool.denied", "b", tool="exec")
    assert [(each.number, each.kind) for each in log.since()] == [(1, "policy.denied"), (2, "tool.denied")]
    assert [each.kind for each in log.since(0, "b")] == ["tool.denied"] and log.since(2) == []
    assert [(line["number"], line["sandbox"], line["detail"]) for line in lines(tmp_path / "audit")] == [
        (1, "a", {"rule": "isolation"}),
        (2, "b", {"tool": "exec"}),
    ]
    log.close()


def test_numbers_go_on_after_a_restart_and_after_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    log = AuditLog(path)
    log.record("limit.memory", "a")
    log.close()
    with path.open("a") as file:
        file.write('{"number": 2, "ti')
    again = AuditLog(path)
    event = again.record("limit.memory", "a")
    again.close()
    assert event is not None and event.number == 2
    assert json.loads(path.read_text().splitlines()[-1])["number"] == 2
    assert [line[:12] for line in path.read_text().splitlines()] == ['{"number": 1', '{"number": 2', '{"number": 2']


def test_a_killed_process_loses_no_event_that_was_recorded(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    code = (
        "import sys\nfrom pathlib import Path\nfrom envd.server.audit import AuditLog\nlog ="
        " AuditLog(Path(sys.argv[1]))\nnumber = 0\nwhile True:\n    number = log.record('path.escape',"
        " str(number)).number\n    print(number, flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    said = [child.stdout.readline() for _ in range(200)]
    child.send_signal(signal.SIGKILL)
    said += child.stdout.read().splitlines(keepends=True)
    child.wait()
    child.stdout.close()
    whole = path.read_bytes().split(b"\n")[:-1]
    last = int([line for line in said if line.endswith(b"\n")][-1])
    assert [json.loads(line)["number"] for line in whole][:last] == list(range(1, last + 1))


def test_files_are_moved_aside_by_size_and_few_are_kept(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit", max_bytes=2000, files=3)
    for number in range(100):
        log.record("limit.pids", f"sandbox-{number}")
    log.close()
    found = sorted(path.name for path in tmp_path.glob("audit*"))
    assert found == ["audit", "audit.1", "audit.2", "audit.lock"]
    numbers = [line["number"] for name in ("audit.2", "audit.1", "audit") for line in lines(tmp_path / name)]
    assert numbers == list(range(numbers[0], 101)) and len(numbers) > 20
    assert all((tmp_path / name).stat().st_size <= 2000 for name in found)


@pytest.mark.parametrize("files", [1, 3])
def test_a_rotation_that_fails_moves_no_file_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int
) -> None:
    log = AuditLog(tmp_path / "audit", max_bytes=2000, files=files)
    (tmp_path / "audit").chmod(0o600)
    opened, works = audit_file._open, False

    def failing(path: Path, mode: int) -> tuple[int, int]:
        if not works:
            raise EnvdError("too many open files")
        return opened(path, mode)

    monkeypatch.setattr(audit_file, "_open", failing)
    for number in range(100):
        log.record("limit.pids", f"sandbox-{number}")
    assert [line["number"] for line in lines(tmp_path / "audit")] == list(range(1, 101)), "nothing lost, nothing moved"
    works = True
    for number in range(10):
        log.record("limit.disk", f"sandbox-{number}")
    log.close()
    numbers = [line["number"] for name in ("audit.1", "audit")[-files:] for line in lines(tmp_path / name)]
    assert numbers[-1] == 110 and numbers == list(range(numbers[0], 111)) and not list(tmp_path.glob("*.next"))
    assert (tmp_path / "audit").stat().st_size <= 2000
    assert (tmp_path / "audit").stat().st_mode & 0o777 == 0o600, "as its operator made it"


def test_numbers_go_on_when_a_kill_came_between_moving_and_opening(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit")
    log.record("limit.pids")
    log.close()
    (tmp_path / "audit").rename(tmp_path / "audit.1")
    again = AuditLog(tmp_path / "audit")
    event = again.record("limit.pids")
    again.close()
    assert event is not None and event.number == 2


def test_two_servers_do_not_share_a_file(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit")
    with pytest.raises(EnvdError, match="another server writes"):
        AuditLog(tmp_path / "audit")
    log.close()
    AuditLog(tmp_path / "audit").close()


def test_a_link_is_not_followed_and_a_missing_directory_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for path in (tmp_path / "link", tmp_path / "no" / "audit", Path()):
        with pytest.raises(EnvdError) as caught:
            AuditLog(path)
        assert "\n" not in str(caught.value) and not (tmp_path / "elsewhere").exists()


def test_lines_that_a_full_disk_refused_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    log = AuditLog(path)
    try:
        log.record("limit.disk", "a")
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, limit[1]))  # as a disk without room
        for _ in range(3):
            log.record("limit.disk", "a", text="x" * 100)
        assert log.counts["audit.lost"] == 3, "counted while the disk is full, when alerts are due"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    log.record("limit.disk", "b")
    log.close()
    good = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    assert [(line["number"], line["kind"]) for line in good] == [
        (1, "limit.disk"),
        (5, "limit.disk"),
        (6, "audit.lost"),
    ]
    assert good[-1]["detail"]["count"] == 3
    assert [each.number for each in log.since()] == [1, 2, 3, 4, 5, 6]


def test_each_kind_is_counted_from_zero() -> None:
    log = AuditLog()
    assert log.counts == dict.fromkeys(KINDS, 0)
    log.record("verify.tampered", "a")
    assert (log.counts["verify.tampered"], log.counts["audit.lost"]) == (1, 0)


def test_a_flood_is_counted_instead_of_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    log = AuditLog()
    for _ in range(1000):
        log.record("path.escape", "loud")
    log.record("path.escape", "quiet")
    assert [len(log.since(0, name)) for name in ("loud", "quiet")] == [BURST, 1]
    log.forget("loud")
    assert log.since()[-1].kind == "audit.suppressed" and log.counts["audit.suppressed"] == 1
    assert json.loads(log.since()[-1].detail_json) == {"count": 1000 - BURST, "kind": "path.escape"}
    monkeypatch.setattr(audit, "WINDOW_S", 0.0)
    assert all(log.record("path.escape", "slow") is not None for _ in range(2 * BURST))


def test_a_flood_of_one_client_hides_nothing_of_another() -> None:
    class Called:
        def __init__(self, peer: str) -> None:
            self.peer = lambda: peer

    async def refused(log: AuditLog, peer: str, method: str, times: int) -> None:
        caller.answering(Called(peer), method)
        for _ in range(times):
            log.record("request.refused", "", reason="x")

    log = AuditLog()
    for peer, method, times in (
        ("ipv4:10.0.0.1:5", "Files/Read", 100),
        ("ipv4:10.0.0.2:6", "Files/Read", 1),
        ("unix:", "Files/Read", 100),
        ("unix:", "Sandboxes/Create", 1),
    ):
        asyncio.run(refused(log, peer, method, times))
    told = [json.loads(event.detail_json).get("peer") for event in log.since()]
    assert told == ["10.0.0.1"] * BURST + ["10.0.0.2"] + [None] * (BURST + 1)
    log.close()
    last = [json.loads(event.detail_json) for event in log.since() if event.kind == "audit.suppressed"]
    assert [(each["source"], each["count"]) for each in last] == [
        ("10.0.0.1", 100 - BURST),
        ("Files/Read", 100 - BURST),
    ]


def test_memory_is_bounded_whatever_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "KEEP", 8)
    log = AuditLog()
    for number in range(20):
        log.record("guest.malformed", str(number), words="\x1b[2J" * 10_000, many=["y" * 5000] * 500)
    kept = log.since()
    assert [each.number for each in kept] == list(range(13, 21))
    assert all(len(each.detail_json) <= 4096 and each.detail_json.isascii() for each in kept)
    assert "\x1b" not in kept[0].detail_json


def test_a_follower_sees_what_was_and_what_comes_from_any_thread() -> None:
    async def scenario() -> list[Event]:
        log, seen = AuditLog(), []
        log.record("limit.memory", "a")
        log.record("limit.memory", "b")
        work = threading.Thread(target=lambda: [log.record("limit.pids", "a") for _ in range(5)])
        async for event in log.follow(0, "a"):
            seen.append(event)
            if len(seen) == 1:
                work.start()
            if len(seen) == 6:
                break
        work.join()
        return seen

    seen = asyncio.run(asyncio.wait_for(scenario(), 10))
    assert [(each.number, each.kind) for each in seen][:2] == [(1, "limit.memory"), (3, "limit.pids")]


@pytest.mark.parametrize(
    ("path", "target", "leaves"),
    [
        ("a/../b", None, False),
        ("../b", None, True),
        ("a/../../b", None, True),
        ("/workspace/a", None, False),
        ("/workspace/../x", None, True),
        ("a/link", "../b", False),
        ("a/link", "../../b", True),
        ("link", "/etc/passwd", True),
        ("link", "/workspace/b", False),
        ("link", "/workspacex", True),
        ("..a/b", None, False),
    ],
)
def test_what_names_a_place_above_the_workspace(path: str, target: str | None, leaves: bool) -> None:
    assert leaves_root(path, target) is leaves


def test_recording_is_quick(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit")
    before = os.times().user
    for number in range(2000):
        log.record("path.escape", str(number), path="../x")
    assert (os.times().user - before) / 2000 < 0.001
    log.close()


def test_changes_of_a_signed_log_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, key = tmp_path / "audit", tmp_path / "key"
    key.write_text("a secret of the auditors\n")
    for _ in range(2):
        log = AuditLog(path, calls=True, key=b"a secret of the auditors", max_bytes=700)
        for number in range(6):
            log.record("call.made" if number % 2 else "path.escape", "a", path="../é", mac='", "hmac": "')
        log.close()
    with path.open("ab") as file:
        file.write(b'{"number": 13, "ti')  # a kill
    assert (tmp_path / "audit.1").is_file() and (tmp_path / "audit.calls.1").is_file()

    def check(wanted: int) -> str:
        assert run_audit_check([str(path), "--key-file", str(key)]) == wanted
        said = capsys.readouterr()
        return said.out + said.err

    assert check(0) == "12 signed events, numbers 1 to 12; 0 lost by a full disk; 0 faults\n"
    old = tmp_path / "audit.1"
    whole = old.read_bytes()
    first, _, *others = whole.splitlines(keepends=True)
    for changed, said in (
        (whole.replace(b'"path.escape"', b'"tool.denied"', 1), "audit.1:1: the signature is wrong"),
        (first + b"".join(others), "events 3 to 3 are missing"),
        (first + whole, "numbers are there twice"),
    ):
        old.write_bytes(changed)
        assert said in check(1)
    old.write_bytes(whole)
    key.write_text("another\n")
    assert "12 faults" in check(1)


KEY = b"a secret of the auditors"


def test_a_whole_signed_log_is_whole_when_its_trail_has_dropped_files(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    log = AuditLog(path, calls=True, key=KEY, max_bytes=2000)
    for number in range(200):
        log.record("path.escape" if number % 20 == 0 else "call.made", str(number))
    log.close()
    found = check_audit_log(path, KEY)
    assert found.faults == [] and found.numbers[0] == 1 < found.whole_from < 181
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    assert check_audit_log(path, KEY).faults == ["events 181 to 181 are missing"]


def test_a_signed_log_is_whole_while_a_server_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "audit"
    log = AuditLog(path, calls=True, key=KEY)

    def record() -> None:
        log.record("call.made", "a")
        log.record("path.escape", str(log.counts["path.escape"]))

    def slow(key: bytes, signed: bytes) -> bytes:
        record()
        return signature(key, signed)

    for _ in range(3):
        record()
    monkeypatch.setattr(audit_check, "signature", slow)
    assert check_audit_log(path, KEY).faults == []
    monkeypatch.undo()
    log.close()
    first, _, *others = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b"".join(others))
    assert check_audit_log(path, KEY).faults == ["events 4 to 4 are missing"]


def test_unsigned_lines_are_faults_unless_they_are_the_oldest(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    for key in (None, KEY):
        log = AuditLog(path, calls=True, key=key)
        for kind in ("path.escape", "call.made", "path.escape"):
            log.record(kind, "a")
        log.close()
    found = check_audit_log(path, KEY)
    assert (found.faults, found.numbers, sorted(found.unsigned.values())) == ([], [4, 5, 6], [1, 2, 3])
    whole = path.read_bytes()
    stripped = re.sub(rb', "hmac": "\w+"', b"", whole)
    calls = tmp_path / "audit.calls"
    for text, faults in (
        (whole + b'{"number": 2}\n', ["audit:5: the line is not signed"]),
        (b"[]\n" + whole, ["audit:1: the line is not signed"]),
        (stripped, ["audit:4: the line is not signed"]),
    ):
        path.write_bytes(text)
        assert check_audit_log(path, KEY).faults == faults
    calls.unlink()
    assert len(check_audit_log(path, KEY).faults) == 4, "no line is signed"
