"""Generations: how often a run has begun anew under its id."""

from __future__ import annotations

from typing import Any

import msgspec

from perdure.errors import RunConflict
from perdure.testing.contract.cases import promise
from perdure.testing.contract.inbox import ENDS
from perdure.testing.contract.world import NOW, World, at, equal, new_run, refused


@promise
async def a_reopened_run_has_a_new_generation_if_that_is_asked_for(world: World) -> None:
    """`reopen` with `new_generation` adds one to the generation each time, and without it leaves the generation as it is."""
    for status in ENDS:
        if status == "completed":
            continue
        await world.ended(status, status)
        for generation, is_new in ((0, False), (1, True), (2, True), (2, False)):
            await world.b.reopen(status, [], new_generation=is_new, now=at(1))
            equal((await world.row(status)).generation, generation, "the generation after reopen")
            claim = await world.take(status, now=at(1))
            equal(claim.run.generation, generation, "the generation in the claim")
            await world.b.finish(claim.lease, status, b"1", now=at(1))


@promise
async def create_compares_with_the_first_input(world: World) -> None:
    """A run that has had other inputs is found again by the first one, and by none of the others."""
    columns: dict[str, Any] = {"input_hash": b"third", "first_input_hash": b"first", "generation": 2, "continued_at": at(-5)}
    created = await world.a.create(new_run(**columns), now=NOW)
    stored = await world.row()
    equal({name: getattr(stored, name) for name in columns}, columns, "the columns")
    for again in (new_run(input_hash=b"first"), new_run(**columns)):
        found = await world.b.create(again, now=at(1))
        equal((found.is_new, found.run), (False, stored), "what a repeated create finds")
    equal(created.run, stored, "what create gave")
    for input_hash in (b"second", b"third"):
        with refused(RunConflict, f"create with the hash {input_hash!r}"):
            await world.b.create(new_run(input_hash=input_hash), now=at(1))
    equal(msgspec.structs.asdict(await world.row()), msgspec.structs.asdict(stored), "the row")
