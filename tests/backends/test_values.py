"""Values that some database would change or refuse: as inputs, step results, signal payloads and outcomes of a real run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final

import pytest

from perdure import Context, Err, Ok, Runtime, Suspended, workflow
from perdure.errors import InvalidInput, ValueNotStorable
from perdure.store import FullStore
from tests.backends.opening import store_at
from tests.backends.registry import Backend
from tests.codec.same import same

VALUES: Final[dict[str, Any]] = {
    "nothing": None,
    "NUL": "a\0b",
    "lone surrogates": "\ud800 and \udfff",
    "emoji": "\U0001f600" * 3,
    "NaN": float("nan"),
    "infinity": [float("inf"), float("-inf")],
    "1e16": 1e16,
    "minus zero": -0.0,
    "2**200": 2**200,
    "-2**63": -(2**63),
    "true and one": [True, 1, 1.0],
    "bytes of every kind": bytes(range(256)),
    "5 MB of bytes": bytes(range(256)) * 20_000,
    "tuples in sets": {(1, "a"), (2, "\0")},
    "keys that are no text": {1: "one", "1": "text", None: [], (1, 2): {}},
    "keys that begin with $": {"$ne": 1, "$bytes": "x", "a.b": {"$set": {}}},
    "instants and decimals": [datetime(2026, 3, 29, 2, 30, tzinfo=UTC), Decimal("1.10")],
}


def nested(levels: int) -> Any:
    value: Any = "the bottom"
    for _ in range(levels):
        value = [value]
    return value


async def same_again(value: Any) -> Any:
    return value


@workflow
async def carry(ctx: Context[Any], value: Any) -> Any:
    """Carries a value through a step and a wait, and tells `deps` what came of it."""
    result = await ctx.step("same", same_again, value)
    payload = await ctx.wait_for_signal("value")
    ctx.deps.append((value, result, payload))
    return payload


@workflow
async def build(ctx: Context[Any], levels: int) -> Any:
    return await ctx.step("nested", nested, levels)


@pytest.fixture(scope="module")
def place(backend: Backend) -> Iterator[str]:
    """One place for all tests of this file: what they keep there is told apart by the ids of their runs."""
    with backend.place() as dsn:
        yield dsn


@pytest.mark.slow_stores_too
def test_values_read_back_with_their_types_wherever_they_are_recorded(backend: Backend, place: str) -> None:
    seen: dict[str, list[tuple[Any, ...]]] = {name: [] for name in VALUES}

    async def begin(name: str, store: FullStore) -> None:
        runtime = Runtime(store, concurrency=0, deps=seen[name])
        assert isinstance(await runtime.run(carry, VALUES[name], id=name), Suspended)
        await runtime.close()

    async def tell(name: str, store: FullStore) -> None:
        runtime = Runtime(store, concurrency=0)
        await runtime.signal(name, "value", VALUES[name])
        await runtime.close()

    async def go_on(name: str, store: FullStore) -> None:
        runtime = Runtime(store, [carry], concurrency=0, deps=seen[name])
        check(name, await runtime.resume(name))
        await runtime.close()

    async def look(name: str, store: FullStore) -> None:
        runtime = Runtime(store, [carry], concurrency=0)
        run = await runtime.get(name)
        assert run is not None
        check(name, await run.outcome())

    async def with_another_handle(act: Callable[[str, FullStore], Awaitable[None]]) -> None:
        async with store_at(place) as store:
            for name in VALUES:
                await act(name, store)

    def check(name: str, outcome: object) -> None:
        assert isinstance(outcome, Ok), name
        assert same(outcome.value, VALUES[name]), name

    for act in (begin, tell, go_on, look):
        asyncio.run(with_another_handle(act))
    for name, parts in seen.items():
        assert len(parts) == 1, name
        assert all(same(part, VALUES[name]) for part in parts[0]), name


async def refusals(dsn: str) -> list[str]:
    """What is said of 300 levels of nesting as an input, a step's result and a signal's payload."""
    async with store_at(dsn) as store:
        runtime = Runtime(store, [carry, build], concurrency=0)
        with pytest.raises(InvalidInput) as of_input:
            await runtime.run(carry, nested(300), id="nested input")
        assert await store.get("nested input") is None
        outcome = await runtime.run(build, 300, id="nested result")
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, ValueNotStorable)
        assert outcome.error.path
        entries = await store.journal("nested result")
        assert [(entry.key, entry.ok) for entry in entries] == [("nested", False)], (
            "it is recorded, so that it does not run again"
        )
        await runtime.start(carry, 1, id="nested payload")
        with pytest.raises(InvalidInput) as of_payload:
            await runtime.signal("nested payload", "value", nested(300))
        assert await store.inbox("nested payload") == []
        await runtime.close()
        return [str(of_input.value), str(outcome.error), str(of_payload.value)]


def test_what_is_nested_too_deeply_is_refused_with_its_path_and_in_the_same_words(backend: Backend, place: str) -> None:
    said = asyncio.run(refusals(place))
    assert said == asyncio.run(refusals("memory:"))
    assert all("[0][0][0]" in text for text in said)
