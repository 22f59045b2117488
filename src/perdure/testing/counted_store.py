"""A store that knows which of its calls are under way: between two calls a test can tell whether everything is at rest."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final

from perdure.model.records import Lease
from perdure.store import Transaction

# What is no verb, or may wait for as long as it likes.
UNCOUNTED: Final = frozenset({"close", "sibling", "setup", "watch"})


class CountedStore:
    """Another store, whose calls are counted. A subclass may do something before and after each of them."""

    def __init__(self, store: Any) -> None:
        self.inner = store
        # How many calls were made, and how many of them have no reply yet.
        self.calls = 0
        self.in_flight = 0

    def __repr__(self) -> str:
        return repr(self.inner)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if not callable(found) or name in UNCOUNTED:
            return found
        if name == "transaction":
            return lambda lease, **options: self._transaction(lease, lambda: found(lease, **options))
        return lambda *args, **options: self._call(name, found, args, options)

    def before(self, verb: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments with which a verb of the store is called now."""
        del verb
        return args

    def after(self, verb: str, args: tuple[Any, ...]) -> None:
        """Called when a verb has taken effect, before its caller gets the reply."""

    async def _call(
        self, verb: str, method: Callable[..., Awaitable[Any]], args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        self.calls += 1
        args = self.before(verb, args)
        self.in_flight += 1
        try:
            reply = await method(*args, **options)
        finally:
            self.in_flight -= 1
        self.after(verb, args)
        return reply

    @asynccontextmanager
    async def _transaction(
        self, lease: Lease, enter: Callable[[], AbstractAsyncContextManager[Transaction]]
    ) -> AsyncIterator[Transaction]:
        self.calls += 1
        self.before("transaction", (lease,))
        self.in_flight += 1
        try:
            async with enter() as transaction:
                yield transaction
        finally:
            self.in_flight -= 1
        self.after("transaction", (lease,))
