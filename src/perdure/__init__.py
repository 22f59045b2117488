"""Ordinary Python functions made durable.

Every finished step is recorded, and after a crash, a deploy, a day-long sleep or a human's answer the function goes on where it
stopped.

Names are imported when first used, so that `import perdure` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure import errors as errors
    from perdure import events as events
    from perdure import state as state
    from perdure import stores as stores
    from perdure.branches import StepInfo as StepInfo
    from perdure.branches import current_step as current_step
    from perdure.codec import register as register
    from perdure.context import Context as Context
    from perdure.definition import Workflow as Workflow
    from perdure.definition import workflow as workflow
    from perdure.duration import Duration as Duration
    from perdure.errors import PerdureError as PerdureError
    from perdure.errors import PerdureWarning as PerdureWarning
    from perdure.keyvalues import FilesKeyValueStore as FilesKeyValueStore
    from perdure.keyvalues import MongoKeyValueStore as MongoKeyValueStore
    from perdure.keyvalues import PostgresKeyValueStore as PostgresKeyValueStore
    from perdure.keyvalues import RedisKeyValueStore as RedisKeyValueStore
    from perdure.keyvalues import SQLiteKeyValueStore as SQLiteKeyValueStore
    from perdure.keyvalues import open_key_value_store as open_key_value_store
    from perdure.migrating import Migration as Migration
    from perdure.migrating import migrate_store as migrate_store
    from perdure.result import Err as Err
    from perdure.result import Ok as Ok
    from perdure.result import Outcome as Outcome
    from perdure.result import Suspended as Suspended
    from perdure.retry import Retry as Retry
    from perdure.run import Run as Run
    from perdure.runtime import Runtime as Runtime
    from perdure.snapshot import Snapshot as Snapshot
    from perdure.state import Execution as Execution
    from perdure.state import FileCache as FileCache
    from perdure.state import KeyValueStore as KeyValueStore
    from perdure.state import LossWarning as LossWarning
    from perdure.state import MemoryCache as MemoryCache
    from perdure.state import MemoryKeyValueStore as MemoryKeyValueStore
    from perdure.state import ResumeState as ResumeState
    from perdure.state import ResumeStateCollector as ResumeStateCollector
    from perdure.state import StatePersistence as StatePersistence
    from perdure.state import StepCache as StepCache
    from perdure.state import StepResult as StepResult
    from perdure.state import Validation as Validation
    from perdure.state import assert_valid_snapshot as assert_valid_snapshot
    from perdure.state import dump_state as dump_state
    from perdure.state import is_step_complete as is_step_complete
    from perdure.state import looks_like_snapshot as looks_like_snapshot
    from perdure.state import merge_snapshots as merge_snapshots
    from perdure.state import parse_state as parse_state
    from perdure.state import validate_snapshot as validate_snapshot
    from perdure.stepspec import step as step
    from perdure.stores import open_store as open_store
    from perdure.stores.workflow_store import SnapshotStore as SnapshotStore
    from perdure.stores.workflow_store import StoredRun as StoredRun
    from perdure.stores.workflow_store import WorkflowStore as WorkflowStore

__version__ = "0.1.0"

# Where each public name lives; None is a module of that name.
_HOMES: dict[str, str | None] = {
    "Context": "context",
    "Duration": "duration",
    "Err": "result",
    "Ok": "result",
    "Outcome": "result",
    "PerdureError": "errors",
    "PerdureWarning": "errors",
    "Retry": "retry",
    "Run": "run",
    "Runtime": "runtime",
    "Snapshot": "snapshot",
    "StepInfo": "branches",
    "Suspended": "result",
    "Workflow": "definition",
    "current_step": "branches",
    "errors": None,
    "events": None,
    "open_store": "stores",
    "register": "codec",
    "state": None,
    "step": "stepspec",
    "stores": None,
    "workflow": "definition",
}

# Names that have a home of their own to be imported from, and work from here too.
_ALSO: dict[str, str] = (
    dict.fromkeys(
        (
            "Execution",
            "FileCache",
            "KeyValueStore",
            "LossWarning",
            "MemoryCache",
            "MemoryKeyValueStore",
            "ResumeState",
            "ResumeStateCollector",
            "StatePersistence",
            "StepCache",
            "StepResult",
            "Validation",
            "assert_valid_snapshot",
            "dump_state",
            "is_step_complete",
            "looks_like_snapshot",
            "merge_snapshots",
            "parse_state",
            "validate_snapshot",
        ),
        "state",
    )
    | dict.fromkeys(
        (
            "FilesKeyValueStore",
            "MongoKeyValueStore",
            "PostgresKeyValueStore",
            "RedisKeyValueStore",
            "SQLiteKeyValueStore",
            "open_key_value_store",
        ),
        "keyvalues",
    )
    | dict.fromkeys(
        (
            "SnapshotStore",
            "StoredRun",
            "WorkflowStore",
        ),
        "stores.workflow_store",
    )
    | dict.fromkeys(("Migration", "migrate_store"), "migrating")
)

__all__ = [  # noqa: PLE0604 - built from the table, so that it cannot drift from it
    *sorted(_HOMES),
]


def __getattr__(name: str) -> Any:
    homes = {**_HOMES, **_ALSO}
    if name not in homes:
        raise AttributeError(f"module 'perdure' has no attribute {name!r}")
    home = homes[name]
    if home is None:
        return importlib.import_module(f"perdure.{name}")
    value = getattr(importlib.import_module(f"perdure.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
