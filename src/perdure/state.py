"""State you can hold: snapshots and resume states, where to keep them, and caches."""

from perdure.caches import FileCache, MemoryCache, StepCache
from perdure.collector import ResumeStateCollector
from perdure.keyvalue import KeyValueStore
from perdure.keyvalues.in_memory import MemoryKeyValueStore
from perdure.resume import ResumeState, StatePersistence, dump_state, is_step_complete, parse_state
from perdure.snapshot import Execution, LossWarning, Snapshot, StepResult, merge_snapshots
from perdure.snapshot_validation import Validation, assert_valid_snapshot, looks_like_snapshot, validate_snapshot

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
