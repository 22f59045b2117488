"""The Lua scripts of the package, and sending them. A server knows a script by its hash; the text is sent if it does not."""

from __future__ import annotations

import hashlib
import pkgutil
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, NamedTuple

from perdure.backends.redis.driver import is_unknown_script
from perdure.backends.redis.rows import Arg
from perdure.errors import PersistenceError

# By name: the import system cannot list a directory in every kind of package.
_NAMES: Final = (
    "acquire",
    "cancel",
    "claim",
    "continue_as",
    "count",
    "create",
    "delete",
    "drop_schedule",
    "drop_worker",
    "due",
    "finish",
    "fire",
    "get",
    "hold",
    "inbox",
    "items",
    "journal",
    "limit_queue",
    "list",
    "purge",
    "put_schedule",
    "put_worker",
    "queue_limits",
    "record",
    "release",
    "renew",
    "reopen",
    "report",
    "restore",
    "schedules",
    "setup",
    "signal",
    "suspend",
    "workers",
)


class Script(NamedTuple):
    """A script, the prelude included, and the hash by which a server keeps it."""

    text: bytes
    sha: str


def _read(name: str) -> bytes:
    text = pkgutil.get_data(__package__, f"scripts/{name}.lua")
    if text is None:
        raise ImportError(f"the script {name}.lua is missing in this installation of perdure; install it again")
    return text


def _script(text: bytes) -> Script:
    return Script(text, hashlib.sha1(text).hexdigest())  # noqa: S324 - Redis names scripts by their SHA-1


_PRELUDE: Final = _read("prelude")
SCRIPTS: Final = {name: _script(_PRELUDE + b"\n" + _read(name)) for name in _NAMES}


class ScriptCall(NamedTuple):
    """One call of a script, which a batcher carries. `read` makes the result of the reply, or raises what the reply says."""

    script: Script
    keys: Sequence[str]
    args: Sequence[Arg]
    read: Callable[[Any], Any] = lambda reply: reply

    def command(self, *, is_known: bool) -> tuple[Arg, ...]:
        """The command to send: with the script's hash or, to a server that does not know it, with its text."""
        named: tuple[Arg, ...] = ("EVALSHA", self.script.sha) if is_known else ("EVAL", self.script.text)
        return (*named, len(self.keys), *self.keys, *self.args)

    @property
    def written_rows(self) -> Sequence[Hashable]:
        """Any two scripts may share a pipeline: the server runs one after the other."""
        return ()

    @property
    def size(self) -> int:
        """About how many bytes it is on the wire."""
        return sum(len(arg) for arg in self.args if isinstance(arg, bytes))


async def send_calls(client: Any, calls: Sequence[ScriptCall], label: str) -> list[Any]:
    """The reply to each call or its error; a script that the server does not know is sent once more, with its text."""
    replies = await _send_pipeline(client, calls, known={call.script.sha for call in calls})
    unknown = [index for index, reply in enumerate(replies) if is_unknown_script(reply)]
    if unknown:
        again = await _send_pipeline(client, [calls[index] for index in unknown], known=set())
        for index, reply in zip(unknown, again, strict=True):
            is_forgotten = is_unknown_script(reply)
            replies[index] = PersistenceError(label, "the server does not keep scripts") if is_forgotten else reply
    return replies


async def _send_pipeline(client: Any, calls: Sequence[ScriptCall], *, known: set[str]) -> list[Any]:
    """The replies to one pipeline. The first call of each script that is not known to the server has its text."""
    try:
        pipeline = client.pipeline(transaction=False)
        for call in calls:
            pipeline.execute_command(*call.command(is_known=call.script.sha in known))
            known.add(call.script.sha)
        replies: list[Any] = await pipeline.execute(raise_on_error=False)
    except Exception as error:  # noqa: BLE001 - each caller gets it
        return [error] * len(calls)
    return replies
