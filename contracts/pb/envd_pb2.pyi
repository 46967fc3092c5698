from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PutTemplateRequest(_message.Message):
    __slots__ = ("files", "base", "removed")
    class FilesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    FILES_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    files: _containers.ScalarMap[str, bytes]
    base: str
    removed: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, files: _Optional[_Mapping[str, bytes]] = ..., base: _Optional[str] = ..., removed: _Optional[_Iterable[str]] = ...) -> None: ...

class PutTemplateReply(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...

class PutRuntimeRequest(_message.Message):
    __slots__ = ("digest", "size", "offset", "data")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    digest: str
    size: int
    offset: int
    data: bytes
    def __init__(self, digest: _Optional[str] = ..., size: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class PutRuntimeReply(_message.Message):
    __slots__ = ("received",)
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    received: int
    def __init__(self, received: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("template", "limits", "env", "policy_yaml", "backend", "labels", "runtime", "toolset", "record_requests")
    class EnvEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    POLICY_YAML_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    RUNTIME_FIELD_NUMBER: _ClassVar[int]
    TOOLSET_FIELD_NUMBER: _ClassVar[int]
    RECORD_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    template: str
    limits: Limits
    env: _containers.ScalarMap[str, str]
    policy_yaml: str
    backend: str
    labels: _containers.ScalarMap[str, str]
    runtime: str
    toolset: str
    record_requests: bool
    def __init__(self, template: _Optional[str] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., env: _Optional[_Mapping[str, str]] = ..., policy_yaml: _Optional[str] = ..., backend: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., runtime: _Optional[str] = ..., toolset: _Optional[str] = ..., record_requests: _Optional[bool] = ...) -> None: ...

class CreateReply(_message.Message):
    __slots__ = ("sandbox_id", "token")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    token: str
    def __init__(self, sandbox_id: _Optional[str] = ..., token: _Optional[str] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("sandbox_id",)
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    def __init__(self, sandbox_id: _Optional[str] = ...) -> None: ...

class SandboxState(_message.Message):
    __slots__ = ("sandbox_id", "state", "backend", "template", "age_s", "expires_in_s", "memory_bytes", "pids", "cpu_s", "labels", "host_name", "lost")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    PIDS_FIELD_NUMBER: _ClassVar[int]
    CPU_S_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    HOST_NAME_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    state: str
    backend: str
    template: str
    age_s: float
    expires_in_s: float
    memory_bytes: int
    pids: int
    cpu_s: float
    labels: _containers.ScalarMap[str, str]
    host_name: str
    lost: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, sandbox_id: _Optional[str] = ..., state: _Optional[str] = ..., backend: _Optional[str] = ..., template: _Optional[str] = ..., age_s: _Optional[float] = ..., expires_in_s: _Optional[float] = ..., memory_bytes: _Optional[int] = ..., pids: _Optional[int] = ..., cpu_s: _Optional[float] = ..., labels: _Optional[_Mapping[str, str]] = ..., host_name: _Optional[str] = ..., lost: _Optional[_Iterable[str]] = ...) -> None: ...

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

class Export(_message.Message):
    __slots__ = ("artifacts", "max_files", "max_bytes")
    ARTIFACTS_FIELD_NUMBER: _ClassVar[int]
    MAX_FILES_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    artifacts: _containers.RepeatedScalarFieldContainer[str]
    max_files: int
    max_bytes: int
    def __init__(self, artifacts: _Optional[_Iterable[str]] = ..., max_files: _Optional[int] = ..., max_bytes: _Optional[int] = ...) -> None: ...

class LeftOut(_message.Message):
    __slots__ = ("path", "reason")
    PATH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    path: str
    reason: str
    def __init__(self, path: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("sandbox_id", "want_diff", "export")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    WANT_DIFF_FIELD_NUMBER: _ClassVar[int]
    EXPORT_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    want_diff: bool
    export: Export
    def __init__(self, sandbox_id: _Optional[str] = ..., want_diff: _Optional[bool] = ..., export: _Optional[_Union[Export, _Mapping]] = ...) -> None: ...

class DeleteReply(_message.Message):
    __slots__ = ("diff", "left_out", "left_out_counts", "requests_json")
    class LeftOutCountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    DIFF_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_COUNTS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_JSON_FIELD_NUMBER: _ClassVar[int]
    diff: bytes
    left_out: _containers.RepeatedCompositeFieldContainer[LeftOut]
    left_out_counts: _containers.ScalarMap[str, int]
    requests_json: bytes
    def __init__(self, diff: _Optional[bytes] = ..., left_out: _Optional[_Iterable[_Union[LeftOut, _Mapping]]] = ..., left_out_counts: _Optional[_Mapping[str, int]] = ..., requests_json: _Optional[bytes] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("template", "diff", "hidden_files", "tests", "limits", "timeout_s", "artifacts", "product", "runtime", "plugins", "ini", "idle_s", "backend", "policy_yaml")
    class HiddenFilesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    class IniEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    DIFF_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FILES_FIELD_NUMBER: _ClassVar[int]
    TESTS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    ARTIFACTS_FIELD_NUMBER: _ClassVar[int]
    PRODUCT_FIELD_NUMBER: _ClassVar[int]
    RUNTIME_FIELD_NUMBER: _ClassVar[int]
    PLUGINS_FIELD_NUMBER: _ClassVar[int]
    INI_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    POLICY_YAML_FIELD_NUMBER: _ClassVar[int]
    template: str
    diff: bytes
    hidden_files: _containers.ScalarMap[str, bytes]
    tests: _containers.RepeatedScalarFieldContainer[str]
    limits: Limits
    timeout_s: float
    artifacts: _containers.RepeatedScalarFieldContainer[str]
    product: _containers.RepeatedScalarFieldContainer[str]
    runtime: str
    plugins: _containers.RepeatedScalarFieldContainer[str]
    ini: _containers.ScalarMap[str, str]
    idle_s: float
    backend: str
    policy_yaml: str
    def __init__(self, template: _Optional[str] = ..., diff: _Optional[bytes] = ..., hidden_files: _Optional[_Mapping[str, bytes]] = ..., tests: _Optional[_Iterable[str]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., timeout_s: _Optional[float] = ..., artifacts: _Optional[_Iterable[str]] = ..., product: _Optional[_Iterable[str]] = ..., runtime: _Optional[str] = ..., plugins: _Optional[_Iterable[str]] = ..., ini: _Optional[_Mapping[str, str]] = ..., idle_s: _Optional[float] = ..., backend: _Optional[str] = ..., policy_yaml: _Optional[str] = ...) -> None: ...

class FoundRequest(_message.Message):
    __slots__ = ("template", "findings")
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    template: str
    findings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, template: _Optional[str] = ..., findings: _Optional[_Iterable[str]] = ...) -> None: ...

class FoundReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TestOutcome(_message.Message):
    __slots__ = ("name", "status", "message")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    name: str
    status: str
    message: str
    def __init__(self, name: _Optional[str] = ..., status: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Observation(_message.Message):
    __slots__ = ("test", "key", "value")
    TEST_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    test: str
    key: str
    value: str
    def __init__(self, test: _Optional[str] = ..., key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class VerifyReply(_message.Message):
    __slots__ = ("outcomes", "exit", "log", "seconds", "tampering", "observations", "backend")
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    EXIT_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    TAMPERING_FIELD_NUMBER: _ClassVar[int]
    OBSERVATIONS_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[TestOutcome]
    exit: str
    log: str
    seconds: float
    tampering: _containers.RepeatedScalarFieldContainer[str]
    observations: _containers.RepeatedCompositeFieldContainer[Observation]
    backend: str
    def __init__(self, outcomes: _Optional[_Iterable[_Union[TestOutcome, _Mapping]]] = ..., exit: _Optional[str] = ..., log: _Optional[str] = ..., seconds: _Optional[float] = ..., tampering: _Optional[_Iterable[str]] = ..., observations: _Optional[_Iterable[_Union[Observation, _Mapping]]] = ..., backend: _Optional[str] = ...) -> None: ...
