"""What tests of workflows and of stores need: a runtime in virtual time, a clock that jumps, crashes, the contract of stores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.testing.clock import ManualClock as ManualClock
    from perdure.testing.history import HistoryItem as HistoryItem
    from perdure.testing.stubs import Stub as Stub
    from perdure.testing.virtual_runtime import VirtualRuntime as VirtualRuntime
    from perdure.testing.virtual_runtime import runtime as runtime

_HOMES = {
    "ManualClock": "clock",
    "HistoryItem": "history",
    "Stub": "stubs",
    "VirtualRuntime": "virtual_runtime",
    "runtime": "virtual_runtime",
}

__all__ = ["HistoryItem", "ManualClock", "Stub", "VirtualRuntime", "runtime"]


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: pytest's plugin is loaded where nothing of this is needed."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
