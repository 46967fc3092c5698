"""A program that speaks TensorRT-LLM's gRPC service over our own forward pass, as `trtllm-serve serve MODEL --grpc`.

It follows the servicer of TensorRT-LLM (tensorrt_llm/grpc/smg): entry t of prompt_logprobs has token t's name, 0.0 as
its log probability where token t is not among the alternatives, and the distribution after token t. $FAULT: "ends"
(exits at once), "other" (serves the checkpoint in $OTHER), "bare" (no own prompt tokens), "length" (tokens without
entries). $HOLD_S: seconds before each request is sampled.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from smg_grpc_proto.generated import trtllm_service_pb2 as pb2
from smg_grpc_proto.generated import trtllm_service_pb2_grpc as services

from inference.engines import SamplingParams
from inference.engines.builtin import BuiltinEngine

FAULT, HOLD_S = os.environ.get("FAULT", ""), float(os.environ.get("HOLD_S", "0"))


def entry(token: int, logprob: float, name: int | None = None) -> Any:
    """A log probability of `token`, under the name of another token if the servicer pairs it so."""
    top = [pb2.TopLogprob(token_id=token, logprob=logprob)]
    if name is None or name == token:
        return pb2.TokenLogprob(token_id=token, logprob=logprob, top_logprobs=top)
    return pb2.TokenLogprob(token_id=name, logprob=0.0, top_logprobs=top)


class Service(services.TrtllmServiceServicer):  # type: ignore[misc]
    def __init__(self, directory: str, longest: int) -> None:
        self._directory, self._longest = directory, longest
        self._engine = BuiltinEngine(Path(os.environ["OTHER"] if FAULT == "other" else directory), "served", threads=1)

    async def HealthCheck(self, request: Any, context: Any) -> Any:
        return pb2.HealthCheckResponse(status="OK")

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        return pb2.GetModelInfoResponse(model_id=self._directory, max_seq_len=self._longest)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        ids, config, output = list(request.tokenized.input_token_ids), request.sampling_config, request.output_config
        if len(ids) >= self._longest:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the prompt exceeds max_seq_len")
        await asyncio.sleep(HOLD_S)
        assert (
            request.ignore_eos and request.include_stop_token_in_output and config.top_p == 1.0
        ) or request.max_tokens == 1
        params = SamplingParams(
            0.0 if config.top_k == 1 else config.temperature,
            request.max_tokens,
            config.seed,
            tuple(request.stop_token_ids),
        )
        made = await self._engine.generate(ids, params)
        answer = pb2.GenerateComplete(
            output_token_ids=made.token_ids, finish_reason=made.finish_reason, prompt_tokens=len(ids)
        )
        if output.HasField("logprobs"):
            pairs = list(zip(made.token_ids, made.logprobs, strict=True))
            answer.logprobs.extend(entry(*pair) for pair in (pairs[:-1] if FAULT == "length" else pairs))
        if output.HasField("prompt_logprobs"):
            scored = [*await self._engine.score([*ids, made.token_ids[0]])]
            following = [*ids[1:], made.token_ids[0]]
            if FAULT == "bare":
                following = [95 - token for token in following]
            answer.prompt_logprobs.extend(
                entry(token, logprob, name) for token, logprob, name in zip(following, scored[1:], ids, strict=True)
            )
        yield pb2.GenerateResponse(request_id=request.request_id, complete=answer)


async def serve(arguments: argparse.Namespace) -> None:
    server = grpc.aio.server()
    services.add_TrtllmServiceServicer_to_server(Service(arguments.model, arguments.max_seq_len), server)
    assert server.add_insecure_port(f"{arguments.host}:{arguments.port}")
    await server.start()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await ended.wait()
    await server.stop(5)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--grpc", action="store_true", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", required=True)
    parser.add_argument("--backend", required=True, choices=["pytorch"])
    parser.add_argument("--tp_size", type=int, required=True)
    parser.add_argument("--max_seq_len", type=int, required=True)
    if FAULT == "ends":
        sys.exit("RuntimeError: no GPU was found")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
