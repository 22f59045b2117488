"""Ordinary Python functions made durable.

Every finished step is recorded, and after a crash, a deploy, a day-long sleep or a human's answer the function goes on where it
stopped.

Names are imported when first used, so that `import perdure` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from perdure import errors as errors
    from perdure import events as events
    from perdure import state as state
    from perdure import stores as stores
    from perdure.caches import FileCache as FileCache
    from perdure.caches import MemoryCache as MemoryCache
    from perdure.caches import StepCache as StepCache
    from perdure.codec import register as register
    from perdure.context import Context as Context
    from perdure.ctx_calls.children import Child as Child
    from perdure.ctx_calls.transactions import StepTransaction as StepTransaction
    from perdure.definition import Workflow as Workflow
    from perdure.definition import workflow as workflow
    from perdure.engine.subscriptions import Subscription as Subscription
    from perdure.errors import ApprovalAmbiguous as ApprovalAmbiguous
    from perdure.errors import ApprovalDecided as ApprovalDecided
    from perdure.errors import ApprovalExpired as ApprovalExpired
    from perdure.errors import ApprovalNotFound as ApprovalNotFound
    from perdure.errors import ChildrenOpen as ChildrenOpen
    from perdure.errors import ChildStuck as ChildStuck
    from perdure.errors import CompensationFailed as CompensationFailed
    from perdure.errors import DeadlineExceeded as DeadlineExceeded
    from perdure.errors import DuplicateStep as DuplicateStep
    from perdure.errors import ExecutorNotFound as ExecutorNotFound
    from perdure.errors import FormatProblem as FormatProblem
    from perdure.errors import InvalidInput as InvalidInput
    from perdure.errors import LeaseHeld as LeaseHeld
    from perdure.errors import LeaseLost as LeaseLost
    from perdure.errors import NotAssigned as NotAssigned
    from perdure.errors import NotUndone as NotUndone
    from perdure.errors import PerdureError as PerdureError
    from perdure.errors import PerdureWarning as PerdureWarning
    from perdure.errors import PersistenceError as PersistenceError
    from perdure.errors import RetryAfter as RetryAfter
    from perdure.errors import RunCancelled as RunCancelled
    from perdure.errors import RunConflict as RunConflict
    from perdure.errors import RunDead as RunDead
    from perdure.errors import RunDiverged as RunDiverged
    from perdure.errors import RunFinished as RunFinished
    from perdure.errors import RunInterrupted as RunInterrupted
    from perdure.errors import RunNotFound as RunNotFound
    from perdure.errors import ScheduleNotFound as ScheduleNotFound
    from perdure.errors import SnapshotCorrupt as SnapshotCorrupt
    from perdure.errors import SnapshotError as SnapshotError
    from perdure.errors import SnapshotFormatError as SnapshotFormatError
    from perdure.errors import SnapshotMismatch as SnapshotMismatch
    from perdure.errors import StepChanged as StepChanged
    from perdure.errors import StepFailed as StepFailed
    from perdure.errors import StepNotFound as StepNotFound
    from perdure.errors import StepNotPicklable as StepNotPicklable
    from perdure.errors import StepNotStopped as StepNotStopped
    from perdure.errors import StepTimeout as StepTimeout
    from perdure.errors import StepTraceback as StepTraceback
    from perdure.errors import StoreCapabilityError as StoreCapabilityError
    from perdure.errors import StoreClosed as StoreClosed
    from perdure.errors import StreamEnded as StreamEnded
    from perdure.errors import StreamFull as StreamFull
    from perdure.errors import TokenError as TokenError
    from perdure.errors import TokenExpired as TokenExpired
    from perdure.errors import TokenInvalid as TokenInvalid
    from perdure.errors import TokenNotAllowed as TokenNotAllowed
    from perdure.errors import TransactionFailed as TransactionFailed
    from perdure.errors import Unloaded as Unloaded
    from perdure.errors import ValueNotStorable as ValueNotStorable
    from perdure.events import Event as Event
    from perdure.events import LeaseChangedEvent as LeaseChangedEvent
    from perdure.events import Listener as Listener
    from perdure.events import PersistedEvent as PersistedEvent
    from perdure.events import ResumeStateCollector as ResumeStateCollector
    from perdure.events import RunCancelledEvent as RunCancelledEvent
    from perdure.events import RunCompleteEvent as RunCompleteEvent
    from perdure.events import RunContinuedEvent as RunContinuedEvent
    from perdure.events import RunErrorEvent as RunErrorEvent
    from perdure.events import RunStartEvent as RunStartEvent
    from perdure.events import RunSuspendedEvent as RunSuspendedEvent
    from perdure.events import SignalReceivedEvent as SignalReceivedEvent
    from perdure.events import StepCacheHitEvent as StepCacheHitEvent
    from perdure.events import StepCacheMissEvent as StepCacheMissEvent
    from perdure.events import StepCompleteEvent as StepCompleteEvent
    from perdure.events import StepEndedEvent as StepEndedEvent
    from perdure.events import StepErrorEvent as StepErrorEvent
    from perdure.events import StepEvent as StepEvent
    from perdure.events import StepRetryEvent as StepRetryEvent
    from perdure.events import StepSkippedEvent as StepSkippedEvent
    from perdure.events import StepStartEvent as StepStartEvent
    from perdure.events import StepSuccessEvent as StepSuccessEvent
    from perdure.events import StepTimeoutEvent as StepTimeoutEvent
    from perdure.events import WarningEvent as WarningEvent
    from perdure.events import is_step_complete as is_step_complete
    from perdure.executors.restarting import RestartingExecutor as RestartingExecutor
    from perdure.kv.dsns import open_key_value_store as open_key_value_store
    from perdure.kv.files import FilesKeyValueStore as FilesKeyValueStore
    from perdure.kv.memory import MemoryKeyValueStore as MemoryKeyValueStore
    from perdure.kv.mongo import MongoKeyValueStore as MongoKeyValueStore
    from perdure.kv.postgres import PostgresKeyValueStore as PostgresKeyValueStore
    from perdure.kv.protocol import KeyValueStore as KeyValueStore
    from perdure.kv.redis import RedisKeyValueStore as RedisKeyValueStore
    from perdure.kv.sqlite import SQLiteKeyValueStore as SQLiteKeyValueStore
    from perdure.kv.states import StatePersistence as StatePersistence
    from perdure.migration import Migration as Migration
    from perdure.migration import migrate_store as migrate_store
    from perdure.model.clock import Clock as Clock
    from perdure.model.durations import Duration as Duration
    from perdure.model.journal import Entry as Entry
    from perdure.model.records import Lease as Lease
    from perdure.model.records import RunInfo as RunInfo
    from perdure.model.records import RunRow as RunRow
    from perdure.model.records import Signal as Signal
    from perdure.model.records import Status as Status
    from perdure.model.stream_items import StreamItem as StreamItem
    from perdure.operations.approvals import PendingApproval as PendingApproval
    from perdure.operations.check_runs import CheckReport as CheckReport
    from perdure.operations.describe_run import RunDescription as RunDescription
    from perdure.operations.health import RuntimeHealth as RuntimeHealth
    from perdure.operations.many_runs import BulkRefusal as BulkRefusal
    from perdure.operations.many_runs import BulkReport as BulkReport
    from perdure.operations.replay_check import RunCheck as RunCheck
    from perdure.result import Approved as Approved
    from perdure.result import Err as Err
    from perdure.result import Expired as Expired
    from perdure.result import Ok as Ok
    from perdure.result import Outcome as Outcome
    from perdure.result import Rejected as Rejected
    from perdure.result import Suspended as Suspended
    from perdure.result import WaitingFor as WaitingFor
    from perdure.run import Run as Run
    from perdure.runtime import Runtime as Runtime
    from perdure.simple_stores import SnapshotStore as SnapshotStore
    from perdure.simple_stores import StoredRun as StoredRun
    from perdure.simple_stores import WorkflowStore as WorkflowStore
    from perdure.snapshots.parts import Execution as Execution
    from perdure.snapshots.parts import LossWarning as LossWarning
    from perdure.snapshots.parts import StepResult as StepResult
    from perdure.snapshots.resume_state import ResumeState as ResumeState
    from perdure.snapshots.resume_state import dump_state as dump_state
    from perdure.snapshots.resume_state import parse_state as parse_state
    from perdure.snapshots.snapshot import Snapshot as Snapshot
    from perdure.snapshots.snapshot import Validation as Validation
    from perdure.snapshots.snapshot import assert_valid_snapshot as assert_valid_snapshot
    from perdure.snapshots.snapshot import looks_like_snapshot as looks_like_snapshot
    from perdure.snapshots.snapshot import merge_snapshots as merge_snapshots
    from perdure.snapshots.snapshot import validate_snapshot as validate_snapshot
    from perdure.stepspec import Retry as Retry
    from perdure.stepspec import StepInfo as StepInfo
    from perdure.stepspec import current_step as current_step
    from perdure.stepspec import step as step
    from perdure.store import FullStore as FullStore
    from perdure.store import Store as Store
    from perdure.stores import open_store as open_store
    from perdure.sync import SyncRun as SyncRun
    from perdure.sync import SyncRuntime as SyncRuntime
    from perdure.sync import SyncStreamReader as SyncStreamReader
    from perdure.worker.queues import Queue as Queue
    from perdure.worker.schedules import ScheduleInfo as ScheduleInfo
    from perdure.worker.stream_reader import StreamReader as StreamReader
    from perdure.worker.worker_registry import WorkerInfo as WorkerInfo

__version__ = "0.1.0"

_MODULES: Final = ("errors", "events", "state", "stores")

# What a program needs, by the module it lives in.
_MAIN_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "codec": ("register",),
    "context": ("Context",),
    "definition": (
        "Workflow",
        "workflow",
    ),
    "errors": (
        "PerdureError",
        "PerdureWarning",
    ),
    "model.durations": ("Duration",),
    "result": (
        "Approved",
        "Err",
        "Expired",
        "Ok",
        "Outcome",
        "Rejected",
        "Suspended",
    ),
    "run": ("Run",),
    "runtime": ("Runtime",),
    "snapshots.snapshot": ("Snapshot",),
    "stepspec": (
        "Retry",
        "StepInfo",
        "current_step",
        "step",
    ),
    "stores": ("open_store",),
    "worker.queues": ("Queue",),
}

# Every other public name.
_OTHER_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "simple_stores": (
        "SnapshotStore",
        "StoredRun",
        "WorkflowStore",
    ),
    "caches": (
        "FileCache",
        "MemoryCache",
        "StepCache",
    ),
    "ctx_calls.children": ("Child",),
    "engine.subscriptions": ("Subscription",),
    "ctx_calls.transactions": ("StepTransaction",),
    "errors": (
        "ApprovalAmbiguous",
        "ApprovalDecided",
        "ApprovalExpired",
        "ApprovalNotFound",
        "ChildStuck",
        "ChildrenOpen",
        "CompensationFailed",
        "DeadlineExceeded",
        "DuplicateStep",
        "ExecutorNotFound",
        "FormatProblem",
        "InvalidInput",
        "LeaseHeld",
        "LeaseLost",
        "NotAssigned",
        "NotUndone",
        "PersistenceError",
        "RetryAfter",
        "RunCancelled",
        "RunConflict",
        "RunDead",
        "RunDiverged",
        "RunFinished",
        "RunInterrupted",
        "RunNotFound",
        "ScheduleNotFound",
        "SnapshotCorrupt",
        "SnapshotError",
        "SnapshotFormatError",
        "SnapshotMismatch",
        "StepChanged",
        "StepFailed",
        "StepNotFound",
        "StepNotPicklable",
        "StepNotStopped",
        "StepTimeout",
        "StepTraceback",
        "StoreCapabilityError",
        "StoreClosed",
        "StreamEnded",
        "StreamFull",
        "TokenError",
        "TokenExpired",
        "TokenInvalid",
        "TokenNotAllowed",
        "TransactionFailed",
        "Unloaded",
        "ValueNotStorable",
    ),
    "executors.restarting": ("RestartingExecutor",),
    "events": (
        "Event",
        "LeaseChangedEvent",
        "Listener",
        "PersistedEvent",
        "ResumeStateCollector",
        "RunCancelledEvent",
        "RunCompleteEvent",
        "RunContinuedEvent",
        "RunErrorEvent",
        "RunStartEvent",
        "RunSuspendedEvent",
        "SignalReceivedEvent",
        "StepCacheHitEvent",
        "StepCacheMissEvent",
        "StepCompleteEvent",
        "StepEndedEvent",
        "StepErrorEvent",
        "StepEvent",
        "StepRetryEvent",
        "StepSkippedEvent",
        "StepStartEvent",
        "StepSuccessEvent",
        "StepTimeoutEvent",
        "WarningEvent",
        "is_step_complete",
    ),
    "kv.dsns": ("open_key_value_store",),
    "kv.files": ("FilesKeyValueStore",),
    "kv.memory": ("MemoryKeyValueStore",),
    "kv.mongo": ("MongoKeyValueStore",),
    "kv.postgres": ("PostgresKeyValueStore",),
    "kv.protocol": ("KeyValueStore",),
    "kv.redis": ("RedisKeyValueStore",),
    "kv.sqlite": ("SQLiteKeyValueStore",),
    "kv.states": ("StatePersistence",),
    "migration": (
        "Migration",
        "migrate_store",
    ),
    "model.clock": ("Clock",),
    "model.journal": ("Entry",),
    "model.stream_items": ("StreamItem",),
    "model.records": (
        "Lease",
        "RunInfo",
        "RunRow",
        "Signal",
        "Status",
    ),
    "result": ("WaitingFor",),
    "snapshots.parts": (
        "Execution",
        "LossWarning",
        "StepResult",
    ),
    "snapshots.resume_state": (
        "ResumeState",
        "dump_state",
        "parse_state",
    ),
    "snapshots.snapshot": (
        "Validation",
        "assert_valid_snapshot",
        "looks_like_snapshot",
        "merge_snapshots",
        "validate_snapshot",
    ),
    "store": ("FullStore", "Store"),
    "sync": (
        "SyncRun",
        "SyncRuntime",
        "SyncStreamReader",
    ),
    "operations.approvals": ("PendingApproval",),
    "operations.check_runs": ("CheckReport",),
    "operations.describe_run": ("RunDescription",),
    "operations.health": ("RuntimeHealth",),
    "operations.many_runs": (
        "BulkRefusal",
        "BulkReport",
    ),
    "operations.replay_check": ("RunCheck",),
    "worker.schedules": ("ScheduleInfo",),
    "worker.stream_reader": ("StreamReader",),
    "worker.worker_registry": ("WorkerInfo",),
}

_MODULE_OF: Final = {name: module for table in (_MAIN_NAMES, _OTHER_NAMES) for module, names in table.items() for name in names}

__all__ = [  # noqa: PLE0604 - built from the tables, so that it cannot drift from them
    *sorted((*_MODULES, *(name for names in _MAIN_NAMES.values() for name in names))),
]


if not TYPE_CHECKING:  # checkers know the names above and no others

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f"perdure.{name}")
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'perdure' has no attribute {name!r}")
        value = getattr(importlib.import_module(f"perdure.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__
