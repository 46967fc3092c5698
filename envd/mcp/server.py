"""The MCP server: tools listed from envd.tools, calls handed to the session's sandbox."""

from __future__ import annotations

from typing import Any

import mcp_types as types
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server

from contracts.visible import visible
from envd.errors import EnvdError
from envd.mcp.sessions import Sessions, arguments_of
from envd.tools import toolset_named
from envd.types import ToolCall

SESSION_HEADER = "mcp-session-id"
_INSTRUCTIONS = (
    "Tools of one sandbox, which is this session's own: a workspace (a git repository) and a shell whose state lives on"
    " between calls. Paths are taken from the workspace. Everything ends with the session."
)


def tools(toolset: str) -> list[types.Tool]:
    """A toolset's tools as MCP lists them."""
    return [
        types.Tool(name=spec.name, description=spec.description, input_schema=dict(spec.parameters))
        for spec in toolset_named(toolset).tools.values()
    ]


def make_server(sessions: Sessions, version: str) -> Server[Any]:
    """An MCP server; over HTTP the session's id is its key, over standard streams there is one session."""

    async def list_tools(
        context: ServerRequestContext[Any], params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        return types.ListToolsResult(tools=tools(sessions.toolset))

    async def call_tool(
        context: ServerRequestContext[Any], params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        try:
            result = await sessions.call(session_key(context), ToolCall(params.name, arguments_of(params.arguments)))
        except EnvdError as error:
            return _answer(visible(f"error: {error}"), ok=False)
        return _answer(result.text, ok=result.ok)

    return Server("envd", version=version, instructions=_INSTRUCTIONS, on_list_tools=list_tools, on_call_tool=call_tool)


def session_key(context: ServerRequestContext[Any]) -> str:
    """Whose sandbox a request is for."""
    headers = getattr(context.request, "headers", None)
    return "" if headers is None else str(headers.get(SESSION_HEADER, ""))


def _answer(text: str, *, ok: bool) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(type="text", text=text)], is_error=not ok)
