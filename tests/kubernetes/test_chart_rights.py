"""`triplane doctor --kubernetes` asks for the rights that the chart grants, and for no others."""

from __future__ import annotations

import re
from pathlib import Path

from triplane_dagster.doctor.cluster_rights import RIGHTS

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "triplane" / "templates"
_RULE = re.compile(r"apiGroups: \[(.*?)\]\s+resources: \[(.*?)\]\s+verbs: \[(.*?)\]")


def test_the_role_of_the_chart_has_the_rights_that_doctor_asks_for() -> None:
    (text,) = (text for path in CHART.iterdir() if "kind: Role\n" in (text := path.read_text()))
    role = re.sub(r"\{\{- if .*?\{\{- end \}\}", "", text[: text.index("kind: RoleBinding")], flags=re.DOTALL)
    granted = {
        (group.strip('"'), kind, verb)
        for group, kinds, verbs in _RULE.findall(role)
        for kind in kinds.split(", ")
        for verb in verbs.split(", ")
    }
    asked = {(right.group, f"{right.resource}/{right.subresource}".rstrip("/"), right.verb) for right in RIGHTS}
    assert granted == asked
