from collections.abc import Iterator
from typing import Any

import pytest

from core.cluster.ray_workers import Cluster, Remote
from unit_tests.helpers.ray_trainers import start_ranks


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """Ray for all files of this folder: it takes seconds to start, and a process has one at most."""
    cluster = Cluster(None)
    yield cluster
    cluster.close()


@pytest.fixture(scope="package")
def ranks(cluster: Cluster) -> dict[int, Remote[Any]]:
    """Actors by number of ranks; a test builds its trainers in them, so that libraries are imported once."""
    return {n: start_ranks(cluster, n) for n in (1, 2)}
