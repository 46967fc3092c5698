from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ClaimRequest(_message.Message):
    __slots__ = ("image", "experiments")
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    EXPERIMENTS_FIELD_NUMBER: _ClassVar[int]
    image: str
    experiments: str
    def __init__(self, image: _Optional[str] = ..., experiments: _Optional[str] = ...) -> None: ...

class ClaimReply(_message.Message):
    __slots__ = ("claim", "pod")
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    POD_FIELD_NUMBER: _ClassVar[int]
    claim: str
    pod: str
    def __init__(self, claim: _Optional[str] = ..., pod: _Optional[str] = ...) -> None: ...

class RunRequest(_message.Message):
    __slots__ = ("claim", "arguments", "environment")
    class EnvironmentEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    claim: str
    arguments: _containers.RepeatedScalarFieldContainer[str]
    environment: _containers.ScalarMap[str, str]
    def __init__(self, claim: _Optional[str] = ..., arguments: _Optional[_Iterable[str]] = ..., environment: _Optional[_Mapping[str, str]] = ...) -> None: ...

class RunReply(_message.Message):
    __slots__ = ("exit_code",)
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    exit_code: int
    def __init__(self, exit_code: _Optional[int] = ...) -> None: ...
