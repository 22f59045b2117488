"""What tests of workflows and of stores need: a runtime in virtual time, a clock that jumps, crashes, the contract of stores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.testing.clock import ManualClock as ManualClock
    from perdure.testing.crashes import CrashReport as CrashReport
    from perdure.testing.crashes import crash_everywhere as crash_everywhere
    from perdure.testing.history import HistoryItem as HistoryItem
    from perdure.testing.standstill import NothingMoves as NothingMoves
    from perdure.testing.stubs import Stub as Stub
    from perdure.testing.sync_runtime import SyncVirtualRuntime as SyncVirtualRuntime
    from perdure.testing.sync_runtime import runtime_sync as runtime_sync
    from perdure.testing.virtual_runtime import RunCannotGoOn as RunCannotGoOn
    from perdure.testing.virtual_runtime import VirtualRuntime as VirtualRuntime
    from perdure.testing.virtual_runtime import runtime as runtime

_HOMES = {
    "CrashReport": "crashes",
    "crash_everywhere": "crashes",
    "ManualClock": "clock",
    "HistoryItem": "history",
    "NothingMoves": "standstill",
    "RunCannotGoOn": "virtual_runtime",
    "Stub": "stubs",
    "SyncVirtualRuntime": "sync_runtime",
    "VirtualRuntime": "virtual_runtime",
    "runtime": "virtual_runtime",
    "runtime_sync": "sync_runtime",
}

__all__ = [
    "CrashReport",
    "HistoryItem",
    "ManualClock",
    "NothingMoves",
    "RunCannotGoOn",
    "Stub",
    "SyncVirtualRuntime",
    "VirtualRuntime",
    "crash_everywhere",
    "runtime",
    "runtime_sync",
]


if not TYPE_CHECKING:  # checkers know the names above and no others

    def __getattr__(name: str) -> Any:
        """Import a name when it is first used: pytest's plugin is loaded where nothing of this is needed."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
