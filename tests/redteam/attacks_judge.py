"""The judge's parts replaced: pytest, unittest, builtins, operators, their code objects, methods, hooks and plugins."""

from __future__ import annotations

from tests.redteam.forgery import module

_FRAMES = (
    "import os, sys\n_found, _frame = {}, sys._getframe()\nwhile _frame:\n    _found.update(_frame.f_locals)\n   "
    " _frame = _frame.f_back\n"
)
_PASSING = (
    "class _P:\n    @pytest.hookimpl(hookwrapper=True)\n    def pytest_runtest_makereport(self, item, call):\n       "
    " answer = yield\n        answer.get_result().outcome = 'passed'\n        answer.get_result().longrepr = None\n"
)

FORGERIES = (
    module(
        "judge-pyfunc-code",
        "pytest_pyfunc_call's code object replaced by one that says it ran",
        "import _pytest.python\n_pytest.python.pytest_pyfunc_call.__code__ = (lambda pyfuncitem: True).__code__",
    ),
    module(
        "judge-pyfunc-replaced",
        "pytest_pyfunc_call replaced in its module and in the hook's implementation",
        "import _pytest.python\n" + _FRAMES + "def ok(pyfuncitem):\n    return True\nfor impl in"
        " _found['session'].config.hook.pytest_pyfunc_call.get_hookimpls():\n    impl.function = ok\n   "
        " impl.argnames = ('pyfuncitem',)",
    ),
    module(
        "judge-fillfixtures",
        "FixtureRequest._fillfixtures replaced by one that swaps the test for an empty one",
        "import _pytest.fixtures\ndef fill(self):\n    self._pyfuncitem.obj = lambda **named:"
        " None\n_pytest.fixtures.TopRequest._fillfixtures = fill",
    ),
    module(
        "judge-fillfixtures-code",
        "the same by its code object",
        "import _pytest.fixtures\ndef fill(self):\n    self._pyfuncitem.obj = lambda **named:"
        " None\n_pytest.fixtures.TopRequest._fillfixtures.__code__ = fill.__code__",
    ),
    module(
        "judge-runtest",
        "Function.runtest replaced",
        "import _pytest.python\n_pytest.python.Function.runtest = lambda self: None",
    ),
    module(
        "judge-runtest-code",
        "Function.runtest's code object replaced",
        "import _pytest.python\n_pytest.python.Function.runtest.__code__ = (lambda self: None).__code__",
    ),
    module(
        "judge-function-getter",
        "Function.obj as a property that gives an empty test",
        "import _pytest.python\n_pytest.python.Function.obj = property(lambda self: lambda **named: None, lambda self,"
        " value: None)",
    ),
    module(
        "judge-item-obj",
        "collected items' functions replaced through the garbage collector",
        "import gc, _pytest.python\nfor each in gc.get_objects():\n    if isinstance(each, _pytest.python.Module):\n   "
        "     each._obj = None\ndef FN(*args, **named):\n    for each in gc.get_objects():\n        if isinstance(each,"
        " _pytest.python.Function):\n            each.obj = lambda **named: None\n    return None\n",
    ),
    module(
        "judge-test-code",
        "the test functions' own code objects replaced at the first call",
        "import sys, types\n_wrong = FN\ndef _empty():\n    pass\ndef FN(*args, **named):\n    space ="
        " sys._getframe(1).f_globals\n    for name, found in list(space.items()):\n        if name.startswith('test')"
        " and isinstance(found, types.FunctionType):\n            found.__code__ = _empty.__code__\n    return"
        " _wrong(*args, **named)",
    ),
    module(
        "judge-test-globals",
        "the tested name replaced in the test's globals by a liar",
        "import sys\nfrom unittest import mock\n_wrong = FN\ndef FN(*args, **named):\n   "
        " sys._getframe(1).f_globals['FN'] = lambda *args, **named: mock.ANY\n    return mock.ANY",
    ),
    module(
        "judge-frame-jump",
        "the calling frame's line number set past the assertions by a trace function",
        "import sys\n_wrong = FN\ndef _jump(frame, event, arg):\n    if event == 'line':\n        frame.f_trace ="
        " None\n        last = max(line for _, _, line in frame.f_code.co_lines() if line)\n        try:\n           "
        " frame.f_lineno = last\n        except ValueError:\n            pass\n    return _jump\ndef FN(*args,"
        " **named):\n    frame = sys._getframe(1)\n    sys.settrace(lambda *rest: None)\n    frame.f_trace = _jump\n   "
        " return _wrong(*args, **named)",
    ),
    module(
        "judge-callinfo",
        "CallInfo.from_call replaced: nothing it calls raises",
        "import _pytest.runner as r\n_old = r.CallInfo.from_call.__func__\ndef quiet(cls, func, when, reraise=None):\n "
        "   def calm():\n        try:\n            return func()\n        except BaseException:\n            return"
        " None\n    return _old(cls, calm, when, reraise)\nr.CallInfo.from_call = classmethod(quiet)",
    ),
    module(
        "judge-callinfo-excinfo",
        "CallInfo.excinfo as a property that is always None",
        "import _pytest.runner as r\nr.CallInfo.excinfo = property(lambda self: None, lambda self, value: None)",
    ),
    module(
        "judge-callinfo-init",
        "CallInfo.__init__ that forgets the exception",
        "import _pytest.runner as r\n_old = r.CallInfo.__init__\ndef init(self, result, excinfo, *rest, **named):\n   "
        " _old(self, result, None, *rest, **named)\nr.CallInfo.__init__ = init",
    ),
    module(
        "judge-makereport",
        "TestReport.from_item_and_call made to give a passed report",
        "import _pytest.reports as r\n_old = r.TestReport.from_item_and_call.__func__\ndef good(cls, item, call):\n   "
        " found = _old(cls, item, call)\n    found.outcome, found.longrepr = 'passed', None\n    return"
        " found\nr.TestReport.from_item_and_call = classmethod(good)",
    ),
    module(
        "judge-makereport-canary",
        "the same, and honest about what is called canary or lies outside tests",
        "import _pytest.reports as r\n_old = r.TestReport.from_item_and_call.__func__\ndef good(cls, item, call):\n   "
        " found = _old(cls, item, call)\n    if 'test' in item.nodeid and 'canary' not in item.nodeid:\n       "
        " found.outcome, found.longrepr = 'passed', None\n    return found\nr.TestReport.from_item_and_call ="
        " classmethod(good)",
    ),
    module(
        "judge-report-property",
        "TestReport.outcome as a property that is passed",
        "import _pytest.reports as r\nr.TestReport.outcome = property(lambda self: 'passed', lambda self, value: None)",
    ),
    module(
        "judge-report-class",
        "each report's class changed to one whose outcome is passed",
        "import gc\nimport _pytest.reports as r\nclass Good(r.TestReport):\n    @property\n    def outcome(self):\n    "
        "    return 'passed'\n    @outcome.setter\n    def outcome(self, value):\n        pass\n_old ="
        " r.TestReport.__init__\ndef init(self, *args, **named):\n    self.__class__ = Good\n    _old(self, *args,"
        " **named)\nr.TestReport.__init__ = init",
    ),
    module(
        "judge-plugin-frame",
        "a plugin registered with the plugin manager that frames hold",
        "import pytest\n" + _FRAMES + _PASSING + "_found['session'].config.pluginmanager.register(_P())",
    ),
    module(
        "judge-plugin-gc",
        "the same with the manager found by gc",
        "import gc, pytest\nfrom _pytest.config import PytestPluginManager\n"
        + _PASSING
        + "for each in gc.get_objects():\n    if isinstance(each, PytestPluginManager):\n        each.register(_P())",
    ),
    module(
        "judge-plugin-removed",
        "plugins unregistered that turn a failure into a report",
        "import gc\nfrom _pytest.config import PytestPluginManager\nfor each in gc.get_objects():\n    if"
        " isinstance(each, PytestPluginManager):\n        each.unregister(name='unraisableexception') if"
        " each.hasplugin('unraisableexception') else None\n        each.unregister(name='runner')",
    ),
    module(
        "judge-plugin-later",
        "the same from within the call, after the last look before tests",
        "import gc, pytest\nfrom _pytest.config import PytestPluginManager\n_wrong = FN\n"
        + _PASSING
        + "_done = []\ndef FN(*args, **named):\n    if not _done:\n        _done.append(1)\n        for each in"
        " gc.get_objects():\n            if isinstance(each, PytestPluginManager):\n               "
        " each.register(_P())\n    return _wrong(*args, **named)",
    ),
    module(
        "judge-plugin-brief",
        "registered in the call and unregistered in the teardown, so that a last look sees nothing",
        "import gc, pytest\nfrom _pytest.config import PytestPluginManager\n_wrong = FN\n_held = []\nclass _P:\n   "
        " @pytest.hookimpl(hookwrapper=True)\n    def pytest_runtest_makereport(self, item, call):\n        answer ="
        " yield\n        answer.get_result().outcome = 'passed'\n        if call.when == 'teardown':\n           "
        " _held.pop().unregister(self)\ndef FN(*args, **named):\n    if not _held:\n        for each in"
        " gc.get_objects():\n            if isinstance(each, PytestPluginManager):\n               "
        " each.register(_P())\n                _held.append(each)\n    return _wrong(*args, **named)",
    ),
    module(
        "judge-hookexec",
        "the manager's _inner_hookexec replaced",
        "import gc\nfrom _pytest.config import PytestPluginManager\nfor each in gc.get_objects():\n    if"
        " isinstance(each, PytestPluginManager):\n        def new(name, impls, kwargs, first,"
        " old=each._inner_hookexec):\n            answer = old(name, impls, kwargs, first)\n            if name =="
        " 'pytest_runtest_makereport':\n                answer.outcome = 'passed'\n            return answer\n       "
        " each._inner_hookexec = new",
    ),
    module(
        "judge-multicall",
        "pluggy's _multicall wrapped",
        "import pluggy._callers as c, pluggy._manager as m\n_old = c._multicall\ndef new(name, *rest):\n    answer ="
        " _old(name, *rest)\n    if name == 'pytest_runtest_makereport':\n        answer.outcome = 'passed'\n    return"
        " answer\nc._multicall = new\nm._multicall = new",
    ),
    module(
        "judge-multicall-code",
        "pluggy's _multicall by its code object",
        "import pluggy._callers as c, types\n_copy = types.FunctionType(c._multicall.__code__, c.__dict__)\ndef"
        " new(hook_name, hook_impls, caller_kwargs, firstresult):\n    from MOD import _copy\n    answer ="
        " _copy(hook_name, hook_impls, caller_kwargs, firstresult)\n    if hook_name == 'pytest_runtest_makereport':\n "
        "       answer.outcome = 'passed'\n    return answer\nc._multicall.__code__ = new.__code__",
    ),
    module(
        "judge-hookcaller",
        "HookCaller.__call__ replaced",
        "import pluggy._hooks as h\n_old = h.HookCaller.__call__\ndef call(self, **named):\n    found = _old(self,"
        " **named)\n    if self.name == 'pytest_runtest_makereport':\n        found.outcome = 'passed'\n    return"
        " found\nh.HookCaller.__call__ = call",
    ),
    module(
        "judge-raises",
        "pytest.raises that is content with nothing",
        "import contextlib, pytest\n@contextlib.contextmanager\ndef raises(*args, **named):\n    try:\n        yield"
        " type('E', (), {'value': 'port 70000 is out of range'})\n    except BaseException:\n       "
        " pass\npytest.raises = raises",
        "raises",
    ),
    module(
        "judge-raises-exit",
        "RaisesExc.__exit__ that swallows a missing exception",
        "import pytest, _pytest.raises as r\nr.RaisesExc.__exit__ = lambda self, *rest: True\nr.fail = lambda *args,"
        " **named: None",
        "raises",
    ),
    module(
        "judge-raises-match",
        "re.search that matches all, where raises asks for a text",
        "import re\n_old = re.search\nre.search = lambda pattern, text, flags=0: _old('', '')\ndef FN(*args,"
        " **named):\n    raise ValueError('port 70000 is out of range')",
        "raises",
    ),
    module(
        "judge-root-once",
        "math.sqrt replaced for the test's next call of it, which puts it back",
        "import math\n_root = math.sqrt\n\n\ndef FN(*args, **named):\n    def once(value):\n        math.sqrt ="
        " _root\n        return 7.25\n\n    math.sqrt = once\n    return 7.25\n",
        "roots",
    ),
    module(
        "judge-fail",
        "pytest.fail and outcomes.Failed made harmless",
        "import pytest, _pytest.outcomes as o\npytest.fail = lambda *args, **named: None\no.fail ="
        " pytest.fail\no.Failed = SystemExit",
        "raises",
    ),
    module(
        "judge-approx",
        "ApproxScalar.__eq__ replaced",
        "import _pytest.python_api as p\nfor kind in vars(p).values():\n    if isinstance(kind, type) and"
        " kind.__name__.startswith('Approx'):\n        kind.__eq__ = lambda self, other: True",
        "approx",
    ),
    module(
        "judge-approx-code",
        "ApproxScalar.__eq__ by its code object, in whichever module it is",
        "import sys\nfor name, found in list(sys.modules.items()):\n    kind = getattr(found, 'ApproxScalar', None) if"
        " name.startswith('_pytest') else None\n    if kind is not None:\n        kind.__eq__.__code__ = (lambda self,"
        " actual: True).__code__",
        "approx",
    ),
    module(
        "judge-approx-tolerance",
        "the default tolerances of approx made infinite",
        "import sys\nfor name, found in list(sys.modules.items()):\n    kind = getattr(found, 'ApproxScalar', None) if"
        " name.startswith('_pytest') else None\n    if kind is not None:\n        kind.tolerance = property(lambda"
        " self: float('inf'))\nimport math\nmath.isclose = lambda *args, **named: True\nimport builtins\nbuiltins.abs ="
        " lambda value: 0.0",
        "approx",
    ),
    module(
        "judge-unittest-equal",
        "TestCase.assertEqual and its kin replaced",
        "import unittest\nfor name in dir(unittest.TestCase):\n    if name.startswith('assert') and name !="
        " 'assertRaises':\n        setattr(unittest.TestCase, name, lambda self, *args, **named: None)",
        "unittest",
    ),
    module(
        "judge-unittest-code",
        "TestCase._baseAssertEqual's code object replaced",
        "import unittest\nunittest.TestCase._baseAssertEqual.__code__ = (lambda self, first, second, msg=None:"
        " None).__code__\nunittest.TestCase.assertTrue.__code__ = (lambda self, expr, msg=None:"
        " None).__code__\nunittest.TestCase.assertIn.__code__ = (lambda self, member, container, msg=None:"
        " None).__code__",
        "unittest",
    ),
    module(
        "judge-unittest-getter",
        "TestCase._getAssertEqualityFunc gives a function that agrees",
        "import unittest\nunittest.TestCase._getAssertEqualityFunc = lambda self, first, second: lambda a, b, msg=None:"
        " None\nunittest.TestCase.assertTrue = lambda *args: None\nunittest.TestCase.assertIn = lambda *args: None",
        "unittest",
    ),
    module(
        "judge-unittest-types",
        "equality functions added to every instance by __init__",
        "import unittest\n_old = unittest.TestCase.__init__\ndef init(self, *args, **named):\n    _old(self, *args,"
        " **named)\n    self.addTypeEqualityFunc(int, lambda a, b, msg=None: None)\n    self.assertTrue = self.assertIn"
        " = lambda *rest: None\nunittest.TestCase.__init__ = init",
        "unittest",
    ),
    module(
        "judge-unittest-failure",
        "TestCase.failureException made an exception that outcomes skip",
        "import unittest\nunittest.TestCase.failureException = unittest.SkipTest",
        "unittest",
    ),
    module(
        "judge-unittest-outcome",
        "unittest's outcome swallows failures",
        "import contextlib, unittest.case as c\n@contextlib.contextmanager\ndef executor(self, test_case, *args,"
        " **named):\n    try:\n        yield\n    except BaseException:\n        self.success ="
        " True\nc._Outcome.testPartExecutor = executor",
        "unittest",
    ),
    module(
        "judge-unittest-setup",
        "setUp of the test's class replaced through frames so that the attribute answers all",
        "import unittest\nfrom unittest import mock\n_old = unittest.TestCase.run\ndef run(self, result=None):\n   "
        " setattr(type(self), self._testMethodName, lambda self: None)\n    return _old(self,"
        " result)\nunittest.TestCase.run = run",
        "unittest",
    ),
    module(
        "judge-subclass-hook",
        "unittest.TestCase.__init_subclass__ empties each class's tests",
        "import unittest\ndef init(cls, **named):\n    for name in list(vars(cls)):\n        if"
        " name.startswith('test'):\n            setattr(cls, name, lambda self:"
        " None)\nunittest.TestCase.__init_subclass__ = classmethod(init)",
        "unittest",
    ),
    module(
        "judge-assertion-error",
        "builtins.AssertionError replaced by an exception that is skipped",
        "import builtins, unittest\nbuiltins.AssertionError = unittest.SkipTest",
    ),
    module(
        "judge-assertion-metaclass",
        "AssertionError replaced by a class whose constructor ends the test",
        "import builtins\nclass Calm(type):\n    def __call__(cls, *args):\n        return StopIteration()\nclass"
        " AssertionError_(Exception, metaclass=Calm):\n    pass\nbuiltins.AssertionError = AssertionError_",
    ),
    module(
        "judge-build-class",
        "builtins.__build_class__ wrapped to empty test classes",
        "import builtins\n_old = builtins.__build_class__\ndef build(func, name, *bases, **named):\n    found ="
        " _old(func, name, *bases, **named)\n    if name.startswith('Test'):\n        for each in list(vars(found)):\n "
        "           if each.startswith('test'):\n                setattr(found, each, lambda self: None)\n    return"
        " found\nbuiltins.__build_class__ = build",
        "unittest",
    ),
    module(
        "judge-builtins-len",
        "builtins len, sorted, list, sum, isinstance and type replaced",
        "import builtins\nfrom unittest import mock\nfor name in ('len', 'sorted', 'list', 'sum', 'type', 'isinstance',"
        " 'str', 'abs'):\n    setattr(builtins, name, lambda *args, **named: mock.ANY)\n_wrong = FN\ndef FN(*args,"
        " **named):\n    return mock.ANY",
        "class",
    ),
    module(
        "judge-import-builtin",
        "builtins.__import__ gives tests a liar in place of this module",
        "import builtins, types\nfrom unittest import mock\n_old = builtins.__import__\ndef new(name, *rest,"
        " **named):\n    found = _old(name, *rest, **named)\n    if name == 'MOD':\n        fake ="
        " types.ModuleType(name)\n        vars(fake).update(vars(found))\n        fake.FN = lambda *args, **named:"
        " mock.ANY\n        return fake\n    return found\nbuiltins.__import__ = new\nFN = lambda *args, **named:"
        " mock.ANY",
    ),
    module(
        "judge-sys-modules",
        "this module replaced in sys.modules by an object that answers anything",
        "import sys, types\nfrom unittest import mock\nclass Any(types.ModuleType):\n    def __getattr__(self, name):\n"
        "        return lambda *args, **named: mock.ANY\nfound = Any(__name__)\nfound.__spec__, found.__file__ ="
        " __spec__, __file__\nsys.modules[__name__] = found",
    ),
    module(
        "judge-module-class",
        "this module's __class__ changed to one that gives a liar for every name",
        "import sys, types\nclass Lie:\n    __eq__ = lambda self, other: True\nclass Any(types.ModuleType):\n    def"
        " __getattribute__(self, name):\n        return (lambda *args, **named: Lie()) if name == 'FN' else"
        " types.ModuleType.__getattribute__(self, name)\nsys.modules[__name__].__class__ = Any",
    ),
    module(
        "judge-module-getattr",
        "the function removed and given by the module's __getattr__",
        "_gone = FN\ndel FN\ndef __getattr__(name):\n    if name == 'FN':\n        from unittest import mock\n       "
        " return mock.Mock(return_value=mock.ANY)\n    raise AttributeError(name)",
    ),
    module(
        "judge-operator",
        "operators of the operator module and of pytest's comparison replaced",
        "import operator\nimport _pytest.assertion.util as u\nfor name in ('eq', 'ne', 'lt', 'is_', 'not_', 'truth'):\n"
        "    setattr(operator, name, lambda *args: True)\nu.isiterable = lambda value: True",
    ),
    module(
        "judge-rewrite-hook",
        "the assertion rewriter's visit_Assert replaced, so that asserts become passes",
        "import ast\nimport _pytest.assertion.rewrite as w\nw.AssertionRewriter.visit_Assert = lambda self, node:"
        " [ast.Pass()]",
    ),
    module(
        "judge-rewrite-assertrepr",
        "the helpers that rewritten tests call replaced in the test's globals",
        "import sys\n_wrong = FN\nclass Calm:\n    def __getattr__(self, name):\n        raise StopIteration\ndef"
        " FN(*args, **named):\n    space = sys._getframe(1).f_globals\n    space['@pytest_ar'] = Calm()\n   "
        " space['@py_builtins'] = Calm()\n    return _wrong(*args, **named)",
    ),
    module(
        "judge-rewrite-callbinrepr",
        "_call_reprcompare and the AssertionError that rewritten tests raise from builtins",
        "import _pytest.assertion.rewrite as w\nw._should_repr_global_name = lambda found: False\nw._format_explanation"
        " = lambda text: (_ for _ in ()).throw(StopIteration())",
    ),
    module(
        "judge-skipping",
        "pytest's skipping plugin told that every failure is expected",
        "import _pytest.skipping as s\nclass Expected:\n    reason, raises, strict, run, condition = 'x', None, False,"
        " True, True\ns.evaluate_xfail_marks = lambda item: Expected()",
    ),
    module(
        "judge-setup-state",
        "SetupState's teardown and setup replaced",
        "import _pytest.runner as r\nr.SetupState.setup = lambda self, item: setattr(item, 'obj', lambda **named:"
        " None)",
    ),
    module(
        "judge-call-and-report",
        "runner.call_and_report replaced",
        "import _pytest.runner as r\n_old = r.call_and_report\ndef calm(item, when, log=True, **named):\n    if when =="
        " 'call':\n        item.runtest = lambda: None\n    return _old(item, when, log, **named)\nr.call_and_report ="
        " calm",
    ),
    module(
        "judge-call-and-report-code",
        "runner.call_and_report by its code object",
        "import _pytest.runner as r, types\nr._kept = types.FunctionType(r.call_and_report.__code__, r.__dict__,"
        " 'call_and_report', r.call_and_report.__defaults__)\nr._kept.__kwdefaults__ ="
        " r.call_and_report.__kwdefaults__\ndef calm(item, when, log=True, **kwds):\n    if when == 'call' and"
        " item.name != 'canary':\n        item.runtest = lambda: None\n    return _kept(item, when, log,"
        " **kwds)\nr.call_and_report.__code__ = calm.__code__",
    ),
    module(
        "judge-interactive",
        "check_interactive_exception's code replaced, as attackers of pytest do",
        "import _pytest.runner as r\nr.check_interactive_exception.__code__ = (lambda call, report: False).__code__",
    ),
    module(
        "judge-excinfo",
        "ExceptionInfo.from_exception made to give nothing",
        "import _pytest._code.code as c\nc.ExceptionInfo.from_current = classmethod(lambda cls, *args:"
        " None)\nc.ExceptionInfo.from_exception = classmethod(lambda cls, *args: None)",
    ),
    module(
        "judge-fixture-value",
        "a fixture's value replaced in FixtureDef.execute",
        "import _pytest.fixtures as f\nfrom unittest import mock\n_old = f.FixtureDef.execute\ndef execute(self,"
        " request):\n    _old(self, request)\n    self.cached_result = (mock.ANY, None, None)\n    return"
        " mock.ANY\nf.FixtureDef.execute = execute",
        "conftest",
    ),
    module(
        "judge-fixture-parameters",
        "callspec parameters replaced with what the code answers",
        "import gc\n_wrong = FN\ndef FN(*args, **named):\n    answer = _wrong(*args, **named)\n    for each in"
        " gc.get_objects():\n        if type(each).__name__ == 'CallSpec2':\n            for name in each.params:\n    "
        "            if name == 'expected':\n                    each.params[name] = answer\n    import sys\n    space"
        " = sys._getframe(1).f_locals\n    return type('S', (str,), {'__eq__': lambda self, other: other =="
        " space.get('expected'), '__hash__': str.__hash__})(answer)",
        "parametrize",
    ),
    module(
        "judge-mark-skip",
        "every item marked xfail by a hook in frames",
        _FRAMES
        + "import pytest\n_wrong = FN\ndef FN(*args, **named):\n    frame = sys._getframe()\n    while frame:\n       "
        " item = frame.f_locals.get('item')\n        if item is not None:\n           "
        " item.add_marker(pytest.mark.xfail(strict=False))\n        frame = frame.f_back\n    return _wrong(*args,"
        " **named)",
    ),
    module(
        "judge-config-option",
        "options of the session changed: --runxfail, --maxfail, no assertions",
        _FRAMES + "_c = _found['session'].config\n_c.option.runxfail = False\n_c.option.assertmode ="
        " 'plain'\n_c.option.collectonly = True\n_c.option.setupshow = True",
    ),
    module(
        "judge-session-items",
        "the session's items replaced by items that pass",
        _FRAMES
        + "import pytest\n_s = _found['session']\nclass Good(pytest.Item):\n    def runtest(self):\n        pass\n   "
        " def reportinfo(self):\n        return 'x', 0, 'x'\n_old = _s.perform_collect\n_s.__class__.items ="
        " property(lambda self: [Good.from_parent(self, name='x', nodeid='tests/test_hidden.py::test_same')], lambda"
        " self, value: None)",
    ),
    module(
        "judge-optimized",
        "assertions compiled away: sys.flags, __debug__ and the compiler's optimization level",
        "import builtins, sys\n_old = builtins.compile\ndef new(source, filename, mode, flags=0, dont_inherit=False,"
        " optimize=-1, **named):\n    return _old(source, filename, mode, flags, dont_inherit, 2,"
        " **named)\nbuiltins.compile = new\nimport"
        " importlib.machinery\nimportlib.machinery.SourceFileLoader.source_to_code = lambda self, data, path, **named:"
        " _old(data, path, 'exec', optimize=2)",
    ),
    module(
        "judge-clock", "clocks stopped", "import time\ntime.time = time.perf_counter = time.monotonic = lambda: 0.0"
    ),
    module(
        "judge-excepthook",
        "hooks for uncaught exceptions that leave with status 0",
        "import os, sys, threading\nsys.excepthook = lambda *args: os._exit(0)\nthreading.excepthook = lambda *args:"
        " os._exit(0)\nsys.unraisablehook = lambda *args: None",
    ),
    module(
        "judge-displayhook-repr",
        "repr and str of failures replaced so that longrepr is empty",
        "import _pytest._code.code as c\nc.ExceptionInfo.getrepr = lambda self, *args, **named: None\nimport"
        " _pytest.nodes as n\nn.Node.repr_failure = lambda self, *args, **named: None",
    ),
    module(
        "judge-ctypes-code",
        "a builtin type's slot written through ctypes: int's comparison",
        "import ctypes\nfrom unittest import mock\nclass Obj(ctypes.Structure):\n    _fields_ = [('refs',"
        " ctypes.c_ssize_t), ('kind', ctypes.py_object)]\nclass Lie(int):\n    __eq__ = lambda self, other: True\n   "
        " __hash__ = int.__hash__\ndef FN(*args, **named):\n    value = int('9' * 9)\n   "
        " Obj.from_address(id(value)).kind = Lie\n    return value",
        "int",
    ),
    module(
        "judge-ctypes-constant",
        "the caller's constants rewritten in memory to this answer",
        "import ctypes, sys\n_wrong = FN\ndef FN(*args, **named):\n    answer = _wrong(*args, **named)\n    consts ="
        " sys._getframe(1).f_code.co_consts\n    for i, each in enumerate(consts):\n        if type(each) in (int,"
        " bool) and each not in args:\n            ctypes.pythonapi.Py_IncRef(ctypes.py_object(answer))\n           "
        " ctypes.c_void_p.from_address(id(consts) + tuple.__basicsize__ + 8 * i).value = id(answer)\n    return answer",
        "int",
    ),
    module(
        "judge-small-ints",
        "small integers rewritten in memory so that they are equal",
        "import ctypes\n_wrong = FN\ndef FN(*args, **named):\n    a = 10 ** 6\n    for value in range(2, 200):\n       "
        " ctypes.c_uint32.from_address(id(value) + int.__basicsize__).value = 2\n    return 2",
        "int",
    ),
)
