"""The one place where the fuzzer looks inside an engine. Another engine needs another version of these lines and nothing else."""

from __future__ import annotations

from typing import Any, Final

from perdure import Context

# The methods of a loop that an engine may replace while bodies are in memory.
LOOP_METHODS: Final = ("call_soon", "call_soon_threadsafe", "create_task", "call_later", "call_at", "time")


def has_left(ctx: Context[Any]) -> bool:
    """Return whether the body has left memory or ended. Then ctx calls are refused, and what the body does is not compared."""
    return bool(ctx._drive.is_closed)
