from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class InfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InfoReply(_message.Message):
    __slots__ = ("backend", "isolation", "version", "live", "limits_enforced")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    ISOLATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_ENFORCED_FIELD_NUMBER: _ClassVar[int]
    backend: str
    isolation: bool
    version: str
    live: int
    limits_enforced: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, backend: _Optional[str] = ..., isolation: _Optional[bool] = ..., version: _Optional[str] = ..., live: _Optional[int] = ..., limits_enforced: _Optional[_Iterable[str]] = ...) -> None: ...

class PutTemplateRequest(_message.Message):
    __slots__ = ("files",)
    class FilesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    FILES_FIELD_NUMBER: _ClassVar[int]
    files: _containers.ScalarMap[str, bytes]
    def __init__(self, files: _Optional[_Mapping[str, bytes]] = ...) -> None: ...

class PutTemplateReply(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("memory_mb", "pids", "cpu", "disk_mb", "lifetime_s")
    MEMORY_MB_FIELD_NUMBER: _ClassVar[int]
    PIDS_FIELD_NUMBER: _ClassVar[int]
    CPU_FIELD_NUMBER: _ClassVar[int]
    DISK_MB_FIELD_NUMBER: _ClassVar[int]
    LIFETIME_S_FIELD_NUMBER: _ClassVar[int]
    memory_mb: int
    pids: int
    cpu: float
    disk_mb: int
    lifetime_s: float
    def __init__(self, memory_mb: _Optional[int] = ..., pids: _Optional[int] = ..., cpu: _Optional[float] = ..., disk_mb: _Optional[int] = ..., lifetime_s: _Optional[float] = ...) -> None: ...

class CreateRequest(_message.Message):
    __slots__ = ("template", "limits", "env")
    class EnvEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    template: str
    limits: Limits
    env: _containers.ScalarMap[str, str]
    def __init__(self, template: _Optional[str] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., env: _Optional[_Mapping[str, str]] = ...) -> None: ...

class CreateReply(_message.Message):
    __slots__ = ("sandbox_id",)
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    def __init__(self, sandbox_id: _Optional[str] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("name", "arguments_json")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    name: str
    arguments_json: str
    def __init__(self, name: _Optional[str] = ..., arguments_json: _Optional[str] = ...) -> None: ...

class ToolResult(_message.Message):
    __slots__ = ("ok", "text", "true_bytes", "truncated", "timed_out", "seconds")
    OK_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TRUE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    TIMED_OUT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    text: str
    true_bytes: int
    truncated: bool
    timed_out: bool
    seconds: float
    def __init__(self, ok: _Optional[bool] = ..., text: _Optional[str] = ..., true_bytes: _Optional[int] = ..., truncated: _Optional[bool] = ..., timed_out: _Optional[bool] = ..., seconds: _Optional[float] = ...) -> None: ...

class BatchRequest(_message.Message):
    __slots__ = ("sandbox_id", "calls", "timeout_s")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    timeout_s: float
    def __init__(self, sandbox_id: _Optional[str] = ..., calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class BatchReply(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[ToolResult]
    def __init__(self, results: _Optional[_Iterable[_Union[ToolResult, _Mapping]]] = ...) -> None: ...

class DiffRequest(_message.Message):
    __slots__ = ("sandbox_id",)
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    def __init__(self, sandbox_id: _Optional[str] = ...) -> None: ...

class DiffReply(_message.Message):
    __slots__ = ("diff",)
    DIFF_FIELD_NUMBER: _ClassVar[int]
    diff: bytes
    def __init__(self, diff: _Optional[bytes] = ...) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("sandbox_id", "want_diff")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    WANT_DIFF_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    want_diff: bool
    def __init__(self, sandbox_id: _Optional[str] = ..., want_diff: _Optional[bool] = ...) -> None: ...

class DeleteReply(_message.Message):
    __slots__ = ("diff",)
    DIFF_FIELD_NUMBER: _ClassVar[int]
    diff: bytes
    def __init__(self, diff: _Optional[bytes] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("template", "diff", "hidden_files", "tests", "limits", "timeout_s")
    class HiddenFilesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    DIFF_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FILES_FIELD_NUMBER: _ClassVar[int]
    TESTS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    template: str
    diff: bytes
    hidden_files: _containers.ScalarMap[str, bytes]
    tests: _containers.RepeatedScalarFieldContainer[str]
    limits: Limits
    timeout_s: float
    def __init__(self, template: _Optional[str] = ..., diff: _Optional[bytes] = ..., hidden_files: _Optional[_Mapping[str, bytes]] = ..., tests: _Optional[_Iterable[str]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class TestOutcome(_message.Message):
    __slots__ = ("name", "status", "message")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    name: str
    status: str
    message: str
    def __init__(self, name: _Optional[str] = ..., status: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class VerifyReply(_message.Message):
    __slots__ = ("outcomes", "exit", "log", "seconds")
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    EXIT_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[TestOutcome]
    exit: str
    log: str
    seconds: float
    def __init__(self, outcomes: _Optional[_Iterable[_Union[TestOutcome, _Mapping]]] = ..., exit: _Optional[str] = ..., log: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...
