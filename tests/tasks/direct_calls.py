"""`python direct_calls.py FILE`: the outcome of each test by a direct call and by pytest's protocol, as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from curation.tasks.factory import inside
from curation.tasks.factory.guest import OPTIONS


class Both(inside.Plugin):
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        calls = inside._direct_calls(session.config, session.items)
        found: dict[str, Any] = {}
        for name in self.items:
            self.direct = calls
            direct = self._one(name, None) if name in calls else None
            self.direct = {}
            found[name.split("::", 1)[1]] = [direct, self._one(name, None)]
        print(json.dumps(found))
        return True


if __name__ == "__main__":
    options = [option for option in OPTIONS if option != "/workspace"]
    at = options.index("--rootdir")
    options[at : at + 1] = ["--rootdir", sys.argv[2]]
    pytest.main([*options, sys.argv[1]], plugins=[Both({"workers": 1, "idle_s": 5.0}, None)])
