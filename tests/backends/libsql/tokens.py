"""Tokens that a libSQL server accepts: JWTs signed with an Ed25519 key."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat


class KeyPair:
    """A key pair; `public_key` is what the server is started with."""

    def __init__(self) -> None:
        self._private_key = Ed25519PrivateKey.generate()
        self.public_key = self._private_key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)

    def token(self, **claims: Any) -> str:
        """A token with these claims."""
        signed = ".".join(_encode(msgspec.json.encode(part)) for part in ({"alg": "EdDSA", "typ": "JWT"}, claims))
        return f"{signed}.{_encode(self._private_key.sign(signed.encode()))}"


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
