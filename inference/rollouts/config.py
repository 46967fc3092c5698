"""Settings of the rollouts."""

from __future__ import annotations

from typing import Any, Literal

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from contracts.episodes import ROUTED_EXPERTS, SUPPORTS

Profile = Literal["deterministic", "throughput"]
Keep = Literal["index", "first", "shortest", "spread"]


class RolloutConfig(BaseModel):
    """The rollouts' own slice of an experiment. Every field is part of the rollouts' action key."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    group_size: int = Field(default=8, ge=1, le=1024)
    """Episodes kept for each prompt."""
    oversample: int = Field(default=0, ge=0, le=1024)
    """Episodes started for each prompt beyond `group_size`; `keep` says which are kept."""
    keep: Keep | None = None
    """Rule for over-sampled episodes. index: the lowest sample numbers, without bias. first: the first to arrive, and
    the rest is aborted, which prefers what is fast (throughput profile only). shortest: the fewest tokens, which
    prefers short answers. spread: as many solved as unsolved ones, as far as there are (arXiv:2504.13818); advantages
    are then those of the kept ones, and tasks that are rarely or nearly always solved weigh as much as even ones.
    Default: index under the deterministic profile, else first.
    """
    temperature: float = Field(default=1.0, ge=0.0, le=10.0)
    """Sampling temperature; 0 is greedy."""
    max_turns: int = Field(default=6, ge=1, le=1000)
    """Turns of the policy in one episode."""
    max_tokens: int = Field(default=256, ge=2)
    """Tokens of the whole context: prompt, policy and environment together."""
    max_turn_tokens: int = Field(default=64, ge=1)
    """Tokens the policy may sample in one turn; a turn that needs more ends the episode as truncated."""
    max_format_errors: int = Field(default=1, ge=0, le=1000)
    """Unparsable tool calls that are answered with their error; one more ends the episode as a format error."""
    tool_timeout_s: float = Field(default=10.0, gt=0.0, le=86_400.0)
    """Seconds that one tool call may take."""
    episode_timeout_s: float = Field(default=120.0, gt=0.0, le=604_800.0)
    """Seconds that one attempt at an episode may take, waiting for the engine included. Under the deterministic profile
    no outcome may depend on the clock: running out of it is an infrastructure fault there, and retried.
    """
    concurrency: int = Field(default=256, ge=1, le=65_536)
    """Episodes in flight in one worker."""
    refill: bool = True
    """Whether a group whose episodes were all solved, or none, draws another one from the reserve.

    All groups are kept.
    """
    max_attempts: int = Field(default=3, ge=1, le=100)
    """Attempts at an episode that meets infrastructure faults; then it is recorded as an infra error, which is never
    scored.
    """
    system_prompt: str = ""
    """First message of every episode; empty for none."""
    tool_prompt: bool = False
    """Whether the first message lists the sandbox's tools and how to call them, as Qwen3's chat template does. A policy
    that was taught them by demonstrations needs no list.
    """
    record_routing: bool = False
    """Whether to record the experts that the sampler chooses, for `trainer.routing_replay`. Takes one byte (two
    above 256 experts) a token, layer and expert chosen: 384 bytes a token for Qwen3-30B-A3B. The engine must return
    them: `builtin` does, vLLM with the flag --enable-return-routed-experts.
    """
    grammar: bool = False
    """Whether tool calls are sampled under the grammar of the task's tools: a call that ends is valid. Tokens without
    an alternative are inserted instead of sampled; the supports of the others are recorded, and the trainer normalizes
    over them. The engine must be `builtin`, `sglang`, or `vllm` with the flag --no-skip-tokenizer-init.
    """
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Sample from the most probable tokens whose probabilities add up to at least this (nucleus sampling); 1: from all.
    Supports are recorded, too. The engine must be `builtin` or `sglang`.
    """
    carry_over: int = Field(default=0, ge=0, le=1_000_000)
    """Groups in flight beyond those that an iteration needs (partial rollouts, arXiv:2509.18521). The iteration ends
    when as many as it needs are complete. The episodes of the others stop after their current turn and go on in the
    next iteration with its policy, their calls replayed in fresh sandboxes. Throughput profile only. 0: every group is
    waited for.
    """
    max_carries: int = Field(default=2, ge=1, le=100)
    """How often a group may be carried over; then its iteration waits for it. The first tokens of an episode are at
    most this number of iterations older than its last ones.
    """
    profile: Profile = "deterministic"
    """deterministic: no bit that counts depends on the clock. throughput: an episode may end by the clock, and another
    version may sample its later turns.
    """

    @model_serializer(mode="wrap")
    def _leave_out_unset(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Dump the fields. Newer ones are left out if unset, so that action keys stay as they are without them."""
        values: dict[str, Any] = dump(self)
        for name in ("keep", "tool_prompt", "record_routing", "grammar", "top_p", "carry_over", "max_carries"):
            if getattr(self, name) == type(self).model_fields[name].default:
                values.pop(name, None)
        return values

    @property
    def restrictions(self) -> frozenset[str]:
        """Names of the settings that leave part of the vocabulary to sample from, which is recorded."""
        return frozenset(name for name, used in (("grammar", self.grammar), ("top_p", self.top_p < 1.0)) if used)

    @property
    def recorded(self) -> list[pa.Field]:
        """Optional columns of the sequences."""
        wanted = ((ROUTED_EXPERTS, self.record_routing), (SUPPORTS, bool(self.restrictions)))
        return [field for field, recorded in wanted if recorded]

    @property
    def kept_by(self) -> Keep:
        """Rule for over-sampled episodes."""
        return self.keep or ("index" if self.profile == "deterministic" else "first")

    @property
    def episodes_started(self) -> int:
        """Episodes started for each prompt."""
        return self.group_size + self.oversample

    @model_validator(mode="after")
    def _turn_fits(self) -> RolloutConfig:
        if self.max_turn_tokens > self.max_tokens:
            raise ValueError(
                f"max_turn_tokens {self.max_turn_tokens} exceeds max_tokens {self.max_tokens}: lower it, or allow a"
                " longer context"
            )
        return self

    @model_validator(mode="after")
    def _keep_fits(self) -> RolloutConfig:
        if self.keep == "first" and self.profile == "deterministic":
            raise ValueError("keep first depends on the clock: set profile: throughput, or keep: index")
        if self.keep is not None and not self.oversample:
            raise ValueError(f"keep {self.keep} chooses among over-sampled episodes: set oversample, or leave keep out")
        return self

    @model_validator(mode="after")
    def _carry_over_fits(self) -> RolloutConfig:
        if self.carry_over and self.profile == "deterministic":
            raise ValueError("carry_over depends on the clock: set profile: throughput, or carry_over: 0")
        if self.carry_over and self.oversample:
            raise ValueError("carry_over keeps slow episodes, oversample drops some: set one of them to 0")
        return self
