"""The pages behind approval links, through ASGI as a server calls them: GET shows, POST decides, each error has its page."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from typing import Any, NamedTuple
from urllib.parse import urlencode

import pytest

from perdure import Context, Ok, PersistenceError, workflow
from perdure.operations.approval_app import ApprovalApp
from tests.engine.approving import SECRET, Desk, desk
from tests.engine.worlds import world


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    text: str

    @property
    def title(self) -> str:
        return html.unescape(re.findall("<h1>(.*?)</h1>", self.text)[0])


async def request(app: ApprovalApp, method: str, path: str, body: bytes | list[bytes] = b"", kind: str | None = None) -> Reply:
    parts, sent = [body] if isinstance(body, bytes) else list(body), list[Any]()

    async def receive() -> dict[str, Any]:
        if not parts:
            return {"type": "http.disconnect"}
        part = parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [] if kind is None else [(b"Content-Type", kind.encode())]
    await app({"type": "http", "method": method, "path": path, "headers": headers}, receive, send)
    start, content = sent
    assert [start["type"], content["type"]] == ["http.response.start", "http.response.body"]
    found = {name.decode(): value.decode() for name, value in start["headers"]}
    assert int(found["content-length"]) == len(content["body"])
    return Reply(start["status"], found, content["body"].decode())


async def click(app: ApprovalApp, token: str, **fields: str) -> Reply:
    return await request(app, "POST", f"/approvals/{token}", urlencode(fields).encode(), "application/x-www-form-urlencoded")


async def token_of(here: Desk, **options: Any) -> tuple[ApprovalApp, str]:
    await here.ask("run")
    return here.runtime.approval_app(), await here.runtime.approval_token("run", "publish", by="ada", **options)


async def test_get_shows_what_is_asked_and_decides_nothing() -> None:
    async with desk() as here:
        app, token = await token_of(here)
        for path in (f"/{token}", f"/approvals/{token}", f"/deep/down/{token}"):
            for _ in range(3):
                page = await request(app, "GET", path)
                assert (page.status, page.title) == (200, "publish")
                assert all(
                    part in page.text for part in ("news of run", "Asked by press", "You decide as ada", 'value="approve"')
                )
        assert len(await here.runtime.approvals()) == 1


async def test_post_decides_and_a_second_click_says_what_was_decided() -> None:
    async with desk() as here:
        app, token = await token_of(here)
        first = await click(app, token, action="approve", reason="ignored")
        assert (first.status, first.title) == (200, "Approved")
        again = await click(app, token, action="reject")
        assert (again.status, again.title) == (409, "Already decided")
        assert "approved by &#x27;ada&#x27; at 2026-01-01T00:00:00Z" in again.text
        shown = await request(app, "GET", f"/{token}")
        assert (shown.status, shown.title) == (409, "Already decided")
        assert await here.runtime.sweep() == {"run": Ok("ada approved news of run at 00:00")}
        assert (await request(app, "GET", f"/{token}")).status == 409
        assert len(here.press.published) == 1


async def test_a_rejection_has_its_reason() -> None:
    async with desk() as here:
        app, token = await token_of(here)
        page = await click(app, token, action="reject", reason=" zu kurz, <b>ä</b> ")
        assert (page.status, page.title) == (200, "Rejected")
        assert await here.runtime.sweep() == {"run": Ok("ada rejected it at 00:00: zu kurz, <b>ä</b>")}


async def test_each_error_has_its_page_and_status() -> None:
    async with desk() as here:
        app, token = await token_of(here, action="reject", expires_in="10m")
        other = await here.runtime.approval_token("run", "publish", by="ada", expires_in="2h")
        found = {
            "cut off": await request(app, "GET", f"/{token[:-1]}"),
            "tampered": await click(app, "B" + token[1:], action="reject"),
            "nothing": await request(app, "GET", "/"),
            "other action": await click(app, token, action="approve"),
        }
        here.clock.advance("10m")
        found["late link"] = await request(app, "GET", f"/{token}")
        found["late click"] = await click(app, token, action="reject")
        here.clock.advance("1h")
        found["too late"] = await click(app, other, action="approve")
        await here.runtime.delete("run")
        found["deleted"] = await request(app, "GET", f"/{other}")
        await here.ask("run")
        found["new run of this id"] = await click(app, other, action="approve")
        cancelled = await here.runtime.approval_token("run", "publish", by="ada")
        await here.runtime.cancel("run")
        await here.runtime.sweep()
        found["ended"] = await click(app, cancelled, action="approve")
        assert {what: (page.status, page.title) for what, page in found.items()} == {
            "cut off": (403, "This link is not valid"),
            "tampered": (403, "This link is not valid"),
            "nothing": (403, "This link is not valid"),
            "other action": (403, "This link is for something else"),
            "late link": (410, "This link has expired"),
            "late click": (410, "This link has expired"),
            "too late": (410, "Too late"),
            "deleted": (404, "No longer there"),
            "new run of this id": (404, "No longer needed"),
            "ended": (410, "No longer needed"),
        }
        assert here.press.published == []


@pytest.mark.parametrize("method", ["HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
async def test_other_methods_are_refused(method: str) -> None:
    async with desk() as here:
        app, token = await token_of(here)
        page = await request(app, method, f"/{token}", b"action=approve", "application/x-www-form-urlencoded")
        assert (page.status, page.headers["allow"]) == (405, "GET, POST")
        assert len(await here.runtime.approvals()) == 1


FORM = "application/x-www-form-urlencoded"


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"", FORM, 400),
        (b"action=", FORM, 400),
        (b"action=delete", FORM, 400),
        (b"action=approve&action=reject", FORM, 400),
        (b"action=approve&reason=%ff", FORM, 400),
        (b"action=reject&reason=" + b"x" * 10_001, FORM, 400),
        ("action=ä".encode(), FORM, 400),
        (b"&".join(b"a%d=1" % n for n in range(20)) + b"&action=approve", FORM, 400),
        (b'{"action": "approve"}', "application/json", 415),
        (b"action=approve", "text/plain", 415),
        (b"action=approve", None, 415),
        ([b"x" * 70_000] * 100, FORM, 413),
    ],
    ids=lambda value: repr(value)[:40],
)
async def test_a_wrong_form_decides_nothing(body: Any, kind: str | None, status: int) -> None:
    async with desk() as here:
        app, token = await token_of(here)
        assert (await request(app, "POST", f"/{token}", body, kind)).status == status
        assert len(await here.runtime.approvals()) == 1


async def test_a_form_in_parts_is_read_and_a_client_that_leaves_decides_nothing() -> None:
    async with desk() as here:
        app, token = await token_of(here)
        kind = "Application/X-WWW-Form-URLencoded; charset=utf-8"
        with pytest.raises(ValueError, match="not enough values"):  # there was no reply
            await request(app, "POST", f"/{token}", [], kind)
        assert len(await here.runtime.approvals()) == 1
        assert (await request(app, "POST", f"/{token}", [b"action=appr", b"ove"], kind)).status == 200


async def test_nothing_of_a_run_is_taken_for_html() -> None:
    evil = '<script>alert("1")</script>&amp;\u202e'

    @workflow(name=f"flow {evil}")
    async def flow(ctx: Context[Any], payload: Any) -> None:
        await ctx.approve(evil, payload)

    async with world(flow, secret=SECRET) as here:
        app = here.runtime.approval_app()
        for run_id, payload in (
            (f"{evil}1", {evil: evil, "n": [evil], "o": {evil: 1}}),
            (f"{evil}2", evil),
            (f"{evil}3", [evil]),
        ):
            await here.runtime.run(flow, payload, id=run_id)
            token = await here.runtime.approval_token(run_id, evil, by=evil)
            for page in (await request(app, "GET", f"/{token}"), await click(app, token, action=evil), await click(app, evil)):
                assert "<script" not in page.text
                assert "\u202e" not in page.text, "text cannot be shown in another direction than it is read"
                assert "&amp;amp;" in page.text or page.status != 200
            await here.runtime.reject(run_id, evil, by=evil)
            decided = await click(app, token, action="approve")
            assert decided.status == 409
            assert "<script" not in decided.text


async def test_pages_are_not_cached_send_no_referrer_and_run_no_code() -> None:
    async with desk() as here:
        app, token = await token_of(here)
        for page in (await request(app, "GET", f"/{token}"), await click(app, "x"), await request(app, "PUT", "/")):
            assert page.headers["cache-control"] == "no-store"
            assert page.headers["referrer-policy"] == "no-referrer"
            assert page.headers["x-content-type-options"] == "nosniff"
            policy = page.headers["content-security-policy"]
            (style,) = re.findall("<style>(.*?)</style>", page.text, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
            assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}'; ")
            assert "script" not in policy
            assert not re.findall(r"style=|<script|\son\w+=|https?:", page.text), "nothing that the policy would block"
            assert token not in page.text


async def test_a_store_that_is_away_is_reported_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    async with desk() as here:
        app, token = await token_of(here)

        async def away(*_: Any, **__: Any) -> None:
            raise PersistenceError("the store", "is away, password=hunter2")

        monkeypatch.setattr(here.runtime.store, "get", away)
        page = await click(app, token, action="approve")
        assert (page.status, page.title) == (503, "Not possible now")
        assert "hunter2" not in page.text


async def test_it_takes_part_in_lifespan_and_refuses_websockets() -> None:
    async with desk() as here:
        app = here.runtime.approval_app()
        messages, sent = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}], list[Any]()

        async def receive() -> Any:
            return messages.pop(0)

        async def send(message: Any) -> None:
            sent.append(message["type"])

        await app({"type": "lifespan"}, receive, send)
        await app({"type": "websocket", "path": "/"}, receive, send)
        assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete", "websocket.close"]
