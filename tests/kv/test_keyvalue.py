"""Key-value stores hold text by key, and a state in one is loaded again or refused with a reason."""

from __future__ import annotations

import fnmatch
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.errors import SnapshotFormatError
from perdure.kv.patterns import matches
from perdure.kv.protocol import KeyValueStore
from perdure.kv.states import StatePersistence
from perdure.snapshots.parts import StepResult
from perdure.snapshots.resume_state import ResumeState
from perdure.snapshots.snapshot import Snapshot
from perdure.state import MemoryKeyValueStore
from perdure.testing.clock import ManualClock
from tests.snapshots.documents import COMPLETED

STATE = ResumeState({"a": StepResult(ok=True, value=1)}, {"x": 1})


class PlainStore:
    """A store whose methods are not async."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}

    def get(self, key: str) -> str | None:
        return self.kept.get(key)

    def set(self, key: str, value: str, ttl: int | None = None) -> None:
        self.kept[key] = value

    def delete(self, key: str) -> bool:
        return self.kept.pop(key, None) is not None

    def exists(self, key: str) -> bool:
        return key in self.kept

    def keys(self, pattern: str) -> list[str]:
        return [key for key in self.kept if matches(key, pattern)]


async def test_text_is_kept_until_it_is_deleted() -> None:
    kv = MemoryKeyValueStore()
    assert (await kv.get("a"), await kv.exists("a"), await kv.delete("a")) == (None, False, False)
    await kv.set("a", "1")
    await kv.set("a", "2")
    assert (await kv.get("a"), await kv.exists("a"), await kv.delete("a")) == ("2", True, True)
    assert await kv.get("a") is None


async def test_an_expired_key_is_missing_to_every_method() -> None:
    clock = ManualClock()
    kv = MemoryKeyValueStore(clock=clock)
    for key in "abcd":
        await kv.set(key, "1", 10)
    clock.advance(9.999)
    assert await kv.keys("*") == list("abcd")
    clock.advance(0.001)
    assert (await kv.get("a"), await kv.exists("b"), await kv.delete("c"), await kv.keys("*")) == (None, False, False, [])


async def test_setting_replaces_the_ttl_and_without_one_clears_it() -> None:
    clock = ManualClock()
    kv = MemoryKeyValueStore(clock=clock)
    for key in "ab":
        await kv.set(key, "1", ttl=10)
    await kv.set("a", "2")
    await kv.set("b", "2", ttl=20)
    clock.advance(15)
    assert await kv.keys("*") == ["a", "b"]
    clock.advance(5)
    assert await kv.keys("*") == ["a"]


@pytest.mark.parametrize("ttl", [-1, float("nan"), float("inf"), "soon"])
async def test_a_ttl_that_is_no_length_of_time_is_refused(ttl: Any) -> None:
    with pytest.raises(ValueError, match="ttl"):
        await MemoryKeyValueStore().set("a", "1", ttl=ttl)


@pytest.mark.parametrize(
    ("pattern", "key", "expected"),
    [
        ("*", "", True),
        ("", "", True),
        ("", "a", False),
        ("a*", "a\nb", True),
        ("a?", "ab", False),
        ("[ab]*", "a", False),
        ("[ab]*", "[ab]c", True),
        ("a*a", "a", False),
        ("a*b*c", "a-b-c", True),
        ("a*b*c", "a-c-b", False),
        ("a.*", "ab", False),
        ("*a" * 50, "a" * 49, False),
    ],
)
def test_everything_but_a_star_is_literal_in_a_pattern(pattern: str, key: str, expected: bool) -> None:
    assert matches(key, pattern) is expected


@given(st.text("ab*", max_size=8), st.text("ab*", max_size=8))
def test_a_star_stands_for_any_text(key: str, pattern: str) -> None:
    assert matches(key, pattern) == fnmatch.fnmatchcase(key, pattern)


@pytest.mark.parametrize("make", [MemoryKeyValueStore, PlainStore])
async def test_a_state_is_saved_loaded_listed_and_deleted(make: type[MemoryKeyValueStore | PlainStore]) -> None:
    kv: KeyValueStore = make()
    states = StatePersistence(kv)
    assert (await states.load("wf-1"), await states.load_raw("wf-1"), await states.list()) == (None, None, [])
    await states.save("wf-2", Snapshot.from_dict(COMPLETED))
    await states.save("wf-1", STATE, {"y": 2})
    assert await states.load("wf-1") == ResumeState(STATE.steps, {"x": 1, "y": 2})
    assert await states.load_raw("wf-1") == (
        '{"perdurePrefix":"workflow:state:","version":1,'
        '"entries":{"a":{"result":{"ok":true,"value":1}}},"metadata":{"x":1,"y":2}}'
    )
    assert await states.list() == ["wf-1", "wf-2"]
    assert (await states.delete("wf-1"), await states.delete("wf-1"), await states.list()) == (True, False, ["wf-2"])


async def test_a_star_in_a_prefix_or_id_is_a_star() -> None:
    kv = MemoryKeyValueStore()
    await kv.set("axb:1", "")
    states = StatePersistence(kv, prefix="a*b:")
    await states.save("*", STATE)
    assert await states.list() == ["*"]
    assert await StatePersistence(kv, prefix="axb:").list() == ["1"]


@pytest.mark.parametrize("text", ["", "{", "null", "{}", '{"version":2}', '{"version":1,"entries":{"a":{}}}'])
async def test_a_state_that_cannot_be_read_is_an_error_that_names_its_key_and_stays(text: str) -> None:
    kv = MemoryKeyValueStore()
    await kv.set("workflow:state:wf-1", text)
    with pytest.raises(SnapshotFormatError, match=r"the resume state under key 'workflow:state:wf-1' cannot be read: \$"):
        await StatePersistence(kv).load("wf-1")
    assert await StatePersistence(kv).load_raw("wf-1") == text


@pytest.mark.parametrize("id_", ["", "a\0", "\ud800"])
async def test_an_id_that_not_every_store_can_hold_is_refused(id_: str) -> None:
    with pytest.raises(ValueError, match="the id of a state"):
        await StatePersistence(MemoryKeyValueStore()).save(id_, STATE)
