from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VersionRule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PINNED: _ClassVar[VersionRule]
    FOLLOW: _ClassVar[VersionRule]

class Finish(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STOP: _ClassVar[Finish]
    LENGTH: _ClassVar[Finish]
    CONTEXT: _ClassVar[Finish]
    DEADLINE: _ClassVar[Finish]
    CANCELLED: _ClassVar[Finish]
    STALE: _ClassVar[Finish]
    ENGINE_LOST: _ClassVar[Finish]
PINNED: VersionRule
FOLLOW: VersionRule
STOP: Finish
LENGTH: Finish
CONTEXT: Finish
DEADLINE: Finish
CANCELLED: Finish
STALE: Finish
ENGINE_LOST: Finish

class InfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InfoReply(_message.Message):
    __slots__ = ("versions", "vocabulary", "context_tokens", "credits", "lease_s", "max_episodes", "hosted_tasks")
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    MAX_EPISODES_FIELD_NUMBER: _ClassVar[int]
    HOSTED_TASKS_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedScalarFieldContainer[str]
    vocabulary: int
    context_tokens: int
    credits: int
    lease_s: float
    max_episodes: int
    hosted_tasks: int
    def __init__(self, versions: _Optional[_Iterable[str]] = ..., vocabulary: _Optional[int] = ..., context_tokens: _Optional[int] = ..., credits: _Optional[int] = ..., lease_s: _Optional[float] = ..., max_episodes: _Optional[int] = ..., hosted_tasks: _Optional[int] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "max_tokens", "seed", "stop_token_ids")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    max_tokens: int
    seed: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, temperature: _Optional[float] = ..., max_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class HostedTask(_message.Message):
    __slots__ = ("task_id", "task_digest")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_DIGEST_FIELD_NUMBER: _ClassVar[int]
    task_id: str
    task_digest: str
    def __init__(self, task_id: _Optional[str] = ..., task_digest: _Optional[str] = ...) -> None: ...

class StartEpisodeRequest(_message.Message):
    __slots__ = ("episode_id", "group_id", "prompt_ids", "rule", "version", "sampling", "lease_s", "labels", "hosted", "top_p", "grammar")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    EPISODE_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    HOSTED_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    episode_id: str
    group_id: str
    prompt_ids: bytes
    rule: VersionRule
    version: str
    sampling: Sampling
    lease_s: float
    labels: _containers.ScalarMap[str, str]
    hosted: HostedTask
    top_p: float
    grammar: str
    def __init__(self, episode_id: _Optional[str] = ..., group_id: _Optional[str] = ..., prompt_ids: _Optional[bytes] = ..., rule: _Optional[_Union[VersionRule, str]] = ..., version: _Optional[str] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., lease_s: _Optional[float] = ..., labels: _Optional[_Mapping[str, str]] = ..., hosted: _Optional[_Union[HostedTask, _Mapping]] = ..., top_p: _Optional[float] = ..., grammar: _Optional[str] = ...) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("episode_id", "step", "observation_ids", "from_token", "sampling", "turn_s")
    EPISODE_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    OBSERVATION_IDS_FIELD_NUMBER: _ClassVar[int]
    FROM_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TURN_S_FIELD_NUMBER: _ClassVar[int]
    episode_id: str
    step: int
    observation_ids: bytes
    from_token: int
    sampling: Sampling
    turn_s: float
    def __init__(self, episode_id: _Optional[str] = ..., step: _Optional[int] = ..., observation_ids: _Optional[bytes] = ..., from_token: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., turn_s: _Optional[float] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("version", "first", "end")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    version: str
    first: int
    end: int
    def __init__(self, version: _Optional[str] = ..., first: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("first", "ids", "logprobs", "spans", "supports", "forced", "log_mass")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_FIELD_NUMBER: _ClassVar[int]
    FORCED_FIELD_NUMBER: _ClassVar[int]
    LOG_MASS_FIELD_NUMBER: _ClassVar[int]
    first: int
    ids: bytes
    logprobs: bytes
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    supports: bytes
    forced: bytes
    log_mass: bytes
    def __init__(self, first: _Optional[int] = ..., ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ..., supports: _Optional[bytes] = ..., forced: _Optional[bytes] = ..., log_mass: _Optional[bytes] = ...) -> None: ...

class ToolResult(_message.Message):
    __slots__ = ("name", "arguments", "ok", "text")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    name: str
    arguments: str
    ok: bool
    text: str
    def __init__(self, name: _Optional[str] = ..., arguments: _Optional[str] = ..., ok: _Optional[bool] = ..., text: _Optional[str] = ...) -> None: ...

class StepEnd(_message.Message):
    __slots__ = ("finish", "tokens", "results", "format_error", "observation_ids", "done", "outcome", "failure", "reward", "components", "verdict")
    class ComponentsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    FINISH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    FORMAT_ERROR_FIELD_NUMBER: _ClassVar[int]
    OBSERVATION_IDS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    finish: Finish
    tokens: int
    results: _containers.RepeatedCompositeFieldContainer[ToolResult]
    format_error: str
    observation_ids: bytes
    done: bool
    outcome: str
    failure: str
    reward: float
    components: _containers.ScalarMap[str, float]
    verdict: str
    def __init__(self, finish: _Optional[_Union[Finish, str]] = ..., tokens: _Optional[int] = ..., results: _Optional[_Iterable[_Union[ToolResult, _Mapping]]] = ..., format_error: _Optional[str] = ..., observation_ids: _Optional[bytes] = ..., done: _Optional[bool] = ..., outcome: _Optional[str] = ..., failure: _Optional[str] = ..., reward: _Optional[float] = ..., components: _Optional[_Mapping[str, float]] = ..., verdict: _Optional[str] = ...) -> None: ...

class StepEvent(_message.Message):
    __slots__ = ("episode_id", "step", "tokens", "end")
    EPISODE_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    episode_id: str
    step: int
    tokens: Tokens
    end: StepEnd
    def __init__(self, episode_id: _Optional[str] = ..., step: _Optional[int] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., end: _Optional[_Union[StepEnd, _Mapping]] = ...) -> None: ...

class EndEpisodeRequest(_message.Message):
    __slots__ = ("episode_id", "reward", "components", "aborted")
    class ComponentsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    EPISODE_ID_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    episode_id: str
    reward: float
    components: _containers.ScalarMap[str, float]
    aborted: bool
    def __init__(self, episode_id: _Optional[str] = ..., reward: _Optional[float] = ..., components: _Optional[_Mapping[str, float]] = ..., aborted: _Optional[bool] = ...) -> None: ...

class EpisodeChunk(_message.Message):
    __slots__ = ("data", "last", "digest")
    DATA_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    last: bool
    digest: str
    def __init__(self, data: _Optional[bytes] = ..., last: _Optional[bool] = ..., digest: _Optional[str] = ...) -> None: ...

class EpisodeName(_message.Message):
    __slots__ = ("episode_id",)
    EPISODE_ID_FIELD_NUMBER: _ClassVar[int]
    episode_id: str
    def __init__(self, episode_id: _Optional[str] = ...) -> None: ...

class StepName(_message.Message):
    __slots__ = ("episode_id", "step")
    EPISODE_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    episode_id: str
    step: int
    def __init__(self, episode_id: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class EpisodeState(_message.Message):
    __slots__ = ("episode_id", "phase", "steps", "tokens", "version", "expires_unix", "digest", "prompt_ids")
    EPISODE_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    episode_id: str
    phase: str
    steps: int
    tokens: int
    version: str
    expires_unix: float
    digest: str
    prompt_ids: bytes
    def __init__(self, episode_id: _Optional[str] = ..., phase: _Optional[str] = ..., steps: _Optional[int] = ..., tokens: _Optional[int] = ..., version: _Optional[str] = ..., expires_unix: _Optional[float] = ..., digest: _Optional[str] = ..., prompt_ids: _Optional[bytes] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("episode_ids",)
    EPISODE_IDS_FIELD_NUMBER: _ClassVar[int]
    episode_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, episode_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ("lost",)
    LOST_FIELD_NUMBER: _ClassVar[int]
    lost: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lost: _Optional[_Iterable[str]] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("ids", "temperature", "version")
    IDS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ids: bytes
    temperature: float
    version: str
    def __init__(self, ids: _Optional[bytes] = ..., temperature: _Optional[float] = ..., version: _Optional[str] = ...) -> None: ...

class ScoreReply(_message.Message):
    __slots__ = ("logprobs", "version")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    logprobs: bytes
    version: str
    def __init__(self, logprobs: _Optional[bytes] = ..., version: _Optional[str] = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("id", "start", "step", "end", "cancel", "renew", "traceparent")
    ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    id: int
    start: StartEpisodeRequest
    step: StepRequest
    end: EndEpisodeRequest
    cancel: StepName
    renew: RenewRequest
    traceparent: str
    def __init__(self, id: _Optional[int] = ..., start: _Optional[_Union[StartEpisodeRequest, _Mapping]] = ..., step: _Optional[_Union[StepRequest, _Mapping]] = ..., end: _Optional[_Union[EndEpisodeRequest, _Mapping]] = ..., cancel: _Optional[_Union[StepName, _Mapping]] = ..., renew: _Optional[_Union[RenewRequest, _Mapping]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("code", "error", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: int
    error: str
    message: str
    def __init__(self, code: _Optional[int] = ..., error: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("id", "credits", "state", "step", "chunk", "renewed", "failure")
    ID_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    RENEWED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    id: int
    credits: int
    state: EpisodeState
    step: StepEvent
    chunk: EpisodeChunk
    renewed: RenewReply
    failure: Failure
    def __init__(self, id: _Optional[int] = ..., credits: _Optional[int] = ..., state: _Optional[_Union[EpisodeState, _Mapping]] = ..., step: _Optional[_Union[StepEvent, _Mapping]] = ..., chunk: _Optional[_Union[EpisodeChunk, _Mapping]] = ..., renewed: _Optional[_Union[RenewReply, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...
