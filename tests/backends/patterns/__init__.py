"""Patterns: small programs whose worker is killed at every store call (`tests/backends/test_patterns_killed.py`).

A pattern is a module of this package; the tests find it by itself. It has few runs: the calls of each are gone through. It has

    WORKFLOWS               the workflows that the workers know
    start(runtime, ledger)  starts the runs, under fixed ids, and returns them. It is called in the worker that will be killed and
                            again in the one that takes over, so it must find what it started the first time
    check(runtime, ledger)  asserts, after all runs have ended, what the outcome is and what was done

and optionally

    meanwhile(runtime)      what another process does at the same time: signals, decisions. It waits for what it needs with
                            `wait_for_run` or `wait_until`
    OPTIONS                 more options for the runtimes of the workers
    OPTIONAL                keys of steps that need not run in every run-through, such as those that lose a race

Steps call `effect()` for what they do to the world. That is a line in the ledger, a file that survives the process. For every
pattern the harness compares the end of all runs, and their effects, with a run-through in which no worker is killed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from perdure import Run, Runtime, Workflow, current_step

T = TypeVar("T")

# effect: a step did something. returned, recorded: its result reached the body, or the store. failed: its error reached either.
# reopened: failed steps may run again. killed: the process dies at a verb of the store, which is in `key`.
Kind: TypeAlias = Literal["effect", "returned", "recorded", "failed", "reopened", "killed"]


class LedgerLine(NamedTuple):
    """What happened, in the order in which it did."""

    process: str
    kind: Kind
    run: str = ""
    key: str = ""
    what: str = ""
    attempt: int = 1
    idempotency_key: str = ""


class EffectLedger:
    """A file that every process appends to. A line is in it even if its process is killed right after the write."""

    def __init__(self, path: Path, process: str) -> None:
        self._path = path
        self._process = process
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def close(self) -> None:
        os.close(self._file)

    def note(self, kind: Kind, *words: Any) -> None:
        os.write(self._file, json.dumps(LedgerLine(self._process, kind, *words)).encode() + b"\n")

    def lines(self) -> list[LedgerLine]:
        return [LedgerLine(*json.loads(line)) for line in self._path.read_text().splitlines()]

    def effects(self) -> list[str]:
        """What was done, in order; twice where a step that was in flight at a kill ran again."""
        return [line.what for line in self.lines() if line.kind == "effect"]


class Pattern(Protocol):
    """A module of this package. `meanwhile`, `OPTIONS` and `OPTIONAL` may be missing."""

    WORKFLOWS: Sequence[Workflow[Any, Any]]
    OPTIONS: Mapping[str, Any]
    OPTIONAL: frozenset[str]

    async def start(self, runtime: Runtime, ledger: EffectLedger) -> Sequence[Run[Any]]: ...
    async def meanwhile(self, runtime: Runtime) -> None: ...
    async def check(self, runtime: Runtime, ledger: EffectLedger) -> None: ...


class ProcessLedger:
    """The ledger that the steps of this process write to."""

    current: EffectLedger | None = None


def effect(what: str | None = None) -> None:
    """Do something to the world, in a step: by default, what its key says."""
    assert ProcessLedger.current is not None, "effect() is for the steps of a pattern"
    info = current_step()
    ProcessLedger.current.note("effect", info.run_id, info.key, what or info.key, info.attempt, info.idempotency_key)


async def wait_for_run(runtime: Runtime, run_id: str) -> Run[Any]:
    """The run with this id, once it was started."""
    return await wait_until(runtime, lambda: runtime.get(run_id))


async def wait_until(runtime: Runtime, probe: Callable[[], Awaitable[T | None]]) -> T:
    """What `probe` finds, asked until it finds something."""
    while not (found := await probe()):
        await runtime.store.watch(0.02)
    return found
