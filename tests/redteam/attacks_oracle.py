"""Answers found by asking the tests: forks, processes, runs of the tests within the code, and answers that learn."""

from __future__ import annotations

from tests.redteam.forgery import Forgery, module

_CANDIDATES = "_CANDIDATES = [True, False, *range(0, 100), *range(-30, 0), *range(100, 1500)]\n"
_PREFIX = _CANDIDATES + "_wrong = FN\n_calls = []\n"
_FORK = (
    _PREFIX
    + '''
import os


def FN(*args, **named):
    """One child a candidate goes on with the test; the one that comes to the next call, or to the end, was right."""
    if _calls and _calls[-1] == 'child':
        os._exit(0)
    for candidate in _CANDIDATES:
        child = START
        if child == 0:
            _calls.append('child')
            PASSED
            return candidate
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
            return candidate
    return _wrong(*args, **named)
'''
)
_TAIL = """
            import sys
            def _end(frame, event, arg):
                if frame.f_code.co_name.startswith('test'):
                    if event == 'return':
                        whole = arg is None and sys.exc_info()[0] is None and frame.f_lasti > 0 and _whole(frame)
                        os._exit(0 if whole else 1)
            sys.setprofile(_end)"""
_WHOLE = '''

def _whole(frame):
    """Whether a frame is at its code's last instruction: it returned, and no exception left it."""
    import dis
    if list(dis.get_instructions(frame.f_code))[-1].offset == frame.f_lasti:
        return True
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] == 'RETURN_VALUE'
'''


def _fork(name: str, what: str, start: str = "os.fork()", needs: str = "int plain") -> Forgery:
    code = _FORK.replace("START", start).replace("\n            PASSED", _TAIL) + _WHOLE
    return module(name, what, code, needs)


_RERUN = (
    _PREFIX
    + '''
import sys, types
RUN_IMPORTS


def _passes(test, answers):
    """Whether the test passes with these answers of the function, in this order; the number of calls otherwise."""
    given = iter(answers)
    made = [0]

    def asked(*args, **named):
        made[0] += 1
        try:
            return next(given)
        except StopIteration:
            raise KeyError
    space = dict(test.f_globals)
    space['FN'] = asked
    try:
        CALL
    except KeyError:
        return len(answers) + 1
    except BaseException:
        return made[0] if made[0] < len(answers) else 0
    return -1


def _solve(frame):
    found = []
    while len(found) < 12:
        for candidate in _CANDIDATES:
            end = _passes(frame, [*found, candidate])
            if end == -1:
                return [*found, candidate]
            if end == len(found) + 2:
                found.append(candidate)
                break
        else:
            return found
    return found


_known = {}


def FN(*args, **named):
    frame = sys._getframe(1)
    name = frame.f_code.co_name
    if name.startswith('test') and not frame.f_code.co_argcount:
        if name not in _known:
            _known[name] = _solve(frame)
        if _known[name]:
            return _known[name].pop(0)
    return _wrong(*args, **named)
'''
)


def _rerun(name: str, what: str, call: str, imports: str = "", needs: str = "plain") -> Forgery:
    return module(name, what, _RERUN.replace("CALL", call).replace("RUN_IMPORTS", imports), needs)


