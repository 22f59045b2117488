"""What is handed to the connection's loop, and how the answer comes back to the caller's.

Answers go back through one wake-up of each event loop per batch. A caller that was cancelled, or whose loop is closed, changes
nothing: its script runs or not, and nobody hears of it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from perdure.backends.redis.rows import Arg
from perdure.backends.redis.scripts import Script


class Call:
    """A script under way, for a caller on its own loop."""

    __slots__ = ("args", "error", "future", "keys", "loop", "reply", "script")

    def __init__(self, script: Script, keys: Sequence[str], args: Sequence[Arg]) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()
        self.script = script
        self.keys = keys
        self.args = args
        self.reply: Any = None
        self.error: BaseException | None = None

    def command(self, *, whole: bool = False) -> tuple[Arg, ...]:
        """The command to send: by the script's hash, or with its whole text."""
        named: tuple[Arg, ...] = ("EVAL", self.script.text) if whole else ("EVALSHA", self.script.sha)
        return (*named, len(self.keys), *self.keys, *self.args)

    @property
    def size(self) -> int:
        """About how many bytes it is on the wire."""
        return sum(len(arg) for arg in self.args if isinstance(arg, bytes))

    def settle(self) -> None:
        """Answer the caller. Runs on its loop."""
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.reply)


def _settle_all(answered: Sequence[Call]) -> None:
    for one in answered:
        one.settle()


def answer(answered: Sequence[Call]) -> None:
    """Wake every loop concerned, once."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Call]] = {}
    for one in answered:
        by_loop.setdefault(one.loop, []).append(one)
    for loop, mine in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits there any more
            loop.call_soon_threadsafe(_settle_all, mine)
