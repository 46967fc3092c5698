"""`triplane doctor --kubernetes` asks for the rights that the chart grants, and for no others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from triplane_dagster.doctor.cluster_rights import JOBSET_RIGHTS, RIGHTS, Right

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "triplane" / "templates"
_RULE = re.compile(r"apiGroups: \[(.*?)\]\s+resources: \[(.*?)\]\s+verbs: \[(.*?)\]")


def test_the_role_of_the_chart_has_the_rights_that_doctor_asks_for() -> None:
    (text,) = (text for path in CHART.iterdir() if "kind: Role\n" in (text := path.read_text()))
    role = text[: text.index("kind: RoleBinding")]
    without_jobsets = re.sub(r"\{\{- if .*?\{\{- end \}\}", "", role, flags=re.DOTALL)
    for rules, asked_for in ((without_jobsets, RIGHTS), (role, (*RIGHTS, *JOBSET_RIGHTS))):
        assert _granted(rules) == _asked(asked_for)


def _granted(role: str) -> set[tuple[str, str, str]]:
    return {
        (group.strip('"'), kind, verb)
        for group, kinds, verbs in _RULE.findall(role)
        for kind in kinds.split(", ")
        for verb in verbs.split(", ")
    }


def _asked(rights: Sequence[Right]) -> set[tuple[str, str, str]]:
    return {(right.group, f"{right.resource}/{right.subresource}".rstrip("/"), right.verb) for right in rights}
