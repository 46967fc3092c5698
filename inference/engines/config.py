"""Configuration of the engine: a discriminated union with one entry for each kind."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from contracts.addresses import Address, parse_addresses
from contracts.environment import VARIABLE
from contracts.errors import ConfigError
from contracts.precision import Forward
from inference.engines.base import Engine
from inference.engines.matching import server_mismatch

CONNECTIONS = 256
TIMEOUT_S = 600.0
RETRIES = 4
"""Defaults of the clients of engine servers."""
OUTSIDE_POLICY = "outside_policy"
"""Kind of artifact that stands for a policy at a server, whose weights the store lacks; see engines/outside.py."""


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: str

    @property
    def implementation(self) -> str:
        """Name of the code that samples, for keys of work that depends on it."""
        return self.kind

    @property
    def shared(self) -> bool:
        """Whether processes that open the engine get the same servers, which serve one policy at a time."""
        return False

    @property
    def records_routing(self) -> bool:
        """Whether the engine may return routed experts. A server's first answer shows whether it does."""
        return True

    @property
    def restrictions(self) -> frozenset[str]:
        """Which of `grammar` and `top_p` the engine may sample under, and say what tokens were drawn from."""
        return frozenset()

    @property
    def events(self) -> tuple[str, int] | None:
        """URL and port where its one server publishes cache events; None: it does not, or there is not one server."""
        return None

    @property
    def serves_adapters(self) -> bool:
        """Whether the engine may serve a checkpoint with a LoRA adapter, which is merged into float32 weights."""
        return getattr(self, "weights", None) != "fp8"

    def mismatch(self, forward: Forward) -> str | None:
        """Why this engine can't match the recipe `forward` on any device, with the fix.

        None: it can, or its server must say.
        """
        return None


class BuiltinConfig(_Config):
    """The CPU engine in this process."""

    kind: Literal["builtin"] = "builtin"
    max_batch: int = Field(default=256, ge=1, le=4096)
    """Largest batch, in sequences."""
    threads: int | None = Field(default=None, ge=1)
    """Torch threads; null: torch's default. On a busy machine two are slower than one."""
    prefix_megabytes: int = Field(default=512, ge=0)
    """Memory to reuse the state of finished turns, in MiB; 0 disables reuse."""
    drafts: bool = True
    """Whether to guess tokens from earlier ones, to compute several in one pass. Changes no token."""

    @property
    def restrictions(self) -> frozenset[str]:
        """See the base class."""
        return frozenset(("grammar", "top_p"))


class _RemoteConfig(_Config):
    connections: int = Field(default=CONNECTIONS, ge=1)
    """Maximum number of requests in flight."""
    timeout_s: float = Field(default=TIMEOUT_S, gt=0)
    """Timeout of one call, in seconds."""
    retries: int = Field(default=RETRIES, ge=0, le=20)
    """Retries after a connection fault; any HTTP response, even an error, is final."""

    @property
    def shared(self) -> bool:
        """See the base class; of a server that each process starts for itself, it is the GPUs."""
        return True


class OpenAIConfig(_RemoteConfig):
    """A server with a fixed policy and token ids in the OpenAI completions API, e.g. `python -m inference serve`."""

    kind: Literal["openai"] = "openai"
    base_url: str
    """URL up to and including `/v1`, e.g. http://localhost:8000/v1."""
    model: str = "policy"
    """Model name of the policy at the server."""
    events_port: int | None = Field(default=None, ge=1, le=65534)
    """As a replica of `routed`: port at the server's host where it publishes its cache events, in blocks of 16 tokens,
    and replays them at the next one (`python -m inference serve --events-port`). null: what it has cached is known by
    the requests sent to it.
    """

    @property
    def events(self) -> tuple[str, int] | None:
        """See the base class."""
        return None if self.events_port is None else (self.base_url, self.events_port)

    @property
    def records_routing(self) -> bool:
        """See the base class; the completions API has no field for it."""
        return False


