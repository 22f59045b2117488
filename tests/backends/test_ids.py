"""Ids and keys that some database, file system or pattern language would take for something else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote, unquote

import msgspec

from perdure import Context, Ok, Runtime, Suspended, workflow
from perdure.model.records import Item
from perdure.model.run_filter import RunFilter
from perdure.store import FullStore
from perdure.testing.contract.world import entry, new_run
from tests.backends.opening import store_at
from tests.backends.registry import Backend
from tests.campaign import IS_FULL

T = TypeVar("T")

# Written with escapes where an editor could change them: the first accent is part of its letter, the second stands alone.
IDS: Final = (
    "Order-1",
    "order-1",
    "order-1 ",
    "\u00f3rder-1",
    "o\u0301rder-1",
    "a%b_c*d?[e]",
    "aXb_c*d?[e]",
    "x" * 500,
    "x" * 499 + "y",
    "\U0001f600",
    "\U0001f600\U0001f680",
    "../x",
    "line\nbreak",
    "line",
    "__proto__",
    "$ne",
    "a.b",
    "a",
)


def names_in(run_id: str) -> list[str]:
    """The names that are used in this run: its neighbours, among which are those that look like it, and in full all of them."""
    at = IDS.index(run_id)
    return [IDS[(at + n) % len(IDS)] for n in (range(len(IDS)) if IS_FULL else range(-2, 3))]


async def echo(text: str) -> str:
    return text


@workflow
async def names(ctx: Context[Any], own_id: str) -> list[str]:
    """Odd names as keys of steps and as names of signals."""
    found = [await ctx.step("echo", echo, f"step {name} of {own_id}", key=name) for name in names_in(own_id)]
    return found + [await ctx.wait_for_signal(name, key=f"wait for {name}") for name in reversed(names_in(own_id))]


def result_of(run_id: str) -> list[str]:
    used = names_in(run_id)
    return [f"step {name} of {run_id}" for name in used] + [f"signal {name} to {run_id}" for name in reversed(used)]


async def client(store: FullStore) -> Runtime:
    return Runtime(store, [names], concurrency=0)


async def start_all(dsn: str) -> None:
    async with store_at(dsn) as store:
        runtime = await client(store)
        started = [runtime.run(names, run_id, id=run_id, metadata={run_id: run_id}) for run_id in IDS]
        assert {type(outcome) for outcome in await asyncio.gather(*started)} == {Suspended}
        await runtime.close()


async def signal_all(dsn: str) -> None:
    async with store_at(dsn) as store:
        runtime = await client(store)
        for run_id in IDS:
            for name in names_in(run_id):
                await runtime.signal(run_id, name, f"signal {name} to {run_id}", dedupe=name)
        await runtime.close()


async def end_all(dsn: str) -> None:
    async with store_at(dsn) as store:
        runtime = await client(store)
        outcomes = await asyncio.gather(*(runtime.resume(run_id) for run_id in IDS))
        assert outcomes == [Ok(result_of(run_id)) for run_id in IDS]
        await runtime.close()


async def check_lists(dsn: str) -> None:
    async with store_at(dsn) as store:
        for prefix in ("", *IDS, "order", "x" * 499, "%", "_", "a%", "a_", "*", "../", ".", "\\"):
            expected = {run_id for run_id in IDS if run_id.startswith(prefix)}
            assert {line.id for line in await store.list(RunFilter(prefix=prefix))} == expected, f"what begins with {prefix!r}"
            assert await store.count(RunFilter(prefix=prefix)) == len(expected)
        for run_id in IDS:
            row = await store.get(run_id)
            assert row is not None
            assert (row.id, msgspec.json.decode(row.metadata)) == (run_id, {run_id: run_id})


async def delete_all(dsn: str) -> None:
    async with store_at(dsn) as store:
        left = set(IDS)
        for run_id in IDS:
            await store.delete(run_id)
            left.discard(run_id)
            assert {line.id for line in await store.list()} == left


def test_names_that_look_alike_are_different_runs_steps_and_signals(backend: Backend, dsn: str) -> None:
    for part in (start_all, signal_all, end_all, check_lists, delete_all):
        asyncio.run(part(dsn))


async def fill(dsn: str) -> None:
    """A run under every odd name, with that name wherever a run can have one."""
    async with store_at(dsn) as store:
        for name in IDS:
            claim = (await store.create(new_run(name, workflow=name, queue=name), ttl=600)).claim
            assert claim is not None
            await store.record(claim.lease, [entry(1, name)], items=[Item(stream=name, n=0, payload=b"1")])
            await store.signal(name, name, b"1", dedupe=name)


def within(dsn: str, prefix: str) -> str:
    return f"{dsn}{'&' if '?' in dsn else '?'}prefix={quote(prefix)}"


def test_no_name_leads_out_of_its_place(backend: Backend, dsn: str) -> None:
    async def settle(store: FullStore) -> None:
        for run_id in ("1", "order-1", "x"):
            await store.create(new_run(run_id, input=b"ours"))

    async def inputs(store: FullStore) -> dict[str, bytes]:
        rows = [await store.get(line.id) for line in await store.list()]
        return {row.id: row.input for row in rows if row is not None}

    async def visit(place: str, call: Callable[[FullStore], Coroutine[Any, Any, T]]) -> T:
        async with store_at(place) as store:
            return await call(store)

    with backend.place() as elsewhere:
        neighbours = [elsewhere, within(dsn, "order-"), within(dsn, "a%"), within(dsn, "../")]
        for place in neighbours:
            asyncio.run(visit(place, settle))
        for part in (fill, delete_all):
            asyncio.run(part(dsn))
        for place in neighbours:
            assert asyncio.run(visit(place, inputs)) == dict.fromkeys(["1", "order-1", "x"], b"ours"), place
    assert not strangers(dsn)


def strangers(dsn: str) -> list[Path]:
    """Files beside the place, where that is a file."""
    path = Path(unquote(dsn.partition(":")[2].removeprefix("///")))
    return [found for found in path.parent.iterdir() if not found.name.startswith(path.name)] if path.exists() else []
