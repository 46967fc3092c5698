"""Detect code under test that replaces clocks, builtins, parts of pytest or unittest, or the tracing hooks.

The watched objects are looked up once, before any code of a task is imported, and compared by identity.
"""

from __future__ import annotations

import builtins
import datetime
import importlib
import os
import sys
import time
import types
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from envd.sandbox.origin import Origin

_BUILTINS = (
    "AssertionError",
    "Exception",
    "BaseException",
    "abs",
    "all",
    "any",
    "ascii",
    "bin",
    "bool",
    "bytearray",
    "bytes",
    "chr",
    "complex",
    "dict",
    "divmod",
    "float",
    "format",
    "frozenset",
    "getattr",
    "hasattr",
    "hash",
    "hex",
    "id",
    "int",
    "isinstance",
    "issubclass",
    "iter",
    "len",
    "list",
    "max",
    "min",
    "next",
    "object",
    "oct",
    "ord",
    "pow",
    "range",
    "repr",
    "reversed",
    "round",
    "set",
    "slice",
    "sorted",
    "str",
    "sum",
    "tuple",
    "type",
    "zip",
    "enumerate",
    "map",
    "filter",
    "__build_class__",
)
_CLOCKS = (
    "time",
    "time_ns",
    "monotonic",
    "monotonic_ns",
    "perf_counter",
    "perf_counter_ns",
    "process_time",
    "process_time_ns",
    "thread_time",
    "clock_gettime",
)
_MODULES = (
    "builtins",
    "datetime",
    "json",
    "math",
    "operator",
    "os",
    "pytest",
    "sys",
    "time",
    "unittest",
    "unittest.case",
    "_pytest",
    "pluggy",
)
_WHOLE = (
    "_pytest.assertion.rewrite",
    "_pytest.assertion.util",
    "_pytest.runner",
    "_pytest.runner:CallInfo",
    "_pytest.runner:SetupState",
    "_pytest.reports:TestReport",
    "_pytest.reports:BaseReport",
    "_pytest.python:Function",
    "_pytest.approx",
    "_pytest.python_api",
    "_pytest.raises",
    "_pytest.skipping",
    "_pytest.outcomes",
    "_pytest.unittest:TestCaseFunction",
    "_pytest._code.code:ExceptionInfo",
    "_pytest.main:Session",
    "pluggy._hooks:HookCaller",
    "pluggy._hooks:HookImpl",
    "pluggy._callers",
    "pluggy._manager:PluginManager",
    "unittest:TestCase",
    "unittest.case:_Outcome",
    "unittest.case:_AssertRaisesContext",
    "operator",
    "json",
    # tests compute expected values with them
    "copy",
    "functools",
    "hashlib",
    "itertools",
    "math",
    "re",
    "string",
    "envd.sandbox.equality",
    "envd.sandbox.origin:Origin",
)
"""Modules and classes (module:class) whose callables are all watched. Those that this pytest lacks are skipped."""
_SOME: tuple[tuple[Any, Iterable[str]], ...] = (
    (builtins, _BUILTINS),
    (time, _CLOCKS),
    (datetime, ("datetime", "date")),
    (pytest, ("raises", "fail", "skip", "approx", "fixture", "warns", "exit", "Item", "Function")),
    (os, ("write", "getpid", "_exit")),
    (sys, ("settrace", "setprofile", "exit")),
)
Seen = tuple[str, Any, str, Any, Any]
"""Name, owner, attribute, value, and code of a function."""


def _look() -> Iterator[Seen]:
    wanted = [*_SOME, *((owner, _callables(owner)) for place in _WHOLE if (owner := _find(place)) is not None)]
    for owner, names in wanted:
        for name in names:
            value = vars(owner)[name]
            label = f"{getattr(owner, '__qualname__', owner.__name__).removeprefix('_pytest.')}.{name}"
            yield label, owner, name, value, getattr(value, "__code__", None)


def _find(place: str) -> Any:
    module, _, name = place.partition(":")
    try:
        found = importlib.import_module(module)
    except ImportError:
        return None
    return getattr(found, name, None) if name else found


def _callables(owner: Any) -> list[str]:
    kinds = (types.FunctionType, types.BuiltinFunctionType, classmethod, staticmethod, property, type)
    return [name for name, value in vars(owner).items() if isinstance(value, kinds)]


class Watch:
    """Snapshot of the watched objects from before any code of a task runs."""

    def __init__(self) -> None:
        self._seen = list(_look())
        self._modules = {name: sys.modules[name] for name in _MODULES}

    def changes(self, origin: Origin, *, tests_ran: bool) -> list[str]:
        """Names of watched objects that other code than the task's own replaced.

        tests_ran: a replacement from a package, such as a mock or a frozen clock, does not count, since the task's
        tests may have left it behind.
        """
        found = []
        for label, owner, name, value, code in self._seen:
            now = owner.__dict__.get(name)
            if now is value and (code is None or value.__code__ is code):
                continue
            if not (origin.vouched(now) or (tests_ran and now is not value and origin.systems(now))):
                found.append(f"patched:{label}")
        found += [f"patched:{name}" for name, module in self._modules.items() if sys.modules.get(name) is not module]
        for label, hook in (("sys.settrace", sys.gettrace()), ("sys.setprofile", sys.getprofile())):
            if hook is not None and not origin.vouched(hook) and not origin.systems(hook):
                found.append(f"hooked:{label}")
        return found


def strange_plugins(plugins: Iterable[Any], known: Iterable[Any], origin: Origin) -> list[str]:
    """`["hooked:pytest"]` if a plugin outside `known` is the final state's, else an empty list."""
    before = {id(each) for each in known}
    fresh = [each for each in plugins if id(each) not in before]
    return ["hooked:pytest"] if any(not (origin.vouched(each) or origin.systems(each)) for each in fresh) else []
