"""A client that knows nothing of envd but its address: it asks the server what it is, and calls what it learned.

test_mcp_client.py does the same over MCP, with the client of the `mcp` package.
"""

from __future__ import annotations

import json
from typing import Any

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (  # type: ignore[import-untyped, unused-ignore]
    ProtoReflectionDescriptorDatabase,
)

from tests.envd.harness import Harness

PACKAGE = "triplane.envd.v1"


class Stranger:
    """What grpcurl does: services, descriptions and calls from the server's reflection, requests and answers as
    JSON.
    """

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._database = ProtoReflectionDescriptorDatabase(channel)
        self._pool = DescriptorPool(self._database)

    def services(self) -> list[str]:
        return list(self._database.get_services())

    def describe(self, service: str) -> dict[str, Any]:
        return dict(self._pool.FindServiceByName(service).methods_by_name)

    def call(self, service: str, method: str, request: dict[str, Any], **metadata: str) -> dict[str, Any]:
        found = self.describe(service)[method]
        message = ParseDict(request, GetMessageClass(found.input_type)())
        ask: Any = self._channel.unary_unary(
            f"/{service}/{method}",
            request_serializer=lambda each: each.SerializeToString(),
            response_deserializer=GetMessageClass(found.output_type).FromString,
        )
        named = tuple((key.replace("_", "-"), value) for key, value in metadata.items())
        return MessageToDict(ask(message, timeout=30, metadata=named), preserving_proto_field_name=True)


def test_a_stranger_finds_describes_and_calls_by_reflection(namespaces: Harness) -> None:
    with grpc.insecure_channel(namespaces.address) as channel:
        stranger = Stranger(channel)
        services = stranger.services()
        assert {
            f"{PACKAGE}.{name}" for name in ("Sandboxes", "Operations", "Files", "Processes", "Tools", "Verifier")
        } <= set(services)
        methods = stranger.describe(f"{PACKAGE}.Sandboxes")
        assert methods["Create"].input_type.full_name == f"{PACKAGE}.CreateRequest"
        assert "policy_yaml" in methods["Create"].input_type.fields_by_name
        assert stranger.describe(f"{PACKAGE}.Processes")["Connect"].server_streaming

        files = {"files": {"calc.py": "YSA9IDEK"}}  # bytes are base64 in JSON: a = 1
        template = stranger.call(f"{PACKAGE}.Sandboxes", "PutTemplate", files)["digest"]
        made = stranger.call(f"{PACKAGE}.Sandboxes", "Create", {"template": template, "limits": {"memory_mb": 128}})
        identity, token = made["sandbox_id"], made["token"]
        calls = [
            {"name": "read", "arguments_json": json.dumps({"path": "calc.py"})},
            {"name": "exec", "arguments_json": json.dumps({"command": "python3 -c 'import calc; print(calc.a + 1)'"})},
        ]
        request = {"sandbox_id": identity, "calls": calls, "timeout_s": 10}
        answer = stranger.call(f"{PACKAGE}.Tools", "Batch", request, triplane_sandbox_token=token)
        assert [each["ok"] for each in answer["results"]] == [True, True]
        assert "a = 1" in answer["results"][0]["text"] and answer["results"][1]["text"] == "2\nexit 0"

        schemas = json.loads(stranger.call(f"{PACKAGE}.Operations", "Schemas", {})["tools_json"])
        assert {"read", "exec"} <= {each["function"]["name"] for each in schemas}
        stranger.call(f"{PACKAGE}.Sandboxes", "Delete", {"sandbox_id": identity}, triplane_sandbox_token=token)
        try:
            stranger.call(f"{PACKAGE}.Sandboxes", "Get", {"sandbox_id": identity}, triplane_sandbox_token=token)
            raise AssertionError("a deleted sandbox was found")
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.NOT_FOUND
