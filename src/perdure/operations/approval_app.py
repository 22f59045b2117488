"""The ASGI application behind the links in which approval tokens are sent: `GET /TOKEN` shows, `POST /TOKEN` decides.

GET decides nothing, since mail scanners and chat programs open every link. The token is the whole proof of who asks, so pages are
never cached, send no referrer and load nothing. A page about an error says what the error says, and no more.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, NamedTuple, TypeAlias
from urllib.parse import parse_qs

from perdure.errors import (
    ApprovalDecided,
    ApprovalExpired,
    ApprovalNotFound,
    InvalidInput,
    NotAssigned,
    PerdureError,
    RunFinished,
    RunNotFound,
    TokenExpired,
    TokenInvalid,
    TokenNotAllowed,
)
from perdure.model.approvals import MAX_REASON_CHARS
from perdure.model.logs import log
from perdure.operations.approval_pages import STYLE_HASH, render_decision, render_message, render_request
from perdure.operations.approval_tokens import TokenSigner, decide_by_token, read_token
from perdure.operations.approvals import UNCHANGED
from perdure.worker.host import Host

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

# A form with a reason: each character may take three times four bytes.
_MAX_BODY_BYTES: Final = 12 * MAX_REASON_CHARS + 1024
_FORM: Final = b"application/x-www-form-urlencoded"
_HEADERS: Final = (
    (b"content-type", b"text/html; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-robots-tag", b"noindex, nofollow"),
    (b"x-frame-options", b"DENY"),
    (
        b"content-security-policy",
        f"default-src 'none'; style-src '{STYLE_HASH}'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'".encode(),
    ),
)


class _ApprovalPage(NamedTuple):
    status: int
    html: str
    headers: tuple[tuple[bytes, bytes], ...] = ()


class _Refused(Exception):
    """The request itself is wrong; it has this page."""

    def __init__(self, status: int, title: str, text: str, *headers: tuple[bytes, bytes]) -> None:
        super().__init__(title)
        self.page = _ApprovalPage(status, render_message(title, text), headers)


class ApprovalApp:
    """An ASGI 3 application. Mount it under any path."""

    def __init__(self, host: Host, signer: TokenSigner) -> None:
        self._host = host
        self._signer = signer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            page = await self._answer(scope, receive)
            if page is not None:
                await _send_page(send, page)
        elif scope["type"] == "lifespan":
            await _live(receive, send)
        else:
            await send({"type": "websocket.close", "code": 1000})

    async def _answer(self, scope: Scope, receive: Receive) -> _ApprovalPage | None:
        """The page for a request; None when its client is gone."""
        token = scope["path"].rpartition("/")[2]
        try:
            if scope["method"] == "GET":
                grant, approval = await read_token(self._host, self._signer, token)
                return _ApprovalPage(200, render_request(approval.pending(), grant.by, grant.actions))
            if scope["method"] == "POST":
                return await self._decide(token, scope, receive)
            raise _Refused(405, "Not possible", "This page is opened or its form is sent.", (b"allow", b"GET, POST"))
        except _Refused as refused:
            return refused.page
        except PerdureError as error:
            return _error_page(error)

    async def _decide(self, token: str, scope: Scope, receive: Receive) -> _ApprovalPage | None:
        self._signer.verify(token)  # before anything of the body is read
        body = await _read_form(scope, receive)
        if body is None:
            return None
        fields = _parse_form(body)
        action, reason = fields.get("action", ""), fields.get("reason", "").strip() or None
        if action not in ("approve", "reject"):
            raise _Refused(400, "Not understood", "The form says neither approve nor reject.")
        if reason is not None and len(reason) > MAX_REASON_CHARS:
            raise _Refused(400, "Too long", f"A reason has at most {MAX_REASON_CHARS:,} characters.")
        is_approval = action == "approve"
        await decide_by_token(
            self._host, self._signer, token, "approve" if is_approval else "reject", UNCHANGED, None if is_approval else reason
        )
        return _ApprovalPage(200, render_decision(is_approval=is_approval))


async def _read_form(scope: Scope, receive: Receive) -> bytes | None:
    headers = {name.lower(): value for name, value in scope["headers"]}
    if headers.get(b"content-type", b"").partition(b";")[0].strip().lower() != _FORM:
        raise _Refused(415, "Not understood", "A decision is sent as the form of this page.")
    body: bytes = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > _MAX_BODY_BYTES:
            raise _Refused(413, "Too long", f"A decision has at most {_MAX_BODY_BYTES:,} bytes.")
        if not message.get("more_body"):
            return body


def _parse_form(body: bytes) -> dict[str, str]:
    try:
        fields = parse_qs(body.decode("ascii"), strict_parsing=True, keep_blank_values=True, errors="strict", max_num_fields=10)
    except ValueError:
        raise _Refused(400, "Not understood", "The form cannot be read.") from None
    if any(len(values) > 1 for values in fields.values()):
        raise _Refused(400, "Not understood", "A field of the form stands there twice.")
    return {name: values[0] for name, values in fields.items()}


# The status and title of the page about each error. The text is the error's, or for people who cannot know a run, our own.
_ERROR_PAGES: Final[dict[type[PerdureError], tuple[int, str, str | None]]] = {
    TokenInvalid: (
        403,
        "This link is not valid",
        "It was changed or cut off. Open it once more from the message that it came in.",
    ),
    TokenNotAllowed: (403, "This link is for something else", None),
    NotAssigned: (403, "Not for you to decide", None),
    TokenExpired: (410, "This link has expired", "Ask for a new one; nothing has been decided yet."),
    ApprovalExpired: (410, "Too late", None),
    ApprovalDecided: (409, "Already decided", None),
    RunFinished: (410, "No longer needed", "What asked for this has ended without a decision."),
    RunNotFound: (404, "No longer there", "What asked for this does not exist any more."),
    ApprovalNotFound: (404, "No longer needed", "This is not asked any more, and there is nothing to decide."),
    InvalidInput: (400, "Not possible", None),
}


def _error_page(error: PerdureError) -> _ApprovalPage:
    found = _ERROR_PAGES.get(type(error))
    if found is None:  # the store is down, for instance
        log.error("an approval page could not be shown, or its decision not taken: %s", error)
        return _ApprovalPage(
            503, render_message("Not possible now", "The system does not answer. Nothing is lost: try again later.")
        )
    status, title, text = found
    said = str(error)
    return _ApprovalPage(status, render_message(title, f"{said[:1].upper()}{said[1:]}." if text is None else text))


async def _send_page(send: Send, page: _ApprovalPage) -> None:
    body = page.html.encode()
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": page.status, "headers": [*_HEADERS, *page.headers, length]})
    await send({"type": "http.response.body", "body": body})


async def _live(receive: Receive, send: Send) -> None:
    """There is nothing to start or to stop: the runtime is the caller's."""
    while (await receive())["type"] == "lifespan.startup":
        await send({"type": "lifespan.startup.complete"})
    await send({"type": "lifespan.shutdown.complete"})
