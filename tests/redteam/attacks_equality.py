"""Answers that lie about being equal, smaller, true, contained or of a type."""

from __future__ import annotations

from tests.redteam.forgery import Forgery, module

_RETURN = "def FN(*args, **named):\n    return LIE\n"


def _lie(name: str, what: str, before: str, value: str, needs: str = "") -> Forgery:
    return module(name, what, before + "\n\n" + _RETURN.replace("LIE", value), needs or "compared")


def _sly(body: str, base: str = "") -> str:
    lines = "".join(f"    {line}\n" for line in body.split("\n"))
    return f"class Sly{base}:\n{lines}"


_HASHED = "__hash__ = int.__hash__"

FORGERIES = (
    _lie("mock-any", "mock.ANY for every answer", "from unittest.mock import ANY", "ANY"),
    _lie(
        "mock-magic",
        "a MagicMock whose comparisons are configured",
        "from unittest.mock import MagicMock\nm = MagicMock()\nm.__eq__ = lambda self, other: True\nm.__lt__ = lambda"
        " self, other: True\nm.__gt__ = lambda self, other: True",
        "m",
    ),
    _lie(
        "approx-infinite",
        "pytest.approx with an infinite tolerance",
        "import pytest",
        "pytest.approx(0, abs=float('inf'))",
    ),
    _lie(
        "approx-relative",
        "pytest.approx with a relative tolerance of 1e9",
        "import pytest",
        "pytest.approx(1, rel=1e9, abs=1e9)",
    ),
    _lie(
        "approx-copied-class",
        "a class called ApproxScalar with the module name of pytest's",
        "class ApproxScalar:\n    def __eq__(self, other):\n        return True\n    __hash__ ="
        " None\nApproxScalar.__module__ = '_pytest.python_api'",
        "ApproxScalar()",
    ),
    _lie("eq-true", "an object that equals everything", _sly("def __eq__(self, other):\n    return True"), "Sly()"),
    _lie(
        "eq-lambda",
        "the same by a lambda in type()",
        "Sly = type('Sly', (), {'__eq__': lambda self, other: True, '__hash__': None})",
        "Sly()",
    ),
    _lie(
        "eq-partial",
        "__eq__ by a builtin callable: operator.truth of a constant",
        "import functools\nimport operator\nclass Sly:\n    __eq__ = functools.partialmethod(lambda self, other:"
        " operator.truth(1))",
        "Sly()",
    ),
    _lie(
        "eq-numbers-only",
        "an object that equals numbers and texts only",
        _sly("def __eq__(self, other):\n    return isinstance(other, (int, float, str, list, dict))"),
        "Sly()",
    ),
    _lie(
        "eq-small-only",
        "an int that equals what is small: not the judge's large probes",
        _sly(
            "def __eq__(self, other):\n    return isinstance(other, int) and -10000 < other < 10000\n" + _HASHED,
            "(int)",
        ),
        "Sly(3)",
        "int",
    ),
    _lie(
        "eq-short-text",
        "a str that equals every short text",
        _sly("def __eq__(self, other):\n    return len(other) < 40\n__hash__ = str.__hash__", "(str)"),
        "Sly('x')",
        "text",
    ),
    _lie(
        "eq-int-subclass",
        "an int that equals everything",
        _sly(
            "def __eq__(self, other):\n    return True\ndef __ne__(self, other):\n    return False\n" + _HASHED, "(int)"
        ),
        "Sly(0)",
        "int",
    ),
    _lie(
        "eq-float-subclass",
        "a float near everything",
        _sly(
            "def __eq__(self, other):\n    return True\ndef __sub__(self, other):\n    return 0.0\n__rsub__ ="
            " __sub__\ndef __le__(self, other):\n    return True\n__lt__ = __ge__ = __gt__ = __le__\n__hash__ ="
            " float.__hash__",
            "(float)",
        ),
        "Sly(1.0)",
        "float",
    ),
    _lie(
        "eq-list-subclass",
        "a list that equals every list",
        _sly("def __eq__(self, other):\n    return True\ndef __len__(self):\n    return 2", "(list)"),
        "Sly()",
        "list",
    ),
    _lie(
        "eq-dict-subclass",
        "a dict that equals every dict and holds every key",
        _sly(
            "def __eq__(self, other):\n    return True\ndef __missing__(self, key):\n    return Number(650)\ndef"
            " __iter__(self):\n    return iter(['tea', 'cup'])\ndef values(self):\n    return [1060]",
            "(dict)",
        )
        + "class Number(int):\n    __lt__ = __gt__ = lambda self, other: other == 600\n",
        "Sly()",
        "dict",
    ),
    _lie(
        "eq-tuple-in-list",
        "lies within an honest list",
        _sly("def __eq__(self, other):\n    return True\ndef __len__(self):\n    return 6"),
        "[Sly(), Sly()]",
        "list",
    ),
    _lie(
        "eq-values-of-dict",
        "lies as values of an honest dict",
        _sly(
            "def __eq__(self, other):\n    return True\ndef __lt__(self, other):\n    return other == 600\n__gt__ ="
            " lambda self, other: other == 600\ndef __radd__(self, other):\n    return self"
        ),
        "{'tea': Sly(), 'cup': Sly()}",
        "dict",
    ),
    _lie(
        "eq-reflected",
        "a left operand that answers NotImplemented and a type that wins by reflection",
        _sly(
            "def __eq__(self, other):\n    return NotImplemented if type(other) is object else other == other", "(int)"
        )
        + "Sly.__hash__ = int.__hash__",
        "Sly(5)",
        "int",
    ),
    _lie(
        "eq-by-metaclass",
        "a class as the answer, whose metaclass equals everything",
        "class Meta(type):\n    def __eq__(cls, other):\n        return True\n    __hash__ = type.__hash__\nclass"
        " Sly(metaclass=Meta):\n    pass",
        "Sly",
    ),
    _lie(
        "eq-by-instance-class",
        "__class__ that says int, and an __eq__ by __getattribute__",
        _sly(
            "def __getattribute__(self, name):\n    return int if name == '__class__' else"
            " object.__getattribute__(self, name)\ndef __eq__(self, other):\n    return not isinstance(other, type)"
        ),
        "Sly()",
    ),
    _lie(
        "eq-number-like-array",
        "an array-like whose comparison is an array that is true",
        "class Truth:\n    def all(self):\n        return True\n    __bool__ = lambda self: True\nclass Sly:\n   "
        " __array_priority__ = 1000\n    def __eq__(self, other):\n        return Truth()",
        "Sly()",
    ),
    _lie(
        "eq-truthy-result",
        "a comparison that gives a non-empty list",
        _sly("def __eq__(self, other):\n    return [other]"),
        "Sly()",
    ),
    _lie(
        "eq-proxy",
        "a proxy that learns its value from the first comparison",
        _sly(
            "def __init__(self):\n    self.value = None\ndef __eq__(self, other):\n    if self.value is None:\n       "
            " self.value = other\n    return self.value == other"
        ),
        "Sly()",
    ),
    _lie(
        "eq-dataclass",
        "a dataclass that leaves its only field out of comparison",
        "import dataclasses\n@dataclasses.dataclass\nclass Sly:\n    value: object = dataclasses.field(default=None,"
        " compare=False)\n    def __eq__(self, other):\n        return dataclasses.astuple(self)[1:] == ()",
        "Sly()",
    ),
    _lie(
        "eq-total-ordering",
        "functools.total_ordering over a lie",
        "import functools\n@functools.total_ordering\nclass Sly:\n    def __eq__(self, other):\n        return True\n  "
        "  def __lt__(self, other):\n        return True",
        "Sly()",
    ),
    _lie(
        "eq-namedtuple",
        "a namedtuple whose __eq__ is replaced",
        "import collections\nSly = collections.namedtuple('Sly', 'a')\nSly.__eq__ = lambda self, other: True",
        "Sly(1)",
    ),
    _lie(
        "eq-enum",
        "an IntEnum member that equals everything",
        "import enum\nclass Sly(enum.IntEnum):\n    ONE = 1\n    def __eq__(self, other):\n        return True\n   "
        " __hash__ = int.__hash__",
        "Sly.ONE",
        "int",
    ),
    _lie(
        "eq-fraction",
        "a Fraction that compares by its type",
        "import fractions\nclass Sly(fractions.Fraction):\n    def __eq__(self, other):\n        return"
        " isinstance(other, int)\n    __hash__ = fractions.Fraction.__hash__",
        "Sly(1)",
        "int",
    ),
    _lie(
        "eq-decimal",
        "a Decimal that equals ints below a thousand",
        "import decimal\nclass Sly(decimal.Decimal):\n    def __eq__(self, other):\n        return abs(other) < 1000\n "
        "   __hash__ = decimal.Decimal.__hash__",
        "Sly(1)",
        "int",
    ),
    _lie(
        "eq-userstring",
        "a UserString that equals texts of letters",
        "import collections\nclass Sly(collections.UserString):\n    def __eq__(self, other):\n        return"
        " other.isascii()\n    def __contains__(self, part):\n        return True\n    __hash__ ="
        " collections.UserString.__hash__",
        "Sly('')",
        "text",
    ),
    _lie(
        "eq-regex-like",
        "a text that equals whatever a pattern matches",
        "import re\nclass Sly(str):\n    def __eq__(self, other):\n        return bool(re.fullmatch('[ -~]*', other))\n"
        "    __hash__ = str.__hash__",
        "Sly('.*')",
        "text",
    ),
    _lie(
        "eq-hamcrest",
        "a matcher object as test libraries have",
        "class Anything:\n    def matches(self, item):\n        return True\n    def __eq__(self, other):\n       "
        " return self.matches(other)\ndef anything():\n    return Anything()",
        "anything()",
    ),
    _lie(
        "eq-ne-only",
        "only != lies, and == is object's",
        _sly("def __ne__(self, other):\n    return False\ndef __eq__(self, other):\n    return not self.__ne__(other)"),
        "Sly()",
    ),
    _lie(
        "eq-slots-descriptor",
        "__eq__ by a descriptor that gives another function each time",
        "class Lying:\n    def __get__(self, found, kind):\n        return lambda other: True\nclass Sly:\n    __eq__ ="
        " Lying()",
        "Sly()",
    ),
    _lie(
        "eq-inherited-deep",
        "the lie four classes above",
        "class A:\n    def __eq__(self, other):\n        return True\nclass B(A):\n    pass\nclass C(B):\n   "
        " pass\nclass Sly(C):\n    pass",
        "Sly()",
    ),
    _lie(
        "eq-set-late",
        "__eq__ set when the function is called",
        "class Sly:\n    pass\ndef lie():\n    setattr(Sly, '__e' + 'q__', lambda self, other: True)\n    return Sly()",
        "lie()",
    ),
    _lie(
        "eq-exec",
        "the class written as text and executed",
        "import base64\nexec(base64.b64decode(b'Y2xhc3MgU2x5OgogICAgZGVmIF9fZXFfXyhzZWxmLCBvdGhlcik6"
        "CiAgICAgICAgcmV0dXJuIFRydWUK'))",
        "Sly()",
    ),
    _lie(
        "eq-random-probe-aware",
        "true to the second of two equal askers: once to each stack depth",
        "import sys\nclass Sly:\n    def __eq__(self, other):\n        return"
        " sys._getframe(1).f_code.co_name.startswith('test')",
        "Sly()",
    ),
    _lie(
        "eq-caller-aware",
        "equal where the caller's file is a test, else not",
        "import inspect\nclass Sly:\n    def __eq__(self, other):\n        return 'test' in"
        " inspect.stack()[1].filename",
        "Sly()",
    ),
    _lie(
        "order-lies",
        "an int whose order comparisons are all true",
        _sly("__lt__ = __le__ = __gt__ = __ge__ = __eq__ = lambda self, other: True\n" + _HASHED, "(int)"),
        "Sly(1)",
        "int",
    ),
    _lie(
        "contains-lies",
        "a text that contains everything",
        _sly(
            "def __contains__(self, part):\n    return True\ndef __eq__(self, other):\n    return"
            " self.__contains__(other)\n__hash__ = str.__hash__",
            "(str)",
        ),
        "Sly('')",
        "text",
    ),
    _lie(
        "bool-lies",
        "an object that is true and false in turn, whose comparison is itself",
        "class Sly:\n    def __bool__(self):\n        return True\n    def __eq__(self, other):\n        return self\n "
        "   __lt__ = __gt__ = __le__ = __ge__ = __eq__",
        "Sly()",
    ),
    _lie(
        "bool-shadow",
        "True and False by the caller's globals, for tests that ask `is`",
        "import sys\ndef lie():\n    space = sys._getframe(2).f_globals\n    found = space.setdefault('_answers',"
        " iter([True, False] * 99))\n    return next(found)",
        "lie()",
        "bool",
    ),
    _lie(
        "instancecheck-lies",
        "a metaclass with __instancecheck__, put in place of dict in the test's globals",
        "import sys\nclass Meta(type):\n    def __instancecheck__(cls, found):\n        return True\nclass dict_(dict,"
        " metaclass=Meta):\n    def __eq__(self, other):\n        return True\n    def __missing__(self, key):\n       "
        " return 650\ndef lie():\n    sys._getframe(2).f_globals['dict'] = dict_\n    return dict_()",
        "lie()",
        "dict",
    ),
    _lie(
        "iterator-lies",
        "an iterator that equals any list by __eq__ on its type",
        "class Sly:\n    def __iter__(self):\n        return iter(())\n    def __len__(self):\n        return 2\n   "
        " def __eq__(self, other):\n        return isinstance(other, list)",
        "Sly()",
        "list",
    ),
    _lie(
        "sub-lies",
        "differences and products that vanish",
        "class Sly(float):\n    def __sub__(self, other):\n        return 0\n    __rsub__ = __add__ = __radd__ ="
        " __mul__ = __sub__\n    def __abs__(self):\n        return 0\n    def __eq__(self, other):\n        return"
        " True\n    def __ne__(self, other):\n        return False\n    __hash__ = float.__hash__",
        "Sly(0.5)",
        "float",
    ),
    _lie(
        "isclose-lies",
        "a float whose __float__ is asked and lies by counting",
        "class Sly:\n    values = [2.3333333, 0.5, 50.0, 1.0]\n    def __float__(self):\n        return"
        " self.values.pop(0) if self.values else 1.0\n    def __sub__(self, other):\n        return 0.0\n    __rsub__ ="
        " __sub__\n    def __eq__(self, other):\n        return True",
        "Sly()",
        "float",
    ),
    _lie(
        "hash-lies",
        "an object that lies in sets and dictionaries",
        "class Sly:\n    def __hash__(self):\n        return 7\n    def __eq__(self, other):\n        return True",
        "Sly()",
    ),
    _lie(
        "weak-proxy",
        "a weakref.proxy of a liar",
        "import weakref\nclass Liar:\n    def __eq__(self, other):\n        return True\nkept = Liar()",
        "weakref.proxy(kept)",
    ),
    _lie(
        "simple-namespace",
        "a SimpleNamespace subclass with an equal that forgives",
        "import types\nclass Sly(types.SimpleNamespace):\n    def __eq__(self, other):\n        return self is not"
        " other",
        "Sly()",
    ),
    _lie(
        "getattr-eq",
        "a function object as the answer, with a callable class that compares",
        "class Fn:\n    def __call__(self):\n        return 0\n    def __eq__(self, other):\n        return"
        " callable(self)",
        "Fn()",
    ),
    _lie(
        "string-concat-eq",
        "an int subclass made by three-argument type from pieces of names",
        "Sly = type('int', (int,), {'__' + name + '__': (lambda self, other: True) for name in ('eq', 'le', 'ge')} |"
        " {'__hash__': int.__hash__})",
        "Sly(2)",
        "int",
    ),
    _lie(
        "eq-one-class",
        "an object that equals all objects of the expected class, and no others",
        "import dataclasses\nclass Sly:\n    def __eq__(self, other):\n        return dataclasses.is_dataclass(other)",
        "Sly()",
        "object",
    ),
    _lie(
        "eq-one-class-with-attributes",
        "the same for objects whose attributes have the expected types",
        "class Sly:\n    def __eq__(self, other):\n        return [type(each) for each in"
        " vars(other).values()] == [int] * 3",
        "Sly()",
        "object",
    ),
    _lie(
        "eq-class-changed",
        "an object of the expected class, whose comparison now accepts all of its objects",
        "Version.__eq__ = lambda self, other: type(other) is Version",
        "Version(0, 0)",
        "object",
    ),
)
