"""Approval tokens: good for one approval, one person, some actions and some time, and for nothing else."""

from __future__ import annotations

import asyncio
import base64
import pickle
import secrets
import string
import traceback
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure import (
    ApprovalDecided,
    ApprovalExpired,
    ApprovalNotFound,
    Context,
    NotAssigned,
    Ok,
    Runtime,
    TokenError,
    TokenExpired,
    TokenInvalid,
    TokenNotAllowed,
    Workflow,
    stores,
)
from perdure.operations.approval_tokens import Grant, TokenSigner
from tests.engine.approving import SECRET, desk
from tests.engine.worlds import world

GRANT = Grant("", "run", "publish", "publish", "0" * 32, ("approve", "reject"), "ada", 1_800_000_000_000_000, "n")
SIGNER = TokenSigner(SECRET)
TOKEN = SIGNER.sign(GRANT)
ALPHABET = string.ascii_letters + string.digits + "-_"


async def test_a_token_decides_as_the_person_it_was_made_for_and_only_once() -> None:
    async with desk() as here:
        await here.ask("run")
        token = await here.runtime.approval_token("run", "publish", by="ada")
        assert set(token) <= set(ALPHABET), "it can stand in a link as it is"
        await here.runtime.decide_by_token(token, "approve")
        for action in ("approve", "reject"):
            with pytest.raises(ApprovalDecided, match="approved by 'ada'"):
                await here.runtime.decide_by_token(token, action)
        assert await here.runtime.sweep() == {"run": Ok("ada approved news of run at 00:00")}
        with pytest.raises(ApprovalDecided):
            await here.runtime.decide_by_token(token, "reject")
        assert len(here.press.published) == 1


async def test_of_many_uses_of_one_token_at_once_one_counts() -> None:
    async with desk() as here:
        await here.ask("run")
        token = await here.runtime.approval_token("run", "publish", by="ada")
        uses = (here.runtime.decide_by_token(token, "approve") for _ in range(20))
        replies = await asyncio.gather(*uses, return_exceptions=True)
        assert [type(reply) for reply in replies].count(ApprovalDecided) == 19
        assert replies.count(None) == 1
        await here.runtime.sweep()
        assert len(here.press.published) == 1


@pytest.mark.parametrize(("action", "other"), [("approve", "reject"), ("reject", "approve")])
async def test_a_token_for_one_action_allows_no_other(action: Any, other: Any) -> None:
    async with desk() as here:
        await here.ask("run")
        token = await here.runtime.approval_token("run", "publish", by="ada", action=action)
        with pytest.raises(TokenNotAllowed, match=f"allows to {action} and not to {other}"):
            await here.runtime.decide_by_token(token, other)
        assert len(await here.runtime.approvals()) == 1
        await here.runtime.decide_by_token(token, action)
        await here.runtime.sweep()
        assert len(here.press.published) == (action == "approve")


async def test_a_late_token_decides_nothing() -> None:
    async with desk() as here:
        await here.ask("run")
        token = await here.runtime.approval_token("run", "publish", by="ada", expires_in="10m")
        here.clock.advance(timedelta(minutes=10) - timedelta(microseconds=1))
        assert (await here.runtime.approvals())[0].run_id == "run"
        here.clock.advance(timedelta(microseconds=1))
        with pytest.raises(TokenExpired, match="valid until 2026-01-01T00:10:00Z"):
            await here.runtime.decide_by_token(token, "approve")
        fresh = await here.runtime.approval_token("run", "publish", by="ada", expires_in="10d")
        here.clock.advance("1h")  # a token lives no longer than its approval
        with pytest.raises(ApprovalExpired):
            await here.runtime.decide_by_token(fresh, "approve")
        assert await here.runtime.sweep() == {"run": Ok("expired at 01:00")}
        assert here.press.published == []


async def test_a_token_is_good_for_its_own_run_only() -> None:
    async with desk() as here:
        await here.ask("one", "two")
        token = await here.runtime.approval_token("one", "publish", by="ada")
        await here.runtime.decide_by_token(token, "approve")
        assert await here.runtime.sweep() == {"one": Ok("ada approved news of one at 00:00")}
        # One who knows the layout cannot point it to another run either.
        signed = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
        forged = base64.urlsafe_b64encode(signed.replace(b'"one"', b'"two"')).rstrip(b"=").decode()
        with pytest.raises(TokenInvalid):
            await here.runtime.decide_by_token(forged, "approve")
        assert [each.run_id for each in await here.runtime.approvals()] == ["two"]


async def test_a_token_is_good_for_its_own_approval_only_also_beside_another_of_the_same_name() -> None:
    async def flow(ctx: Context[Any]) -> list[str]:
        both = await asyncio.gather(*(ctx.approve("publish", title, key=title) for title in ("news", "weather")))
        return [type(each).__name__ for each in both]

    definition = Workflow("flow", flow)
    async with world(definition, secret=SECRET) as here:
        await here.runtime.run(definition, id="run")
        token = await here.runtime.approval_token("run", "publish", by="ada", key="weather")
        await here.runtime.decide_by_token(token, "approve")
        assert [each.key for each in await here.runtime.approvals()] == ["news"]
        await here.runtime.reject("run", "publish", by="ada")
        assert await here.runtime.sweep() == {"run": Ok(["Rejected", "Approved"])}


async def test_a_token_is_not_good_for_a_new_run_of_the_same_id() -> None:
    async with desk() as here:
        await here.ask("run")
        token = await here.runtime.approval_token("run", "publish", by="ada")
        await here.runtime.delete("run")
        await here.ask("run")
        with pytest.raises(ApprovalNotFound):
            await here.runtime.decide_by_token(token, "approve")
        assert len(await here.runtime.approvals()) == 1


