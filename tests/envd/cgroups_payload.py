"""Run by a Python inside a machine whose kernel has cgroup v2 alone: a namespaces sandbox there, and what held its
limits. Prints one JSON object.

python3 cgroups_payload.py UID
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from envd.backends.base import BoxSpec  # noqa: E402
from envd.backends.namespaces import backend as namespaces  # noqa: E402
from envd.sandbox import linux  # noqa: E402
from envd.sandbox.cgroups import remove_groups  # noqa: E402
from envd.sandbox.delegation import make_room, own_group  # noqa: E402
from envd.types import Limits  # noqa: E402

COMMAND = (
    """python3 -c 'x=b"x"*(150<<20)'; echo memory $?; for i in $(seq 30); do sleep 3 & done 2>/dev/null; echo forked"""
)


async def tried() -> dict[str, Any]:
    run = Path(tempfile.mkdtemp(prefix="envd-"))
    run.chmod(0o711)
    template = run / "templates" / "t"
    template.mkdir(parents=True)
    (run / "boxes").mkdir()
    os.chown(template, linux.sandbox_owner(), linux.sandbox_owner()) if os.geteuid() == 0 else None
    backend = await namespaces.start(run)
    box = await backend.create(BoxSpec("b1", "t", template, Limits(memory_mb=64, pids=20, cpu=0.5, disk_mb=16)))
    (said,) = await box.guest.shell([(COMMAND, 30.0)])
    usage = await box.usage()
    await box.destroy()
    await backend.stop()
    remove_groups(run.name)
    shutil.rmtree(run, ignore_errors=True)
    own = own_group()
    return {
        "helper": backend.features.helper,
        "enforced": sorted(backend.features.limits_enforced),
        "said": said.head.decode(),
        "events": sorted(usage.events),
        "left": sorted(each.name for each in own.iterdir() if each.is_dir()) if own else [],
    }


def main(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    make_room()
    print(json.dumps(asyncio.run(asyncio.wait_for(tried(), 90))))


if __name__ == "__main__":
    main(int(sys.argv[1]))
