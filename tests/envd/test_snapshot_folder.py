"""Snapshots are in a folder that only the server's user may enter, and no other folder's mode changes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from contracts.pb import envd_operations_pb2 as pb
from envd.errors import EnvdError
from envd.server.audit import AuditLog
from envd.server.quotas import Quotas
from envd.server.rule_sections import QuotaRules
from envd.server.snapshots import SUBFOLDER, Snapshots


def quotas() -> Quotas:
    return Quotas(QuotaRules(), AuditLog(None))


def stored_in(directory: Path) -> Path:
    """Folder of a snapshot that a server with this --snapshot-dir writes and the next one finds."""

    async def keep(snapshots: Snapshots) -> str:
        async def write(path: Path) -> None:
            (path / "file").write_text("state")

        identity, _ = await snapshots.keep(pb.ReceiveHeader(), write)
        return identity

    identity = asyncio.run(keep(Snapshots(directory, quotas())))
    return Snapshots(directory, quotas()).find(identity)[1].parents[1]


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_new_folder_is_private_and_used_again(tmp_path: Path) -> None:
    assert stored_in(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert mode(tmp_path / "a" / "b") == 0o700
    assert stored_in(tmp_path / "a" / "b") == tmp_path / "a" / "b"


def test_folder_that_others_may_enter_keeps_its_mode(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    assert stored_in(shared) == shared / SUBFOLDER
    assert (mode(shared), mode(shared / SUBFOLDER)) == (0o755, 0o700)


def test_subfolder_that_kubernetes_opened_to_the_group_of_a_volume_is_closed_again(tmp_path: Path) -> None:
    tmp_path.chmod(0o2775)
    place = stored_in(tmp_path)
    place.chmod(0o2770)
    assert stored_in(tmp_path) == place == tmp_path / SUBFOLDER
    assert mode(place) == 0o700


def test_subfolder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / SUBFOLDER).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EnvdError, match="is not a folder of this user: remove it"):
        Snapshots(tmp_path, quotas())