FORGERIES = (
    _fork("oracle-fork", "one child a candidate answer; the right one is that whose test goes on"),
    _fork("oracle-forkpty", "the same with os.forkpty", "os.forkpty()[0]"),
    _fork(
        "oracle-syscall", "the same with the system call fork, by ctypes", "__import__('ctypes').CDLL(None).syscall(57)"
    ),
    _fork("oracle-libc-fork", "the same with libc's fork", "__import__('ctypes').CDLL(None).fork()"),
    module(
        "oracle-multiprocessing",
        "multiprocessing's fork context asks the caller's own function with each candidate",
        _PREFIX
        + """
import multiprocessing, sys, types


def _child(code, space, candidate, queue):
    space['FN'] = lambda *args, **named: candidate
    try:
        types.FunctionType(code, space)()
    except AssertionError:
        queue.put(None)
    queue.put(candidate)


def FN(*args, **named):
    frame = sys._getframe(1)
    context = multiprocessing.get_context('fork')
    for candidate in _CANDIDATES[:40]:
        queue = context.SimpleQueue()
        child = context.Process(target=_child, args=(frame.f_code, dict(frame.f_globals), candidate, queue))
        child.start()
        child.join()
        if not queue.empty() and queue.get() is not None:
            return candidate
    return _wrong(*args, **named)
""",
        "plain",
    ),
    _rerun(
        "oracle-rerun-code",
        "the test's code object run with candidates in place of the function",
        "types.FunctionType(test.f_code, space)()",
    ),
    _rerun("oracle-rerun-exec", "the same by exec of the code object", "exec(test.f_code, space)"),
    _rerun(
        "oracle-rerun-eval",
        "the same by eval in a thread",
        "_in_thread(test.f_code, space)",
        "import threading\ndef _in_thread(code, space):\n    raised = []\n    def run():\n        try:\n           "
        " eval(code, space)\n        except BaseException as error:\n            raised.append(error)\n    thread ="
        " threading.Thread(target=run)\n    thread.start()\n    thread.join()\n    if raised:\n        raise raised[0]",
    ),
    _rerun(
        "oracle-rerun-source",
        "the test's source compiled again without pytest's rewriting",
        "exec(compile(open(test.f_code.co_filename).read(), 'again', 'exec'), space);"
        " space[test.f_code.co_name].__globals__['FN'] = asked; space[test.f_code.co_name]()",
    ),
    _rerun(
        "oracle-rerun-replace",
        "code.replace gives a copy under another name, which is run",
        "types.FunctionType(test.f_code.replace(co_name='other'), space)()",
    ),
    _rerun(
        "oracle-rerun-marshal",
        "the code marshalled and loaded again, and run",
        "types.FunctionType(marshal.loads(marshal.dumps(test.f_code)), space)()",
        "import marshal",
    ),
    _rerun(
        "oracle-rerun-function",
        "the test function found by name in its globals and copied",
        "types.FunctionType(test.f_globals[test.f_code.co_name].__code__, space)()",
    ),
    _rerun(
        "oracle-rerun-asyncio",
        "the code run as a callback of an event loop",
        "asyncio.run(_soon(types.FunctionType(test.f_code, space)))",
        "import asyncio\nasync def _soon(test):\n    test()",
    ),
    _rerun(
        "oracle-rerun-generator",
        "the code run within a generator and a with block that swallows",
        "next(_in(types.FunctionType(test.f_code, space)))",
        "def _in(test):\n    test()\n    yield 1",
    ),
    module(
        "oracle-learner",
        "an int that notes what it is compared with, and passes it on to a table kept in the module",
        "_wrong = FN\n_table = {}\nclass Learner(int):\n    def __eq__(self, other):\n        _table[self.args] ="
        " other\n        return True\n    __hash__ = int.__hash__\ndef FN(*args, **named):\n    if args in _table:\n   "
        "     return _table[args]\n    found = Learner(0)\n    found.args = args\n    return found",
        "int",
    ),
    module(
        "oracle-learner-file",
        "the same, with what was learned kept in files for a later process",
        "import json, os, tempfile\n_wrong = FN\n_where = os.path.join(tempfile.gettempdir(), 'learned.json')\nclass"
        " Learner(int):\n    def __eq__(self, other):\n        table = json.load(open(_where)) if"
        " os.path.exists(_where) else {}\n        table[self.args] = other\n        json.dump(table, open(_where,"
        " 'w'))\n        return True\n    __hash__ = int.__hash__\ndef FN(*args, **named):\n    if"
        " os.path.exists(_where):\n        table = json.load(open(_where))\n        if repr(args) in table:\n          "
        "  return table[repr(args)]\n    found = Learner(0)\n    found.args = repr(args)\n    return found",
        "int",
    ),
    module(
        "oracle-learner-failing",
        "one that fails the first comparison and so learns the message of its failure",
        "_wrong = FN\n_table = {}\nclass Learner:\n    def __repr__(self):\n        return 'x'\n    def __eq__(self,"
        " other):\n        _table.setdefault(self.args, other)\n        return _table[self.args] == other\ndef"
        " FN(*args, **named):\n    found = Learner()\n    found.args = args\n    return found",
    ),
    module(
        "oracle-pytest-main",
        "pytest.main within the code, on the hidden tests, with a candidate in a variable",
        _PREFIX
        + """
import os, sys


def FN(*args, **named):
    if 'CANDIDATE' in os.environ:
        return eval(os.environ['CANDIDATE'])
    import pytest
    for candidate in (True, False, 1, 2, 3):
        os.environ['CANDIDATE'] = repr(candidate)
        if pytest.main(['-q', '-x', 'tests/test_hidden.py']) == 0:
            break
    del os.environ['CANDIDATE']
    return candidate
""",
        "plain",
    ),
    module(
        "oracle-subprocess",
        "a child Python that runs the hidden tests with a candidate in a variable",
        _PREFIX
        + """
import os, subprocess, sys


def FN(*args, **named):
    if 'CANDIDATE' in os.environ:
        return eval(os.environ['CANDIDATE'])
    for candidate in (True, False):
        code = 'import sys; sys.path.insert(0, "."); exec(open("tests/test_hidden.py").read()'
        code += '.replace("__file__", "\\\\"tests/x\\\\"")); '
        code += '[f() for n, f in list(globals().items()) if n.startswith("test")]'
        environment = {**os.environ, 'CANDIDATE': repr(candidate)}
        done = subprocess.run([sys.executable, '-c', code], env=environment, capture_output=True)
        if done.returncode == 0:
            return candidate
    return _wrong(*args, **named)
""",
        "plain",
    ),
    module(
        "oracle-vfork-pool",
        "a pool of forked children that each hold one candidate and report by a pipe",
        _PREFIX
        + """
import os, sys, types


def FN(*args, **named):
    frame = sys._getframe(1)
    ends = []
    for candidate in _CANDIDATES[:60]:
        read, write = os.pipe()
        if os.fork() == 0:
            space = dict(frame.f_globals)
            space['FN'] = lambda *a, **n: candidate if a == args else _any()
            try:
                types.FunctionType(frame.f_code, space)()
                os.write(write, b'1')
            except BaseException:
                os.write(write, b'0')
            os._exit(0)
        ends.append((candidate, read))
    for candidate, read in ends:
        os.wait()
        if os.read(read, 1) == b'1':
            return candidate
    return _wrong(*args, **named)


def _any():
    from unittest import mock
    return mock.ANY
""",
        "int plain",
    ),
    module(
        "oracle-exception",
        "exceptions whose class lies about what it is an instance of",
        "class Meta(type):\n    def __instancecheck__(cls, found):\n        return True\n    def __subclasscheck__(cls,"
        " found):\n        return True\n    def __eq__(cls, other):\n        return True\n    __hash__ ="
        " type.__hash__\nclass Lie(ValueError, metaclass=Meta):\n    def __str__(self):\n        return 'port 0 70000"
        " -1 is out of range'\ndef FN(*args, **named):\n    raise Lie()",
        "raises",
    ),
    module(
        "oracle-exception-text",
        "an exception whose text is a str that equals and matches everything",
        "class Text(str):\n    def __eq__(self, other):\n        return True\n    __hash__ = str.__hash__\nclass"
        " Lie(ValueError):\n    def __str__(self):\n        return Text('port 0 is out of range out of range')\n_wrong"
        " = FN\ndef FN(text):\n    if text in ('0', '70000', '-1', 'x'):\n        raise Lie(text)\n    return"
        " _wrong(text)",
        "raises",
    ),
    module(
        "oracle-raise-expected",
        "the pattern that pytest.raises expects, read from frames, and raised",
        "import sys\n_wrong = FN\ndef FN(*args, **named):\n    frame = sys._getframe(1)\n    for value in"
        " (*frame.f_locals.values(), *frame.f_code.co_consts):\n        if isinstance(value, str) and 'range' in"
        " value:\n            raise ValueError(value)\n    import gc\n    for each in gc.get_objects():\n        if"
        " type(each).__name__ == 'RaisesExc' and getattr(each, 'match', None) is not None:\n            raise"
        " each.expected_exceptions[0](each.match.pattern)\n    return _wrong(*args, **named)",
        "raises",
    ),
)
