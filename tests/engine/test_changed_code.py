"""Code changes under running runs: what is told, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from perdure import Context, Err, Ok, PerdureWarning, Suspended, Workflow, stores
from perdure.definition import definition_hash
from perdure.errors import SnapshotMismatch
from perdure.model.records import is_changed
from tests.engine.worlds import world
from tests.garbage import with_collections


async def work(label: str) -> str:
    return label


async def flow(ctx: Context[Any]) -> str:
    """The docstring is not part of it."""
    await ctx.step("old", work, "old")
    await ctx.sleep("nap", "1h")
    return "first version"


async def changed_flow(ctx: Context[Any]) -> str:
    await ctx.sleep("nap", "1h")
    return "second version"


async def resumed_with(body: Any, **options: Any) -> Any:
    """The outcome of a run of `flow` that is resumed by other code."""
    store = stores.memory()
    async with world(Workflow("flow", flow), store=store) as here:
        assert isinstance(await here.runtime.run("flow", id="run"), Suspended)
    async with world(Workflow("flow", body, **options), store=store) as here:
        return (await here.later("1h"))["run"]


async def test_the_same_code_goes_on_without_a_word() -> None:
    assert await resumed_with(flow) == Ok("first version")


async def test_changed_code_is_told_and_the_run_goes_on() -> None:
    with pytest.warns(PerdureWarning) as told:
        assert await resumed_with(changed_flow, retired={"old"}) == Ok("second version")
    (code,) = (str(warning.message) for warning in told)
    assert "the code of 'flow' has changed" in code


async def test_a_changed_definition_that_is_ignored_is_ignored() -> None:
    assert await resumed_with(changed_flow, on_definition_change="ignore", retired={"old"}) == Ok("second version")


async def test_a_changed_definition_that_is_an_error_stops_the_run() -> None:
    outcome = await resumed_with(changed_flow, on_definition_change="error", retired={"old"})
    assert isinstance(outcome, Err)
    assert isinstance(outcome.error, SnapshotMismatch)


@pytest.mark.parametrize("option", ["on_definition_change", "on_unknown_steps"])
def test_an_option_that_is_no_choice_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} is one of warn, error, ignore"):
        Workflow("flow", flow, **{option: "perhaps"})  # type: ignore[arg-type]


def test_a_hash_changes_with_the_code_and_not_with_comments_or_layout() -> None:
    async def one(ctx: Context[Any]) -> int:
        """Says something."""
        return await ctx.step("a", int, 1)  # with a comment

    first = definition_hash(one)

    async def one(ctx: Context[Any]) -> int:  # type: ignore[no-redef]
        return await ctx.step(
            "a",
            int,
            1,
        )

    second = definition_hash(one)

    async def one(ctx: Context[Any]) -> int:  # type: ignore[no-redef]
        return await ctx.step("a", int, 2)

    assert first is not None
    assert first == second != definition_hash(one)


def test_a_hash_is_the_same_whenever_a_collection_runs_code_that_makes_syntax_trees() -> None:
    assert {*with_collections(lambda: definition_hash(resumed_with))} == {definition_hash(resumed_with)}


def test_a_hash_is_the_same_in_another_process() -> None:
    program = (
        "from tests.engine.test_changed_code import flow; from perdure.definition import definition_hash as h; print(h(flow))"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == definition_hash(flow)


def test_code_without_source_and_hashes_of_another_scheme_are_not_compared() -> None:
    scope: dict[str, Any] = {}
    exec("async def made(ctx): return 1", scope)  # noqa: S102 - a function without source
    assert definition_hash(scope["made"]) is None
    assert not is_changed(None, "ast1:a")
    assert not is_changed("ast0:a", "ast1:b")
    assert is_changed("ast1:a", "ast1:b")