def _one(value: str, name: str, *, url: bool) -> str:
    """The address of one server, checked. Raises ValueError."""
    try:
        found = parse_addresses(value, name)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    wanted = "http://host:port" if url else "host:port"
    if len(found) != 1 or found[0].is_name or bool(found[0].scheme) != url:
        raise ValueError(f"{name}={value}: name one server, as {wanted}")
    return value


class _LoadingConfig(_RemoteConfig):
    """Settings of servers that load every policy and are tested to serve it."""

    server: ClassVar[str]
    """Name of the server, for messages."""

    unmatched: Literal["refuse", "warn"] = "refuse"
    """What to do with a policy whose recipe (trainer.precision) the server can't match: refuse it, or serve it with a
    warning and leave the difference to trainer.corrections.
    """
    tolerance: float | None = Field(default=None, gt=0)
    """Largest difference between a probe's log-probability from the server and from the built-in engine. null: 1e-4 for
    float32 weights; 0.5 for FP8 kernels, which round activations.
    """
    probe_gigabytes: float = Field(default=4.0, ge=0)
    """Largest checkpoint, in GB, whose probes the built-in engine computes. Log-probabilities of larger ones are not
    compared.
    """
    startup_timeout_s: float = Field(default=900.0, gt=0)
    """Timeout for a started server to answer, and for GPUs in use to become free, in seconds."""
    drain_s: float = Field(default=60.0, ge=0)
    """Seconds for requests in flight to finish before new weights are loaded; then they are aborted and sampled again.
    """

    def unmatched_by(self, forward: Forward, plain: tuple[bool, ...]) -> str | None:
        """Why the server matches the recipe with none of these weights. plain: float32 copies, or FP8 codes."""
        if self.unmatched == "warn":
            return None
        reasons = [server_mismatch(self.server, forward, each) for each in plain]
        return None if None in reasons else reasons[-1]


class SglangConfig(_LoadingConfig):
    """An SGLang server that is already running, loads every policy in place, and is tested to serve it.

    See docs/engines.md.
    """

    server: ClassVar[str] = "SGLang"

    kind: Literal["sglang"]
    """Selects this engine."""
    base_url: str
    """Root URL of the server, e.g. http://host:30000. It reads the store's files under the same paths."""
    events_port: int | None = Field(default=None, ge=1, le=65534)
    """As a replica of `routed`: port at the server's host where it publishes its cache events, in blocks of 16 tokens,
    and replays them at the next one (docs/routing.md). null: what it has cached is known by the requests sent to it.
    """
    weights: Literal["fp8", "dequantized"] = "fp8"
    """Weights that the server loads, as it was started: the FP8 checkpoint, or a float32 copy of it in
    $TRIPLANE_CACHE.
    """

    @field_validator("base_url")
    @classmethod
    def _one_url(cls, value: str) -> str:
        return _one(value, "engine.base_url", url=True)

    @property
    def events(self) -> tuple[str, int] | None:
        """See the base class."""
        return None if self.events_port is None else (self.base_url, self.events_port)

    @property
    def records_routing(self) -> bool:
        """See the base class; its routed experts are not read."""
        return False

    @property
    def restrictions(self) -> frozenset[str]:
        """See the base class; the server returns what tokens were drawn from."""
        return frozenset(("grammar", "top_p"))

    def mismatch(self, forward: Forward) -> str | None:
        """See the base class."""
        return self.unmatched_by(forward, (self.weights == "dequantized",))


