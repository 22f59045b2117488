"""Cases: promises in the form of functions, registered by decorators in the order in which they are written.

A case is asked of every store (`promise`), of those that declare some capabilities (`promise_with`), or of those that do not
declare one (`promise_without`): these check that the store refuses what it does not declare, so that no case is ever skipped.
mypy holds a case of every store to the verbs of the core: its `World` has handles of type `Store`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Final, TypeAlias

from perdure.store import Capability
from perdure.testing.contract.world import FullWorld, StoreFactory, World

CoreCheck: TypeAlias = Callable[[World], Awaitable[None]]
Check: TypeAlias = Callable[[FullWorld], Awaitable[None]]

# A store that hangs fails its case after this many seconds.
PATIENCE: Final = 120.0

_CASES: Final[dict[str, Case]] = {}


@dataclass(frozen=True, slots=True)
class Case:
    """One promise: a name that states it, a sentence that explains it, the module it is in, and the check."""

    name: str
    sentence: str
    part: str
    check: Check
    needs: frozenset[Capability] = frozenset()
    lacks: Capability | None = None

    def concerns(self, capabilities: frozenset[Capability]) -> bool:
        """Whether a store with these capabilities has to keep this promise."""
        return self.needs <= capabilities and self.lacks not in capabilities

    async def run(self, factory: StoreFactory) -> None:
        """Raise unless the store keeps the promise on this fresh database."""
        world = FullWorld(factory)
        async with asyncio.timeout(PATIENCE):
            try:
                await world.open()
                await self.check(world)
            finally:
                await world.close()


def add(check: Check, name: str, sentence: str, *, needs: Collection[Capability] = (), lacks: Capability | None = None) -> None:
    """Register a case that was made by a table."""
    if name in _CASES:
        raise ValueError(f"two cases promise {name!r}; give one of them another name")
    _CASES[name] = Case(name, sentence, check.__module__, check, frozenset(needs), lacks)


def promise(check: CoreCheck) -> CoreCheck:
    """Register a case for every store."""
    add(check, _name(check), _sentence(check))
    return check


def promise_with(*capabilities: Capability) -> Callable[[Check], Check]:
    """Register a case for stores that declare all of these capabilities."""

    def register(check: Check) -> Check:
        add(check, _name(check), _sentence(check), needs=capabilities)
        return check

    return register


def promise_without(capability: Capability) -> Callable[[Check], Check]:
    """Register a case for stores that do not declare the capability."""

    def register(check: Check) -> Check:
        add(check, _name(check), _sentence(check), lacks=capability)
        return check

    return register


def registered() -> tuple[Case, ...]:
    """The cases of all parts that were imported."""
    return tuple(_CASES.values())


def _name(check: Check) -> str:
    return str(getattr(check, "__name__", ""))


def _sentence(check: Check) -> str:
    return (check.__doc__ or "").strip()
