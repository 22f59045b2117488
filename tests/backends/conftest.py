"""Each test here runs once for each backend: with an empty place by its DSN, or with processes and a disaster for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest

from tests.backends.processes import Child, Job
from tests.backends.registry import BACKENDS, Backend

Start: TypeAlias = Callable[..., Child]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "goes_down" in metafunc.fixturenames:
        cases = [(backend, backend.goes_down) for backend in BACKENDS.values()]
        metafunc.parametrize(
            ("backend", "goes_down"), cases, ids=[f"{backend}-{what}" for backend, what in cases], scope="session"
        )
    elif "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", BACKENDS.values(), ids=str, scope="session")


@pytest.fixture(autouse=True)
def _no_look_for_containers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """MongoDB's driver asks the disk whether it runs in a container, when it opens a pool: one `stat`, on the store's loop."""
    if "backend" in request.fixturenames and request.getfixturevalue("backend").name == "mongo":
        monkeypatch.setattr("pymongo.pool_options.get_container_env_info", dict)


@pytest.fixture
def dsn(backend: Backend) -> Iterator[str]:
    """An empty place, where nothing has been set up."""
    with backend.place() as place:
        yield place


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process that does a job; what still runs at the end is killed."""
    started: list[Child] = []

    def one(job: Job, *args: Any) -> Child:
        started.append(Child(job, *args))
        return started[-1]

    yield one
    for child in started:
        child.kill()
