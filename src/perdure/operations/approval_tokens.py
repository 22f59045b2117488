"""Approval tokens: signed texts by which one person may decide one approval.

    version (1 byte) | key id (4) | HMAC-SHA256 of all the rest (32) | what is allowed, as JSON         in base64url

What is allowed names the store's namespace, the run, the approval by its key and its random id, the actions, the person and the
expiry, so nothing of a link can be changed and no token is good for anything else. The approval's id also keeps a token from a
run that was deleted and started again under the same id. Single use follows from the approval: it is decided once.

Each secret gives a key for tokens and nothing else, derived by HMAC, and an id for it: that is how a token says which of several
secrets signed it, without showing anything of the secret.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias, cast, get_args

import msgspec

from perdure.errors import TokenExpired, TokenInvalid, TokenNotAllowed
from perdure.model.approvals import new_nonce
from perdure.model.durations import MAX_INSTANT, Duration, microseconds, moment
from perdure.model.ids import check_id
from perdure.operations.approvals import Approval, Verdict, decide, find_approval, iso
from perdure.worker.host import Host

Secret: TypeAlias = bytes | str
DecidingAction: TypeAlias = Literal["approve", "reject"]
TokenAction: TypeAlias = Literal["approve", "reject", "both"]

_VERSION: Final = b"\1"
_LEAST_SECRET_BYTES: Final = 32
_KEY_ID_BYTES: Final = 4
_MAC_BYTES: Final = hashlib.sha256().digest_size
_HEAD_BYTES: Final = len(_VERSION) + _KEY_ID_BYTES + _MAC_BYTES
# Longer than any that is made: ids and keys have at most 1,024 bytes each, which JSON may write as six times as many.
_MAX_TOKEN_CHARS: Final = 64 * 1024


class Grant(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a token allows, to whom, and until when. The nonce makes two tokens for the same thing different texts."""

    namespace: str
    run_id: str
    name: str
    key: str
    approval_id: str
    actions: tuple[DecidingAction, ...]
    by: str
    expires_at: int
    nonce: str

    def check_action(self, action: DecidingAction) -> None:
        """Raise unless the token allows this."""
        if action not in self.actions:
            raise TokenNotAllowed(action, " or ".join(self.actions))


class TokenSigner:
    """Signs and verifies tokens with the keys of one or several secrets: the first signs."""

    __slots__ = ("_keys",)

    def __init__(self, secrets: Secret | Sequence[Secret]) -> None:
        given = [secrets] if isinstance(secrets, bytes | str) else list(secrets)
        if not given:
            raise ValueError("secret= is empty; pass at least one secret")
        # By key id; a dict keeps the order.
        self._keys = dict(_derive_key(each) for each in given)

    def __repr__(self) -> str:
        return f"<TokenSigner with {len(self._keys)} keys>"

    def __reduce__(self) -> str:
        raise TypeError("secrets are not pickled; make the Runtime in each process")

    def sign(self, grant: Grant) -> str:
        """The token for this."""
        key_id, key = next(iter(self._keys.items()))
        content = msgspec.json.encode(grant)
        signed = _VERSION + key_id + _mac(key, key_id, content) + content
        return base64.urlsafe_b64encode(signed).rstrip(b"=").decode()

    def verify(self, token: str) -> Grant:
        """What the token allows. Raises `TokenInvalid`: nothing of a token is looked at before its signature is right."""
        signed = _decode(token)
        key_id, mac, content = signed[1 : _KEY_ID_BYTES + 1], signed[_KEY_ID_BYTES + 1 : _HEAD_BYTES], signed[_HEAD_BYTES:]
        key = self._keys.get(key_id)
        if signed[:1] != _VERSION or key is None or not hmac.compare_digest(_mac(key, key_id, content), mac):
            raise TokenInvalid
        return msgspec.json.decode(content, type=Grant)


