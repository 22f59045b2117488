"""What the server is set to do with what it was given: keep it on disk, only in memory, or throw it away.

`INFO` is asked through a script, so that a cluster answers from the node that holds the namespace; `CONFIG`, which managed
servers often refuse, through the client. What the server does not say counts as the worse case.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from perdure.errors import PerdureWarning, PersistenceError
from perdure.store import Durability

# How rows are laid out. A server with another layout is refused.
FORMAT = "2"


class ServerInfo(NamedTuple):
    """What is known of a server."""

    format: str
    append_only: bool
    fsync: str
    policy: str
    maxmemory: int

    @property
    def durability(self) -> Durability:
        """`disk` when an acknowledged write has been synced. With `everysec` a power loss may take the last second."""
        return "disk" if self.append_only and self.fsync == "always" else "process"

    @property
    def evicts(self) -> bool:
        """Whether keys without expiry, such as ours, are thrown away when memory is full."""
        return self.policy.startswith("allkeys") and self.maxmemory > 0


def server_info_from(format_: bytes, info: Sequence[bytes], fsync: str) -> ServerInfo:
    """What these replies say."""
    lines = (line.partition(":") for text in info for line in text.decode(errors="replace").splitlines())
    settings = {name: value.strip() for name, colon, value in lines if colon}
    maxmemory = settings.get("maxmemory", "0")
    return ServerInfo(
        format=format_.decode(),
        append_only=settings.get("aof_enabled") == "1",
        fsync=fsync,
        policy=settings.get("maxmemory_policy", ""),
        maxmemory=int(maxmemory) if maxmemory.isdecimal() else 0,
    )


async def fsync_policy(client: Any) -> str:
    """When the append-only file is synced, or "" when that varies or is not known. Runs on the client's loop."""
    if await _setting(client, "no-appendfsync-on-rewrite") != "no":
        return ""
    return await _setting(client, "appendfsync")


async def _setting(client: Any, name: str) -> str:
    try:
        reply = await client.config_get(name)
    except Exception:  # noqa: BLE001 - whatever the reason, it is not known then
        return ""
    # A cluster's client may answer for several nodes, which need not be set alike.
    values = {_text(value) for value in _leaves(reply)}
    return values.pop() if len(values) == 1 else ""


def _leaves(reply: Any) -> list[Any]:
    if not isinstance(reply, dict):
        return [reply]
    return [leaf for value in reply.values() for leaf in _leaves(value)]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def check_server(server_info: ServerInfo, label: str) -> None:
    """Warn when a restart loses runs. Raises `PersistenceError` when they would be lost without one."""
    if server_info.format != FORMAT:
        raise PersistenceError(label, f"its runs have layout {server_info.format}, and this version reads layout {FORMAT}")
    if server_info.evicts:
        reason = f"maxmemory-policy is {server_info.policy}, which throws runs away when memory is full; set it to noeviction"
        raise PersistenceError(label, reason)
    if not server_info.append_only:
        message = f"{label} has no append-only file, so a restart of the server loses runs; set appendonly yes"
        warnings.warn(message, PerdureWarning, stacklevel=2)
