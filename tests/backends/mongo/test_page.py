"""The section about MongoDB on docs/stores.md: its collections and fields are there, and its queries give what it says."""

from __future__ import annotations

import asyncio
import json
import re
from datetime import UTC
from pathlib import Path
from typing import Any, Final

from perdure import Context, Runtime, Suspended, workflow
from perdure.backends.mongo import MongoStore
from tests.backends.mongo.conftest import Client

PAGE: Final = (Path(__file__).parents[3] / "docs" / "stores.md").read_text(encoding="utf-8")
SECTION: Final = PAGE.partition("### Collections and statistics")[2].partition("\n## ")[0]
COLLECTIONS, FIELDS = SECTION.split("\n| field of ")
QUERY: Final = re.compile(r"^db\.(\w+)\.aggregate\((.+)\)$", re.MULTILINE)


@workflow(on_definition_change="ignore")
async def order(ctx: Context, cents: int) -> int:
    paid = await ctx.step("pay", lambda: cents)
    if cents > 100:
        raise ValueError("declined")
    await ctx.wait_for_signal("shipped")
    return paid


def _first_cells(table: str) -> list[str]:
    """The names in the first column of a table."""
    return [name for row in re.findall(r"^\| (`.+?`) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)]


async def test_the_collections_the_fields_and_the_statistics_on_the_page_are_there(
    store: MongoStore, client: Client, database: str
) -> None:
    async with Runtime(store, [order], concurrency=0) as runtime:
        assert isinstance(await runtime.run(order, 5, id="small"), Suspended)
        for number in range(2):
            await runtime.run(order, 500, id=f"declined-{number}")
    await asyncio.to_thread(_check_the_page, client[database])


def _check_the_page(database: Any) -> None:
    assert set(_first_cells(COLLECTIONS)) == {name for name in database.list_collection_names() if name.startswith("perdure_")}
    run = database["perdure_runs"].find_one({"_id": "small"})
    fields = _first_cells(FIELDS)
    assert len(fields) > 15
    assert set(fields) <= run.keys()
    assert (run["waiting_for"], run["length"], run["tail"][0]["key"]) == (["signal:shipped"], 2, "pay")
    assert {"key", "kind", "ok", "payload", "started_at", "ended_at"} <= run["tail"][0].keys()

    queries = [(collection, json.loads(pipeline)) for collection, pipeline in QUERY.findall(SECTION)]
    by_status, by_workflow, failed, largest, sizes = (list(database[name].aggregate(query)) for name, query in queries)
    assert {row["_id"]: row["runs"] for row in by_status} == {"suspended": 1, "failed": 2}
    assert {(*row["_id"].values(), row["runs"]) for row in by_workflow} == {("order", "suspended", 1), ("order", "failed", 2)}
    assert [row["_id"] for row in failed] == ["declined-1", "declined-0"]
    updated_at = database["perdure_runs"].find_one({"_id": "declined-1"})["updated_at"]
    assert failed[0]["changed"].replace(tzinfo=UTC).timestamp() == updated_at // 1000 / 1000
    assert len(largest) == 3
    assert all(row["bytes"] > 1000 for row in largest)
    assert sizes[0]["runs"] == 3
    assert sizes[0]["indexes"].keys() == {index["name"] for index in database["perdure_runs"].list_indexes()}
    for name, query in queries[:3]:
        explained = json.dumps(database.command("explain", {"aggregate": name, "pipeline": query, "cursor": {}}), default=str)
        assert ("IXSCAN" in explained or "DISTINCT_SCAN" in explained, "COLLSCAN" in explained) == (True, False), query
