from __future__ import annotations

from collections.abc import Iterator

import pytest
from rollouts_script import byte_tokenizer

from contracts.chat import ChatTokenizer
from envd.local import LocalEnvd


@pytest.fixture(scope="session")
def tokenizer() -> ChatTokenizer:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def envd() -> Iterator[LocalEnvd]:
    with LocalEnvd() as server:
        yield server
