"""What a drive runs: the function of a workflow, with the arguments of the run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine
from functools import partial
from typing import Any, NamedTuple, Protocol

from perdure.codec import Codec
from perdure.codec.outcomes import Hints
from perdure.engine.drive import Drive
from perdure.errors import SnapshotCorrupt, SnapshotMismatch
from perdure.model.records import Claim, is_changed
from perdure.model.retention import RetentionRules
from perdure.snapshots.importer import Arguments


class WorkflowInput(NamedTuple):
    """The checked arguments of a run, as stored and as the body gets them."""

    encoded: bytes
    digest: bytes
    arguments: Arguments


class WorkflowDefinition(Protocol):
    """What driving a run asks of its workflow. `Workflow`, which stands in a layer above, is the only implementation."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def aliases(self) -> tuple[str, ...]: ...
    @property
    def retired(self) -> Collection[str]: ...
    @property
    def retention(self) -> RetentionRules: ...
    @property
    def fn(self) -> Callable[..., Any]: ...
    @property
    def hints(self) -> Hints: ...
    @property
    def process_options(self) -> dict[str, Any]: ...
    @property
    def definition_hash(self) -> str | None: ...
    def encode_input(self, codec: Codec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> WorkflowInput: ...
    def decode_input(self, codec: Codec, encoded: bytes) -> Arguments: ...
    def body(self, drive: Drive, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Coroutine[Any, Any, Any]: ...


def body_of(workflow: WorkflowDefinition, claim: Claim, codec: Codec) -> Callable[[Drive], Coroutine[Any, Any, Any]]:
    """The body with the stored arguments. If these cannot be read, the run does not fit the code and is stopped."""
    try:
        arguments = workflow.decode_input(codec, claim.run.input)
    except ValueError as reason:
        return partial(_refuse, SnapshotCorrupt(claim.run.id, "the input", str(reason)))
    return body_with(workflow, arguments, claim.run.definition_hash)


def body_with(
    workflow: WorkflowDefinition, arguments: Arguments, recorded_hash: str | None
) -> Callable[[Drive], Coroutine[Any, Any, Any]]:
    """The body with these arguments. It reacts if the code has another definition hash than the recorded one."""
    if is_changed(recorded_hash, workflow.definition_hash):
        return partial(_call_changed_body, workflow, arguments)
    return partial(call_body, workflow, arguments)


def call_body(workflow: WorkflowDefinition, arguments: Arguments, drive: Drive) -> Coroutine[Any, Any, Any]:
    """The body with these arguments, on this drive."""
    return workflow.body(drive, *arguments)


async def _refuse(corrupt: SnapshotCorrupt, drive: Drive) -> Any:
    drive.misfit(corrupt)


async def _call_changed_body(workflow: WorkflowDefinition, arguments: Arguments, drive: Drive) -> Any:
    reason = f"the code of {workflow.name!r} has changed since the run was created; what is recorded is matched by key"
    drive.react(drive.options.on_definition_change, SnapshotMismatch(drive.run.id, reason), "definition")
    return await workflow.body(drive, *arguments)
