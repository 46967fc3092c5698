from contracts.pb import envd_pb2 as _envd_pb2
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
    __slots__ = ("backend", "isolation", "version", "live", "limits_enforced", "backends")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    ISOLATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_ENFORCED_FIELD_NUMBER: _ClassVar[int]
    BACKENDS_FIELD_NUMBER: _ClassVar[int]
    backend: str
    isolation: bool
    version: str
    live: int
    limits_enforced: _containers.RepeatedScalarFieldContainer[str]
    backends: _containers.RepeatedCompositeFieldContainer[BackendInfo]
    def __init__(self, backend: _Optional[str] = ..., isolation: _Optional[bool] = ..., version: _Optional[str] = ..., live: _Optional[int] = ..., limits_enforced: _Optional[_Iterable[str]] = ..., backends: _Optional[_Iterable[_Union[BackendInfo, _Mapping]]] = ...) -> None: ...

class BackendInfo(_message.Message):
    __slots__ = ("name", "isolation_level", "limits_enforced", "keeps_processes", "features", "helper")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ISOLATION_LEVEL_FIELD_NUMBER: _ClassVar[int]
    LIMITS_ENFORCED_FIELD_NUMBER: _ClassVar[int]
    KEEPS_PROCESSES_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    HELPER_FIELD_NUMBER: _ClassVar[int]
    name: str
    isolation_level: str
    limits_enforced: _containers.RepeatedScalarFieldContainer[str]
    keeps_processes: bool
    features: _containers.RepeatedScalarFieldContainer[str]
    helper: str
    def __init__(self, name: _Optional[str] = ..., isolation_level: _Optional[str] = ..., limits_enforced: _Optional[_Iterable[str]] = ..., keeps_processes: _Optional[bool] = ..., features: _Optional[_Iterable[str]] = ..., helper: _Optional[str] = ...) -> None: ...

class CreateBatchRequest(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[_envd_pb2.CreateRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[_envd_pb2.CreateRequest, _Mapping]]] = ...) -> None: ...