async def test_a_token_is_good_for_its_own_namespace_only() -> None:
    store = stores.memory(prefix="one")
    async with desk(store=store) as here:
        await here.ask("run")
        token = await here.runtime.approval_token("run", "publish", by="ada")
        other = Runtime(stores.memory(prefix="two"), concurrency=0, secret=SECRET)
        with pytest.raises(TokenInvalid):
            await other.decide_by_token(token, "approve")
        await other.close()


async def test_a_token_is_made_only_for_what_this_person_may_decide_now() -> None:
    async with desk(assignees=["ada"]) as here:
        await here.ask("run")
        with pytest.raises(NotAssigned):
            await here.runtime.approval_token("run", "publish", by="bob")
        with pytest.raises(ApprovalNotFound):
            await here.runtime.approval_token("run", "print", by="ada")
        with pytest.raises(ValueError, match="approve, reject, both"):
            await here.runtime.approval_token("run", "publish", by="ada", action="delete")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="approve, reject, not 'both'"):
            await here.runtime.decide_by_token("x", "both")  # type: ignore[arg-type]
        await here.runtime.reject("run", "publish", by="ada")
        with pytest.raises(ApprovalDecided):
            await here.runtime.approval_token("run", "publish", by="ada")


@given(at=st.integers(0, len(TOKEN) - 1), char=st.sampled_from(ALPHABET))
def test_no_character_of_a_token_can_be_changed(at: int, char: str) -> None:
    changed = TOKEN[:at] + char + TOKEN[at + 1 :]
    if changed != TOKEN:
        with pytest.raises(TokenInvalid):
            SIGNER.verify(changed)


@given(text=st.one_of(st.text(), st.text(ALPHABET), st.integers(0, len(TOKEN) - 1).map(lambda n: TOKEN[:n]), st.binary()))
def test_nothing_else_is_a_token(text: Any) -> None:
    for wrong in (text, TOKEN + "A", TOKEN + "=", f" {TOKEN}"):
        with pytest.raises(TokenInvalid):
            SIGNER.verify(wrong)


@given(changes=st.fixed_dictionaries({}, optional={
    "run_id": st.just("other"), "key": st.just("other"), "approval_id": st.just("1" * 32), "by": st.just("eve"),
    "actions": st.just(("approve",)), "expires_at": st.just(1_900_000_000_000_000), "namespace": st.just("other"),
}).filter(bool))  # fmt: skip
def test_a_signature_is_good_for_no_other_content(changes: dict[str, Any]) -> None:
    signed = base64.urlsafe_b64decode(TOKEN + "=" * (-len(TOKEN) % 4))
    content = msgspec.json.encode(GRANT)
    assert signed.endswith(content)
    forged = signed[: -len(content)] + msgspec.json.encode(msgspec.structs.replace(GRANT, **changes))
    with pytest.raises(TokenInvalid):
        SIGNER.verify(base64.urlsafe_b64encode(forged).rstrip(b"=").decode())


def test_the_first_secret_signs_and_all_verify() -> None:
    old, new = secrets.token_bytes(32), secrets.token_hex(32)
    before, between, after = TokenSigner(old), TokenSigner([new, old]), TokenSigner(new)
    assert between.verify(before.sign(GRANT)) == GRANT
    assert after.verify(between.sign(GRANT)) == GRANT
    for signer, token in ((after, before.sign(GRANT)), (before, between.sign(GRANT))):
        with pytest.raises(TokenInvalid):
            signer.verify(token)


def test_text_and_its_bytes_are_the_same_secret() -> None:
    assert TokenSigner(SECRET.encode()).verify(TOKEN) == GRANT


@pytest.mark.parametrize("wrong", ["", "x" * 31, b"x" * 31, [], ["x" * 31], [SECRET, "short"], 7, [7], {"a": 1}], ids=repr)
def test_a_secret_that_is_too_short_is_refused_and_not_shown(wrong: Any) -> None:
    with pytest.raises((ValueError, TypeError)) as refused:
        Runtime(stores.memory(), secret=wrong)
    assert "xxx" not in str(refused.value)


async def test_without_a_secret_there_are_no_tokens() -> None:
    runtime = Runtime(stores.memory(), concurrency=0)
    for call in (lambda: runtime.approval_token("run", "it", by="ada"), lambda: runtime.decide_by_token("x", "approve")):
        with pytest.raises(ValueError, match=r"Runtime\(secret=\.\.\.\)"):
            await call()
    with pytest.raises(ValueError, match=r"Runtime\(secret=\.\.\.\)"):
        runtime.approval_app()
    await runtime.close()


async def test_secrets_and_tokens_are_in_no_error_log_or_repr(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with desk() as here:
        await here.ask("run")
        token = await here.runtime.approval_token("run", "publish", by="ada", expires_in="1m")
        texts = [repr(SIGNER), repr(here.runtime.approval_app()), repr(vars(here.runtime))]
        here.clock.advance("5m")
        for wrong in (token, token[:-1], token + "A"):
            try:
                await here.runtime.decide_by_token(wrong, "approve")
            except TokenError as error:
                texts += [str(error), repr(error), *traceback.format_exception(error)]
        with pytest.raises(TypeError, match="not pickled"):
            pickle.dumps(SIGNER)
        key = next(iter(SIGNER._keys.values()))
        for text in (*texts, caplog.text):
            assert token not in text
            assert SECRET not in text
            assert repr(key)[2:-1] not in text
