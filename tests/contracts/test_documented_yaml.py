"""YAML on the pages of docs/ is read by the loader that reads users' files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from contracts.yaml_text import load_yaml

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL), 1)
]


def test_pages_have_yaml() -> None:
    assert len(BLOCKS) > 20


@pytest.mark.parametrize("block", BLOCKS)
def test_yaml_of_a_page_is_read(block: str) -> None:
    assert load_yaml(block)
