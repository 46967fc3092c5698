"""Decide whether the agent or the infrastructure broke a sandbox.

    the server does not know the sandbox any more        ours: it was restarted
    the connection to its server broke                   ours
    the server of the sandbox was lost, of several       ours
    a fresh sandbox that does nothing wrong fails too    ours: server, host or network (on the same server)
    neither                                              the agent's: the episode FAILED, with the reason

So nothing that an agent does to its sandbox is an infrastructure fault, which would be retried and at last go unscored.
"""

from __future__ import annotations

import asyncio
import logging

from contracts.errors import TriplaneError
from contracts.tasks import Task
from envd.client import ToolCall
from inference.rollouts.workspace import Workspace, Workspaces

CONTROL_CALL = ToolCall("exec", {"command": "true"})
CONTROL_TIMEOUT_S = 10.0
"""Of the control's one call."""
CONTROL_DEADLINE_S = 60.0
"""Of the whole control: a server that can't do this in time is not sound."""
_log = logging.getLogger(__name__)


async def is_agents_fault(workspace: Workspace, workspaces: Workspaces, task: Task) -> bool:
    """Whether the agent broke `workspace`: its server knows it, and a control of the same task starts, replies and
    returns its diff.

    A server that was away when it was asked first may have been started again for the control: it is asked once more.
    """
    if not await workspace.is_known() or not await control_passes(workspaces.on(workspace.server), task):
        return False
    return await workspace.is_known()


async def control_passes(workspaces: Workspaces, task: Task) -> bool:
    """Whether a fresh sandbox of `task`, whose agent does nothing, works from start to end."""
    control = workspaces.open(task)
    try:
        async with asyncio.timeout(CONTROL_DEADLINE_S):
            (result,) = await control.run([CONTROL_CALL], CONTROL_TIMEOUT_S)
            await control.finish()
    except (TriplaneError, TimeoutError) as error:
        _log.warning("a control of task %s failed too: %s", task.task_id, error)
        return False
    finally:
        await control.close()
    return result.ok
