"""Each test here runs once for each backend that `by_default` gives for it, unless `on` names the backends.

`dsn` is an empty place, `shared_dsn` a prefix in a place that tests share. A test that takes `server_backend` runs on the stores
that talk to a server; one that takes `driver_options` once with each set of them.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import pytest

from tests.backends import disk_processes
from tests.backends.disk_processes import StartChild
from tests.backends.places import new_name, with_options
from tests.backends.processes import Child, Job
from tests.backends.registry import BACKENDS, SERVER_BACKENDS, Backend, ServerBackend, by_default
from tests.campaign import IS_FULL
from tests.wire import Wire

Start: TypeAlias = Callable[..., Child]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    chosen = {name for mark in metafunc.definition.iter_markers("parametrize") for name in _names(mark)}
    if "backend" in chosen:
        return
    marks = {mark.name for mark in metafunc.definition.iter_markers()}
    backends, servers = by_default(BACKENDS.values(), marks), by_default(SERVER_BACKENDS, marks)
    if "driver_options" in metafunc.fixturenames and "driver_options" not in chosen:
        sets = {server: server.driver_options if IS_FULL else server.driver_options[:1] for server in SERVER_BACKENDS}
        choices = [(server, options) for server in SERVER_BACKENDS if server in servers for options in sets[server]]
        names = [f"{server}-{options}" if options else str(server) for server, options in choices]
        metafunc.parametrize(("backend", "driver_options"), choices, ids=names, scope="session")
    elif "server_backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", servers, ids=str, scope="session")
    elif "goes_down" in metafunc.fixturenames:
        cases = [(backend, backend.goes_down) for backend in backends]
        metafunc.parametrize(
            ("backend", "goes_down"), cases, ids=[f"{backend}-{what}" for backend, what in cases], scope="session"
        )
    elif "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", backends, ids=str, scope="session")


def _names(mark: pytest.Mark) -> Sequence[str]:
    names: str | Sequence[str] = mark.args[0]
    return names.split(",") if isinstance(names, str) else names


@pytest.fixture(scope="session")
def server_backend(backend: Backend) -> ServerBackend:
    assert isinstance(backend, ServerBackend)
    return backend


@pytest.fixture(autouse=True)
def _mongodb_driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """MongoDB's driver looks for signs of a container when it opens a pool: one `stat`, on the store's loop. And it does not
    close a socket that was connecting when the driver was closed, as to a server that is away."""
    is_parameter = "backend" in request.fixturenames and request.getfixturevalue("backend").name == "mongo"
    if not is_parameter and request.path.parent.name != "mongo":
        yield
        return
    monkeypatch.setattr("pymongo.pool_options.get_container_env_info", dict)
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def dsn(backend: Backend) -> Iterator[str]:
    """An empty place, where nothing has been set up."""
    with backend.place() as place:
        yield place


@pytest.fixture(scope="session")
def _shared_place(backend: Backend) -> Iterator[str]:
    with backend.place() as place:
        yield place


@pytest.fixture
def shared_dsn(_shared_place: str) -> str:
    """A prefix of its own in a place that tests share: setting up a place takes longer than most tests."""
    return with_options(_shared_place, f"prefix={new_name()}")


@pytest.fixture
def wire(shared_dsn: str) -> Iterator[Wire]:
    """A proxy before the server of `shared_dsn`."""
    wire = Wire(shared_dsn)
    yield wire
    wire.close()


@pytest.fixture
def start_child() -> Iterator[StartChild]:
    """Starts `disk_child.py` with a job, up to its "ready" unless told otherwise; what still runs at the end is killed."""
    started: list[disk_processes.Process] = []

    def start(*arguments: object, ready: bool = True, under: tuple[str, ...] = ()) -> disk_processes.Process:
        process = disk_processes.start(*arguments, under=under)
        started.append(process)
        if ready:
            disk_processes.wait_until_ready(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


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
