"""Run one connector in a sandbox: `python3 -I -S -c SOURCE MODULES CALL`.

MODULES is JSON of (name, source) pairs, in the order in which they import each other, the tool's own last; CALL is JSON
of the arguments.
"""

from __future__ import annotations

import json
import sys
import types


def main(modules: str, call: str) -> bytes:
    """Load the modules, run the last one, and return its answer's frame."""
    for name, source in json.loads(modules):
        module = sys.modules[name] = types.ModuleType(name)
        exec(compile(source, name, "exec"), module.__dict__)
    frame: bytes = sys.modules["envd.tools.connectors.answers"].answer(module.run, json.loads(call)).frame()
    return frame


if __name__ == "__main__":
    sys.stdout.buffer.write(main(*sys.argv[1:]))
