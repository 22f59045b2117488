"""An empty database of each kind for a test."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from pymongo import pool_options

from tests.kv.places import PLACES, MemoryPlace, Place


@pytest.fixture(autouse=True)
def no_look_for_docker(monkeypatch: pytest.MonkeyPatch) -> None:
    """pymongo asks the disk whether it runs in a container, each time it opens a pool: one `stat`, on the store's own loop."""
    monkeypatch.setattr(pool_options, "get_container_env_info", dict)


@pytest.fixture(params=PLACES, ids=lambda kind: kind.__name__)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    yield from made(request.param)


@pytest.fixture(params=[kind for kind in PLACES if kind is not MemoryPlace], ids=lambda kind: kind.__name__)
def shared_place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """One that other processes see too."""
    yield from made(request.param)


def made(kind: type[Place]) -> Iterator[Place]:
    place = kind()
    asyncio.run(place.make())
    yield place
    asyncio.run(place.close())
