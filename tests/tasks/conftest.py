from collections.abc import Iterator
from pathlib import Path

import pytest

from contracts.artifacts import Artifact
from contracts.chat import ChatTokenizer
from contracts.store import Store, open_store
from curation.tasks.suite import TaskSuiteConfig
from curation.tokenizer import build_tokenizer
from envd.local import LocalEnvd
from tests.envd.stand_ins import qemu_image
from tests.needs import require


@pytest.fixture(scope="session")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return open_store(str(tmp_path_factory.mktemp("store")))


@pytest.fixture(scope="session")
def tokenizer_artifact(shared_store: Store) -> Artifact:
    return build_tokenizer(TaskSuiteConfig(), shared_store)


@pytest.fixture(scope="session")
def tokenizer_directory(tokenizer_artifact: Artifact) -> Path:
    return tokenizer_artifact.directory()


@pytest.fixture(scope="session")
def tokenizer(tokenizer_directory: Path) -> ChatTokenizer:
    return ChatTokenizer.from_directory(tokenizer_directory)


@pytest.fixture(scope="session")
def envd_address() -> Iterator[str]:
    with LocalEnvd() as envd:
        yield envd.address


_EMULATED = pytest.param("qemu", marks=[pytest.mark.slow, pytest.mark.timeout(1200)])


@pytest.fixture(scope="module", params=["namespaces", pytest.param("gvisor", marks=pytest.mark.slow), _EMULATED])
def shown_by(request: pytest.FixtureRequest) -> Iterator[str]:
    """Address of a server with one backend that shows runtimes in its sandboxes."""
    if request.param == "gvisor":
        require("runsc")
    if request.param == "qemu":
        qemu_image()
    with LocalEnvd(request.param) as envd:
        yield envd.address
