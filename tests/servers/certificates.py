"""Certificates for servers of tests: each is for localhost, and signed by itself."""

from __future__ import annotations

import datetime as dt
import shutil
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat


class Certificate(NamedTuple):
    """A certificate, and the key to it."""

    certificate: Path
    key: Path


def make_certificate(directory: Path, name: str = "server", *, user: str | None = None) -> Certificate:
    """A certificate for localhost in two files of this directory, whose key only the user can read."""
    key = generate_private_key(SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    today = dt.datetime.now(dt.UTC)
    signed = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(today - dt.timedelta(days=1))
        .not_valid_after(today + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    made = Certificate(directory / f"{name}.pem", directory / f"{name}.key")
    made.certificate.write_bytes(signed.public_bytes(Encoding.PEM))
    made.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    made.key.chmod(0o600)
    if user is not None:
        shutil.chown(made.key, user)
    return made