class TrtllmConfig(_LoadingConfig):
    """TensorRT-LLM servers (`trtllm-serve --grpc`), one for each policy: a new policy gets a new server, and the old
    one ends after its requests. Needs the package's extra `trtllm`.

    See docs/engines.md.
    """

    server: ClassVar[str] = "TensorRT-LLM"

    kind: Literal["trtllm"]
    """Selects this engine."""
    address: str | None = None
    """host:port of a server that is already running. It must serve the policy, and can't load another one. null: start
    servers on this machine.
    """
    program: tuple[str, ...] = ("trtllm-serve",)
    """Command of a server started here."""
    flags: tuple[str, ...] = ()
    """Further arguments for a server started here, e.g. [--max_seq_len, "16384"]; they override the defaults."""
    env: dict[str, str] = {}
    """Further environment variables for a server started here."""
    tensor_parallel: int = Field(default=1, ge=1, le=64)
    """Tensor-parallel size of a server started here."""
    overlap: bool = True
    """Whether the server of a new policy starts while that of the old one still serves, which takes memory for both;
    else the old one ends first.
    """
    weights: Literal["fp8", "dequantized"] = "fp8"
    """Weights that the server loads: the FP8 checkpoint, or a float32 copy of it in $TRIPLANE_CACHE."""
    max_restarts: int = Field(default=2, ge=0, le=100)
    """Maximum restarts of a server started here that died."""

    @field_validator("address")
    @classmethod
    def _one_address(cls, value: str | None) -> str | None:
        return value if value is None else _one(value, "engine.address", url=False)

    @property
    def records_routing(self) -> bool:
        """See the base class; the server's protocol has no field for it."""
        return False

    def mismatch(self, forward: Forward) -> str | None:
        """See the base class."""
        return self.unmatched_by(forward, (self.weights == "dequantized",))