def _derive_key(secret: Any) -> tuple[bytes, bytes]:
    if not isinstance(secret, bytes | str):
        raise TypeError(f"secret= takes bytes or text, or a list of them, not {type(secret).__name__}")
    plain = secret.encode() if isinstance(secret, str) else secret
    if len(plain) < _LEAST_SECRET_BYTES:
        raise ValueError(f"a secret must have at least {_LEAST_SECRET_BYTES} bytes, and one has {len(plain)}")
    key = hmac.digest(plain, b"perdure approval token 1", "sha256")
    return hmac.digest(key, b"key id", "sha256")[:_KEY_ID_BYTES], key


def _mac(key: bytes, key_id: bytes, content: bytes) -> bytes:
    return hmac.digest(key, _VERSION + key_id + content, "sha256")


def _decode(token: Any) -> bytes:
    if not isinstance(token, str) or len(token) > _MAX_TOKEN_CHARS or not token.isascii():
        raise TokenInvalid
    try:
        signed = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
    except binascii.Error:
        raise TokenInvalid from None
    # Base64 has several texts for the same bytes; only the one that was made is good.
    if base64.urlsafe_b64encode(signed).rstrip(b"=").decode() != token or len(signed) < _HEAD_BYTES:
        raise TokenInvalid
    return signed


def _namespace(host: Host) -> str:
    """The namespace of the store. Its address is left out: a web server may know the database under another than a worker."""
    return host.store.key[-1]


async def make_token(
    host: Host,
    signer: TokenSigner,
    run_id: str,
    name: str,
    by: str,
    action: TokenAction,
    expires_in: Duration,
    key: str | None,
) -> str:
    """A token for the approval that is pending under this name. It expires with the approval at the latest."""
    if action not in get_args(TokenAction):
        raise ValueError(f"action is one of {', '.join(get_args(TokenAction))}, not {action!r}")
    length = microseconds(expires_in, what="expires_in")
    check_id(by, "by")
    await host.ask_time(again=True)
    approval = await find_approval(host, run_id, name, key)
    now = host.clock.now()
    approval.check_pending(now)
    approval.check_assigned(by)
    deadline = approval.asked.deadline
    grant = Grant(
        namespace=_namespace(host),
        run_id=run_id,
        name=approval.opened.name,
        key=approval.opened.key,
        approval_id=approval.asked.id,
        actions=("approve", "reject") if action == "both" else (action,),
        by=by,
        expires_at=min(now + length, MAX_INSTANT if deadline is None else deadline),
        nonce=new_nonce(),
    )
    return signer.sign(grant)


async def read_token(host: Host, signer: TokenSigner, token: str) -> tuple[Grant, Approval]:
    """What the token allows, and the approval it is about, which may be decided. Raises `TokenInvalid`, `TokenExpired`.

    An approval that was decided says so rather than that the token is too old.
    """
    grant = signer.verify(token)
    if grant.namespace != _namespace(host):
        raise TokenInvalid
    await host.ask_time(again=True)
    approval = await find_approval(host, grant.run_id, grant.name, approval_id=grant.approval_id)
    now = host.clock.now()
    approval.check_pending(now)
    if grant.expires_at <= now:
        raise TokenExpired(iso(moment(grant.expires_at)))
    return grant, approval


async def decide_by_token(
    host: Host, signer: TokenSigner, token: str, action: DecidingAction, payload: Any, reason: str | None
) -> None:
    """Decide what the token is about, as the person it was made for."""
    if action not in get_args(DecidingAction):
        raise ValueError(f"action is one of {', '.join(get_args(DecidingAction))}, not {action!r}")
    grant, _ = await read_token(host, signer, token)
    grant.check_action(action)
    decision = cast("Literal['approved', 'rejected']", {"approve": "approved", "reject": "rejected"}[action])
    verdict = Verdict(decision, grant.by, payload, reason)
    await decide(host, grant.run_id, grant.name, verdict, approval_id=grant.approval_id)
