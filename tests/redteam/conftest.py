from collections.abc import Iterator

import pytest

from tests.redteam.grading import Grader
from tests.redteam.packages import NoIndexError, imported
from tests.redteam.worlds import World


@pytest.fixture(scope="session")
def grader() -> Iterator[Grader]:
    with Grader() as found:
        yield found


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> list[World]:
    """The three packages. Skips only where there is no index to ask."""
    try:
        return imported(tmp_path_factory.mktemp("packages"))
    except NoIndexError as error:
        pytest.skip(str(error))