class VllmConfig(_LoadingConfig):
    """A vLLM server, started for the run or already running (`base_url`), that loads every policy and is tested to
    serve it.

    See docs/engines.md.
    """

    server: ClassVar[str] = "vLLM"

    kind: Literal["vllm"] = "vllm"
    base_url: str | None = None
    """Root URL of a running server, e.g. http://host:8000, that can read the store's files. Several, as a list or
    separated by commas, or dns:NAME:PORT (every address of a DNS name) are a fleet: each policy is loaded into every
    server. null: start a server on this machine for the run.
    """
    weights_port: int | None = Field(default=None, ge=1, le=65535)
    """Port of `python -m inference weights` at the host of each server, which pulls policies from the store. Its key is
    in the file $TRIPLANE_WEIGHTS_KEY_FILE, if it asks for one. null: servers read this machine's files under the same
    paths.
    """
    events_port: int | None = Field(default=None, ge=1, le=65534)
    """Port at the host of each server of a fleet, or of a replica of `routed`, where vLLM publishes its cache events,
    and replays them at the next one (docs/routing.md). null: what a server has cached is known by the requests sent to
    it.
    """
    block_tokens: int = Field(default=16, ge=1, le=65536)
    """Block size of the servers of a fleet (--block-size), in tokens."""
    hedging_delay_s: float | None = Field(default=None, gt=0)
    """In a fleet: seconds without a token after which a turn is sent to a second server, too; as in `routed`."""
    redis_env: str | None = Field(default=None, pattern=VARIABLE)
    """In a fleet: name of the environment variable with the URL of a Redis server, as in `routed`."""
    python: str = "python"
    """Python interpreter of the environment with vLLM, for a server started here."""
    flags: tuple[str, ...] = ()
    """Further arguments for a server started here, e.g. [--max-model-len, "16384"]; they override the defaults."""
    env: dict[str, str] = {}
    """Further environment variables for a server started here."""
    devices: tuple[int, ...] = ()
    """GPUs of a server started here (CUDA_VISIBLE_DEVICES), locked for one server at a time; empty: all."""
    tensor_parallel: int = Field(default=1, ge=1, le=64)
    """Tensor-parallel size: GPUs (or CPU workers) of a server started here."""
    idle: Literal["keep", "sleep", "stop", "scale"] = "keep"
    """What the server does with its GPUs while training runs. keep: nothing. sleep: vLLM's sleep level 2, which frees
    weights and cache; a server at `base_url` needs --enable-sleep-mode. stop: end the server. scale: scale
    `statefulset` to 0. The next policy is then loaded from its files and verified.
    """
    statefulset: str | None = Field(default=None, pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$", max_length=253)
    """StatefulSet of the servers of `base_url`, for idle: scale. Its namespace is $TRIPLANE_KUBERNETES_NAMESPACE, else
    that of this pod or kubeconfig.
    """
    replicas: int = Field(default=1, ge=1, le=4096)
    """Servers of `statefulset` during a lease, for idle: scale."""
    weights: Literal["auto", "fp8", "dequantized"] = "auto"
    """Weights that the server loads: the FP8 checkpoint, or a float32 copy of it in $TRIPLANE_CACHE. auto: the copy on
    a CPU, where vLLM can't load FP8 blocks.
    """
    exact: bool = True
    """Whether served weights must equal the checkpoint's to the bit. Set false only for GPU kernels that quantize
    weights again; then only the probes bound the differences.
    """
    max_restarts: int = Field(default=2, ge=0, le=100)
    """Maximum restarts of a server that died, per lease."""

    @field_validator("base_url", mode="before")
    @classmethod
    def _joined(cls, value: Any) -> Any:
        return ",".join(str(each) for each in value) if isinstance(value, list | tuple) else value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.idle == "stop" and self.base_url is not None:
            raise ValueError(f"idle stop, but the server at {self.base_url} is not started here: use sleep or keep")
        if self.idle == "scale" and (self.statefulset is None or self.base_url is None):
            raise ValueError("idle scale needs statefulset, and base_url with its headless Service: dns:NAME:8000")
        if self.statefulset is not None and self.idle != "scale":
            raise ValueError(f"statefulset {self.statefulset} has no effect with idle {self.idle}: set idle: scale")
        if self.weights_port is not None and self.base_url is None:
            raise ValueError("weights_port needs base_url: a server started here reads the files of this machine")
        try:
            self.addresses()
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if self.hedging_delay_s is not None and not self.is_fleet:
            raise ValueError("hedging_delay_s needs a fleet: name several servers in base_url, or leave it out")
        if self.redis_env is not None and not self.is_fleet:
            raise ValueError("redis_env needs a fleet: name several servers in base_url, or leave it out")
        if self.events_port is not None and self.base_url is None:
            raise ValueError("events_port needs base_url: a server started here is the only one, so leave it out")
        return self

    @property
    def events(self) -> tuple[str, int] | None:
        """See the base class."""
        if self.events_port is None or self.base_url is None or self.is_fleet:
            return None
        return self.base_url, self.events_port

    def addresses(self) -> list[Address]:
        """Addresses in `base_url`, names included. Raises ConfigError."""
        return parse_addresses(self.base_url, "engine.base_url") if self.base_url is not None else []

    @property
    def is_fleet(self) -> bool:
        """Whether the servers of `base_url` are a fleet: several, found by name, with sidecars, or scaled."""
        found = self.addresses()
        return (
            len(found) > 1
            or any(each.is_name for each in found)
            or (self.weights_port is not None or self.idle == "scale")
        )

    @property
    def records_routing(self) -> bool:
        """See the base class; a server started here needs the flag."""
        return self.base_url is not None or "--enable-return-routed-experts" in self.flags

    @property
    def restrictions(self) -> frozenset[str]:
        """See the base class; a grammar needs a server that loads the tokenizer. Its supports follow from the tokens,
        those of a nucleus do not.
        """
        loads = self.base_url is not None or "--no-skip-tokenizer-init" in self.flags
        return frozenset(("grammar",) if loads else ())

    def mismatch(self, forward: Forward) -> str | None:
        """See the base class."""
        loaded = {"auto": (True, False), "fp8": (False,), "dequantized": (True,)}[self.weights]
        return self.unmatched_by(forward, loaded)


class CustomConfig(_Config):
    """An engine made by a function that is named here: `factory(options, directory, version)` returns an `Engine` (see
    inference/engines/base.py) of the checkpoint in `directory`.
    """

    kind: Literal["custom"]
    """Selects this engine."""
    factory: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """Importable name of the function, e.g. package.module:open_engine."""
    options: dict[str, Any] = {}
    """Options for the function, which checks them."""

    @property
    def restrictions(self) -> frozenset[str]:
        """See the base class; an answer shows whether it does."""
        return frozenset(("grammar", "top_p"))

    @model_validator(mode="after")
    def _importable(self) -> Self:
        try:
            self.load()
        except (ImportError, AttributeError, SyntaxError, TypeError) as error:
            raise ValueError(
                f"engine.factory={self.factory}: {error}: name a function as package.module:name"
            ) from None
        return self

    @property
    def implementation(self) -> str:
        """See the base class; two functions are two implementations."""
        return f"{self.kind} {self.factory}"

    def load(self) -> Callable[[dict[str, Any], Path, str], Engine]:
        """Import the function."""
        module, _, name = self.factory.partition(":")
        found: Callable[[dict[str, Any], Path, str], Engine] = getattr(importlib.import_module(module), name)
        if not callable(found):
            raise TypeError(f"{name} is not callable")
        return found


ReplicaConfig = Annotated[
    BuiltinConfig | OpenAIConfig | VllmConfig | SglangConfig | TrtllmConfig, Field(discriminator="kind")
]


class RoutedConfig(_Config):
    """Several engines of one policy; each request goes to the one that has most of its prompt cached.

    See docs/routing.md.
    """

    kind: Literal["routed"]
    """Selects this engine."""
    replicas: tuple[ReplicaConfig, ...] = Field(min_length=1, max_length=1024)
    """The engines: builtin, openai, vllm, sglang or trtllm."""
    hedging_delay_s: float | None = Field(default=None, gt=0)
    """Seconds without a token after which a turn is sent to a second replica, too, or twice the seconds that were to be
    expected, if these are more. The replica with the first token goes on. At most about a tenth of the turns are sent
    twice. null: none is. The replicas must be of kind builtin, openai or vllm, which send tokens one by one.
    """
    redis_env: str | None = Field(default=None, pattern=VARIABLE)
    """Name of the environment variable with the URL of a Redis server. Through it, processes that sample from the same
    servers share their requests in flight, and what they have sent where (docs/routing.md). null: each process knows
    its own. The replicas must be servers that are already running.
    """

    @property
    def shared(self) -> bool:
        """See the base class."""
        return any(each.shared for each in self.replicas)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        whole = sorted({each.kind for each in self.replicas} & {"sglang", "trtllm"})
        if self.hedging_delay_s is not None and whole:
            raise ValueError(
                f"hedging_delay_s needs replicas that send tokens one by one, {', '.join(whole)} sends whole turns, so"
                " that short ones would win: leave hedging_delay_s out"
            )
        if self.hedging_delay_s is not None and len(self.replicas) < 2:
            raise ValueError("hedging_delay_s needs a second replica: add one, or leave hedging_delay_s out")
        if self.redis_env is not None and None in self.servers:
            place = self.servers.index(None)
            raise ValueError(
                f"redis_env needs replicas that other processes sample from, too, but replica {place} belongs to this"
                " one: name its server, or leave redis_env out"
            )
        return self

    @property
    def servers(self) -> list[str | None]:
        """Address of each replica; None: it is no server that is already running."""
        return [
            None
            if isinstance(each, BuiltinConfig)
            else each.address
            if isinstance(each, TrtllmConfig)
            else each.base_url
            for each in self.replicas
        ]

    @property
    def implementation(self) -> str:
        """See the base class; that of the replicas, if it is the same, since a router changes no token."""
        return " ".join(sorted({each.implementation for each in self.replicas}))

    @property
    def records_routing(self) -> bool:
        """See the base class."""
        return all(each.records_routing for each in self.replicas)

    @property
    def restrictions(self) -> frozenset[str]:
        """See the base class."""
        return frozenset.intersection(*(each.restrictions for each in self.replicas))

    @property
    def serves_adapters(self) -> bool:
        """See the base class."""
        return all(each.serves_adapters for each in self.replicas)

    def mismatch(self, forward: Forward) -> str | None:
        """See the base class."""
        return next((reason for each in self.replicas if (reason := each.mismatch(forward)) is not None), None)


EngineConfig = Annotated[
    BuiltinConfig | OpenAIConfig | VllmConfig | SglangConfig | TrtllmConfig | CustomConfig | RoutedConfig,
    Field(discriminator="kind"),
]