class CreateBatchReply(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[CreateResult]
    def __init__(self, results: _Optional[_Iterable[_Union[CreateResult, _Mapping]]] = ...) -> None: ...

class CreateResult(_message.Message):
    __slots__ = ("created", "error", "code")
    CREATED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    created: _envd_pb2.CreateReply
    error: str
    code: int
    def __init__(self, created: _Optional[_Union[_envd_pb2.CreateReply, _Mapping]] = ..., error: _Optional[str] = ..., code: _Optional[int] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("labels",)
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    LABELS_FIELD_NUMBER: _ClassVar[int]
    labels: _containers.ScalarMap[str, str]
    def __init__(self, labels: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ListReply(_message.Message):
    __slots__ = ("sandboxes",)
    SANDBOXES_FIELD_NUMBER: _ClassVar[int]
    sandboxes: _containers.RepeatedCompositeFieldContainer[_envd_pb2.SandboxState]
    def __init__(self, sandboxes: _Optional[_Iterable[_Union[_envd_pb2.SandboxState, _Mapping]]] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("sandbox_id",)
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    def __init__(self, sandbox_id: _Optional[str] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("sandbox_id",)
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    def __init__(self, sandbox_id: _Optional[str] = ...) -> None: ...

class HibernateRequest(_message.Message):
    __slots__ = ("sandbox_id",)
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    def __init__(self, sandbox_id: _Optional[str] = ...) -> None: ...

class ForkRequest(_message.Message):
    __slots__ = ("sandbox_id",)
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    def __init__(self, sandbox_id: _Optional[str] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("sandbox_id",)
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    def __init__(self, sandbox_id: _Optional[str] = ...) -> None: ...

class SnapshotReply(_message.Message):
    __slots__ = ("snapshot_id", "bytes", "lost")
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    snapshot_id: str
    bytes: int
    lost: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, snapshot_id: _Optional[str] = ..., bytes: _Optional[int] = ..., lost: _Optional[_Iterable[str]] = ...) -> None: ...

class RestoreRequest(_message.Message):
    __slots__ = ("snapshot_id", "limits")
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    snapshot_id: str
    limits: _envd_pb2.Limits
    def __init__(self, snapshot_id: _Optional[str] = ..., limits: _Optional[_Union[_envd_pb2.Limits, _Mapping]] = ...) -> None: ...

class DeleteSnapshotRequest(_message.Message):
    __slots__ = ("snapshot_id",)
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    snapshot_id: str
    def __init__(self, snapshot_id: _Optional[str] = ...) -> None: ...

class DeleteSnapshotReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MigrateRequest(_message.Message):
    __slots__ = ("sandbox_id", "target", "target_key")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    TARGET_KEY_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    target: str
    target_key: str
    def __init__(self, sandbox_id: _Optional[str] = ..., target: _Optional[str] = ..., target_key: _Optional[str] = ...) -> None: ...

class MigrateReply(_message.Message):
    __slots__ = ("bytes", "seconds", "lost")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    seconds: float
    lost: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., lost: _Optional[_Iterable[str]] = ...) -> None: ...

class SnapshotChunk(_message.Message):
    __slots__ = ("header", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: ReceiveHeader
    data: bytes
    def __init__(self, header: _Optional[_Union[ReceiveHeader, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class ReceiveHeader(_message.Message):
    __slots__ = ("sandbox_id", "token", "backend", "template", "template_files", "limits", "env", "labels", "policy_yaml", "expires_in_s", "host_name", "runtime", "toolset")
    class TemplateFilesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
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
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_FILES_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    POLICY_YAML_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    HOST_NAME_FIELD_NUMBER: _ClassVar[int]
    RUNTIME_FIELD_NUMBER: _ClassVar[int]
    TOOLSET_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    token: str
    backend: str
    template: str
    template_files: _containers.ScalarMap[str, bytes]
    limits: _envd_pb2.Limits
    env: _containers.ScalarMap[str, str]
    labels: _containers.ScalarMap[str, str]
    policy_yaml: str
    expires_in_s: float
    host_name: str
    runtime: str
    toolset: str
    def __init__(self, sandbox_id: _Optional[str] = ..., token: _Optional[str] = ..., backend: _Optional[str] = ..., template: _Optional[str] = ..., template_files: _Optional[_Mapping[str, bytes]] = ..., limits: _Optional[_Union[_envd_pb2.Limits, _Mapping]] = ..., env: _Optional[_Mapping[str, str]] = ..., labels: _Optional[_Mapping[str, str]] = ..., policy_yaml: _Optional[str] = ..., expires_in_s: _Optional[float] = ..., host_name: _Optional[str] = ..., runtime: _Optional[str] = ..., toolset: _Optional[str] = ...) -> None: ...

class ReceiveReply(_message.Message):
    __slots__ = ("lost",)
    LOST_FIELD_NUMBER: _ClassVar[int]
    lost: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lost: _Optional[_Iterable[str]] = ...) -> None: ...

class SchemasRequest(_message.Message):
    __slots__ = ("toolset",)
    TOOLSET_FIELD_NUMBER: _ClassVar[int]
    toolset: str
    def __init__(self, toolset: _Optional[str] = ...) -> None: ...

class SchemasReply(_message.Message):
    __slots__ = ("tools_json",)
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    tools_json: str
    def __init__(self, tools_json: _Optional[str] = ...) -> None: ...

class DiffRequest(_message.Message):
    __slots__ = ("sandbox_id", "export")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    EXPORT_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    export: _envd_pb2.Export
    def __init__(self, sandbox_id: _Optional[str] = ..., export: _Optional[_Union[_envd_pb2.Export, _Mapping]] = ...) -> None: ...

class DiffReply(_message.Message):
    __slots__ = ("diff", "left_out", "left_out_counts")
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
    diff: bytes
    left_out: _containers.RepeatedCompositeFieldContainer[_envd_pb2.LeftOut]
    left_out_counts: _containers.ScalarMap[str, int]
    def __init__(self, diff: _Optional[bytes] = ..., left_out: _Optional[_Iterable[_Union[_envd_pb2.LeftOut, _Mapping]]] = ..., left_out_counts: _Optional[_Mapping[str, int]] = ...) -> None: ...

class DeleteBatchRequest(_message.Message):
    __slots__ = ("sandbox_ids", "tokens")
    SANDBOX_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    sandbox_ids: _containers.RepeatedScalarFieldContainer[str]
    tokens: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, sandbox_ids: _Optional[_Iterable[str]] = ..., tokens: _Optional[_Iterable[str]] = ...) -> None: ...

class DeleteBatchReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AuditRequest(_message.Message):
    __slots__ = ("sandbox_id", "after", "follow")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    after: int
    follow: bool
    def __init__(self, sandbox_id: _Optional[str] = ..., after: _Optional[int] = ..., follow: _Optional[bool] = ...) -> None: ...

class AuditEvent(_message.Message):
    __slots__ = ("number", "unix_time", "sandbox_id", "kind", "detail_json")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    UNIX_TIME_FIELD_NUMBER: _ClassVar[int]
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    DETAIL_JSON_FIELD_NUMBER: _ClassVar[int]
    number: int
    unix_time: float
    sandbox_id: str
    kind: str
    detail_json: str
    def __init__(self, number: _Optional[int] = ..., unix_time: _Optional[float] = ..., sandbox_id: _Optional[str] = ..., kind: _Optional[str] = ..., detail_json: _Optional[str] = ...) -> None: ...

class PathRequest(_message.Message):
    __slots__ = ("sandbox_id", "path")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    path: str
    def __init__(self, sandbox_id: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class FileStat(_message.Message):
    __slots__ = ("path", "type", "size", "mode", "mtime_ns", "link_target")
    PATH_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    MTIME_NS_FIELD_NUMBER: _ClassVar[int]
    LINK_TARGET_FIELD_NUMBER: _ClassVar[int]
    path: str
    type: str
    size: int
    mode: int
    mtime_ns: int
    link_target: str
    def __init__(self, path: _Optional[str] = ..., type: _Optional[str] = ..., size: _Optional[int] = ..., mode: _Optional[int] = ..., mtime_ns: _Optional[int] = ..., link_target: _Optional[str] = ...) -> None: ...

class FileReadRequest(_message.Message):
    __slots__ = ("sandbox_id", "path", "offset", "length")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    path: str
    offset: int
    length: int
    def __init__(self, sandbox_id: _Optional[str] = ..., path: _Optional[str] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class FileReadReply(_message.Message):
    __slots__ = ("data", "stat")
    DATA_FIELD_NUMBER: _ClassVar[int]
    STAT_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    stat: FileStat
    def __init__(self, data: _Optional[bytes] = ..., stat: _Optional[_Union[FileStat, _Mapping]] = ...) -> None: ...

class FileWriteRequest(_message.Message):
    __slots__ = ("sandbox_id", "path", "data", "mode", "make_parents", "must_create")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    MAKE_PARENTS_FIELD_NUMBER: _ClassVar[int]
    MUST_CREATE_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    path: str
    data: bytes
    mode: int
    make_parents: bool
    must_create: bool
    def __init__(self, sandbox_id: _Optional[str] = ..., path: _Optional[str] = ..., data: _Optional[bytes] = ..., mode: _Optional[int] = ..., make_parents: _Optional[bool] = ..., must_create: _Optional[bool] = ...) -> None: ...

class FileListRequest(_message.Message):
    __slots__ = ("sandbox_id", "path", "depth", "limit")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    path: str
    depth: int
    limit: int
    def __init__(self, sandbox_id: _Optional[str] = ..., path: _Optional[str] = ..., depth: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class FileListReply(_message.Message):
    __slots__ = ("entries", "truncated")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[FileStat]
    truncated: bool
    def __init__(self, entries: _Optional[_Iterable[_Union[FileStat, _Mapping]]] = ..., truncated: _Optional[bool] = ...) -> None: ...

class FileMoveRequest(_message.Message):
    __slots__ = ("sandbox_id", "source", "target", "overwrite")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    OVERWRITE_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    source: str
    target: str
    overwrite: bool
    def __init__(self, sandbox_id: _Optional[str] = ..., source: _Optional[str] = ..., target: _Optional[str] = ..., overwrite: _Optional[bool] = ...) -> None: ...

class FileRemoveRequest(_message.Message):
    __slots__ = ("sandbox_id", "path", "recursive")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    RECURSIVE_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    path: str
    recursive: bool
    def __init__(self, sandbox_id: _Optional[str] = ..., path: _Optional[str] = ..., recursive: _Optional[bool] = ...) -> None: ...

class FileRemoveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FileSearchRequest(_message.Message):
    __slots__ = ("sandbox_id", "pattern", "path", "globs", "ignore_case", "fixed_string", "hidden", "limit", "timeout_s")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    PATTERN_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    GLOBS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_CASE_FIELD_NUMBER: _ClassVar[int]
    FIXED_STRING_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    pattern: str
    path: str
    globs: _containers.RepeatedScalarFieldContainer[str]
    ignore_case: bool
    fixed_string: bool
    hidden: bool
    limit: int
    timeout_s: float
    def __init__(self, sandbox_id: _Optional[str] = ..., pattern: _Optional[str] = ..., path: _Optional[str] = ..., globs: _Optional[_Iterable[str]] = ..., ignore_case: _Optional[bool] = ..., fixed_string: _Optional[bool] = ..., hidden: _Optional[bool] = ..., limit: _Optional[int] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class FileMatch(_message.Message):
    __slots__ = ("path", "line", "column", "text")
    PATH_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    path: str
    line: int
    column: int
    text: bytes
    def __init__(self, path: _Optional[str] = ..., line: _Optional[int] = ..., column: _Optional[int] = ..., text: _Optional[bytes] = ...) -> None: ...

class FileSearchReply(_message.Message):
    __slots__ = ("matches", "truncated", "engine")
    MATCHES_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    matches: _containers.RepeatedCompositeFieldContainer[FileMatch]
    truncated: bool
    engine: str
    def __init__(self, matches: _Optional[_Iterable[_Union[FileMatch, _Mapping]]] = ..., truncated: _Optional[bool] = ..., engine: _Optional[str] = ...) -> None: ...

class FileWatchRequest(_message.Message):
    __slots__ = ("sandbox_id", "path", "recursive")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    RECURSIVE_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    path: str
    recursive: bool
    def __init__(self, sandbox_id: _Optional[str] = ..., path: _Optional[str] = ..., recursive: _Optional[bool] = ...) -> None: ...

class FileEvent(_message.Message):
    __slots__ = ("path", "kind")
    PATH_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    path: str
    kind: str
    def __init__(self, path: _Optional[str] = ..., kind: _Optional[str] = ...) -> None: ...

class UploadChunk(_message.Message):
    __slots__ = ("header", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: FileWriteRequest
    data: bytes
    def __init__(self, header: _Optional[_Union[FileWriteRequest, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class DownloadChunk(_message.Message):
    __slots__ = ("data", "stat")
    DATA_FIELD_NUMBER: _ClassVar[int]
    STAT_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    stat: FileStat
    def __init__(self, data: _Optional[bytes] = ..., stat: _Optional[_Union[FileStat, _Mapping]] = ...) -> None: ...

class PtySize(_message.Message):
    __slots__ = ("rows", "columns")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    rows: int
    columns: int
    def __init__(self, rows: _Optional[int] = ..., columns: _Optional[int] = ...) -> None: ...

class ProcessStartRequest(_message.Message):
    __slots__ = ("sandbox_id", "arguments", "env", "directory", "pty", "stdin", "timeout_s", "ring_bytes")
    class EnvEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    PTY_FIELD_NUMBER: _ClassVar[int]
    STDIN_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    RING_BYTES_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    arguments: _containers.RepeatedScalarFieldContainer[str]
    env: _containers.ScalarMap[str, str]
    directory: str
    pty: PtySize
    stdin: bool
    timeout_s: float
    ring_bytes: int
    def __init__(self, sandbox_id: _Optional[str] = ..., arguments: _Optional[_Iterable[str]] = ..., env: _Optional[_Mapping[str, str]] = ..., directory: _Optional[str] = ..., pty: _Optional[_Union[PtySize, _Mapping]] = ..., stdin: _Optional[bool] = ..., timeout_s: _Optional[float] = ..., ring_bytes: _Optional[int] = ...) -> None: ...

class ProcessRequest(_message.Message):
    __slots__ = ("sandbox_id", "process")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    process: int
    def __init__(self, sandbox_id: _Optional[str] = ..., process: _Optional[int] = ...) -> None: ...

class ProcessListRequest(_message.Message):
    __slots__ = ("sandbox_id",)
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    def __init__(self, sandbox_id: _Optional[str] = ...) -> None: ...

class ProcessListReply(_message.Message):
    __slots__ = ("processes",)
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    processes: _containers.RepeatedCompositeFieldContainer[ProcessState]
    def __init__(self, processes: _Optional[_Iterable[_Union[ProcessState, _Mapping]]] = ...) -> None: ...

class ProcessState(_message.Message):
    __slots__ = ("process", "pid", "state", "exit_code", "timed_out", "arguments", "stdout_bytes", "stderr_bytes", "accepted")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    TIMED_OUT_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    STDOUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    STDERR_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    process: int
    pid: int
    state: str
    exit_code: int
    timed_out: bool
    arguments: _containers.RepeatedScalarFieldContainer[str]
    stdout_bytes: int
    stderr_bytes: int
    accepted: int
    def __init__(self, process: _Optional[int] = ..., pid: _Optional[int] = ..., state: _Optional[str] = ..., exit_code: _Optional[int] = ..., timed_out: _Optional[bool] = ..., arguments: _Optional[_Iterable[str]] = ..., stdout_bytes: _Optional[int] = ..., stderr_bytes: _Optional[int] = ..., accepted: _Optional[int] = ...) -> None: ...

class ProcessConnectRequest(_message.Message):
    __slots__ = ("sandbox_id", "process", "stdout_offset", "stderr_offset")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    STDOUT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    STDERR_OFFSET_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    process: int
    stdout_offset: int
    stderr_offset: int
    def __init__(self, sandbox_id: _Optional[str] = ..., process: _Optional[int] = ..., stdout_offset: _Optional[int] = ..., stderr_offset: _Optional[int] = ...) -> None: ...

class ProcessEvent(_message.Message):
    __slots__ = ("channel", "offset", "data", "ended")
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    channel: str
    offset: int
    data: bytes
    ended: ProcessState
    def __init__(self, channel: _Optional[str] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., ended: _Optional[_Union[ProcessState, _Mapping]] = ...) -> None: ...

class ProcessStdinRequest(_message.Message):
    __slots__ = ("sandbox_id", "process", "data")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    process: int
    data: bytes
    def __init__(self, sandbox_id: _Optional[str] = ..., process: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class ProcessSignalRequest(_message.Message):
    __slots__ = ("sandbox_id", "process", "signal", "tree")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    process: int
    signal: int
    tree: bool
    def __init__(self, sandbox_id: _Optional[str] = ..., process: _Optional[int] = ..., signal: _Optional[int] = ..., tree: _Optional[bool] = ...) -> None: ...

class ProcessResizeRequest(_message.Message):
    __slots__ = ("sandbox_id", "process", "size")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    process: int
    size: PtySize
    def __init__(self, sandbox_id: _Optional[str] = ..., process: _Optional[int] = ..., size: _Optional[_Union[PtySize, _Mapping]] = ...) -> None: ...
