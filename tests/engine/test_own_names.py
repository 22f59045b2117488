"""Names that perdure makes for itself are turned back into what a user wrote, whatever that was."""

from __future__ import annotations

import pytest

from perdure.errors import name_key, name_step
from perdure.model.own_names import (
    approval_address,
    awaited_by_user,
    compensation_key,
    numbered_key,
    parts_of,
)
from perdure.result import WaitingFor


@pytest.mark.parametrize("name", ["refund", "a:b", "perdure", "ü" * 100, "%cancel"])
def test_an_approval_is_told_apart_from_a_signal(name: str) -> None:
    assert awaited_by_user("signal", approval_address(name, "0" * 32)) == WaitingFor("approval", name)
    assert awaited_by_user("signal", name) == WaitingFor("signal", name)
    assert str(WaitingFor("approval", "refund")) == "approval 'refund'"


@pytest.mark.parametrize("use", [1, 2, 17])
@pytest.mark.parametrize("key", ["pay", "/scope/pay", "%257", "pay/2"])
def test_a_child_is_named_by_its_key_however_often_it_was_started(key: str, use: int) -> None:
    assert awaited_by_user("child", numbered_key(key, use)) == WaitingFor("child", key)


@pytest.mark.parametrize("key", ["charge", "/scope/charge", "x" * 1024, "f" * 64])
def test_a_compensation_has_the_key_of_its_step(key: str) -> None:
    assert parts_of(compensation_key(key), ["other", key]) == ("compensation", key)
    assert parts_of(key) == ("call", key)


def test_messages_name_keys_as_they_were_written() -> None:
    assert name_key("charge") == "'charge'"
    assert name_key(compensation_key("charge")) == "the compensation of 'charge'"
    assert name_key("%cancel") == "the cancellation of the run"
    assert [name_step(key) for key in ("charge", compensation_key("charge"))] == ["step 'charge'", "the compensation of 'charge'"]
