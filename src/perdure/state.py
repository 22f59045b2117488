"""State you can hold: snapshots and resume states, where to keep them, and caches."""

from perdure.caches import FileCache, MemoryCache, StepCache
from perdure.events import ResumeStateCollector, is_step_complete
from perdure.kv.memory import MemoryKeyValueStore
from perdure.kv.protocol import KeyValueStore
from perdure.kv.states import StatePersistence
from perdure.snapshots.parts import Execution, LossWarning, StepResult
from perdure.snapshots.resume_state import ResumeState, dump_state, parse_state
from perdure.snapshots.snapshot import (
    Snapshot,
    Validation,
    assert_valid_snapshot,
    looks_like_snapshot,
    merge_snapshots,
    validate_snapshot,
)

__all__ = [
    "Execution",
    "FileCache",
    "KeyValueStore",
    "LossWarning",
    "MemoryCache",
    "MemoryKeyValueStore",
    "ResumeState",
    "ResumeStateCollector",
    "Snapshot",
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
]
