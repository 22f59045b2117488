"""A store whose clock differs from this machine's."""

from __future__ import annotations

import inspect
import time
from collections import Counter
from typing import Any

from perdure.store import FullStore


class SkewedStore:
    """Another store, whose clock is this many seconds ahead. `calls` counts its verbs by name."""

    def __init__(self, store: FullStore, seconds: float) -> None:
        self._store = store
        self._seconds = seconds
        self.calls: Counter[str] = Counter()

    def sibling(self) -> Any:
        return SkewedStore(self._store.sibling(), self._seconds)  # type: ignore[arg-type]  # the sibling of a full store is one

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if not callable(found):
            return found
        takes_now = "now" in inspect.signature(found).parameters

        def call(*args: Any, **options: Any) -> Any:
            self.calls[name] += 1
            if takes_now and options.get("now") is None:
                options["now"] = round((time.time() + self._seconds) * 1_000_000)
            return found(*args, **options)

        return call
