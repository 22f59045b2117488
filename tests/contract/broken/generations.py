"""Broken generations: not counted, counted unasked, or the first input forgotten."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from perdure.backends.memory.store import MemoryStore
from perdure.model.records import Created, NewRun
from tests.contract.broken.table import breaks


@breaks("a_reopened_run_has_a_new_generation_if_that_is_asked_for")
class ReopensInTheSameGeneration(MemoryStore):
    async def reopen(self, run_id: str, drop: Collection[str], *, new_generation: bool = False, now: int | None = None) -> None:
        await super().reopen(run_id, drop, new_generation=False, now=now)


@breaks("a_reopened_run_has_a_new_generation_if_that_is_asked_for")
class EveryReopeningIsAGeneration(MemoryStore):
    async def reopen(self, run_id: str, drop: Collection[str], *, new_generation: bool = False, now: int | None = None) -> None:
        await super().reopen(run_id, drop, new_generation=True, now=now)


@breaks("create_compares_with_the_first_input")
class ForgetsTheFirstInput(MemoryStore):
    async def create(self, run: NewRun, **options: Any) -> Created:
        return await super().create(msgspec.structs.replace(run, first_input_hash=None), **options)


@breaks("create_compares_with_the_first_input")
class ComparesWithThePresentInput(MemoryStore):
    async def create(self, run: NewRun, **options: Any) -> Created:
        with self._lock() as namespace:
            found = namespace.runs.get(run.id)
            first = None if found is None else found.row.first_input_hash
            if found is not None:
                found.change(first_input_hash=None)
        try:
            return await super().create(run, **options)
        finally:
            if found is not None:
                found.change(first_input_hash=first)
