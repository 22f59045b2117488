"""How a MySQL DSN asks for encryption."""

from __future__ import annotations

import asyncio
import ssl

import pytest

from perdure.backends.mysql import MysqlStore
from perdure.backends.mysql.address import parse_address
from perdure.errors import PersistenceError


@pytest.mark.parametrize(
    ("options", "verified", "name_verified"),
    [
        ("ssl=true", ssl.CERT_REQUIRED, True),
        ("ssl_mode=VERIFY_IDENTITY", ssl.CERT_REQUIRED, True),
        ("ssl_mode=verify_ca", ssl.CERT_REQUIRED, False),
        ("ssl=true&ssl_mode=REQUIRED", ssl.CERT_NONE, False),
    ],
)
def test_certificates_are_verified_unless_the_dsn_says_otherwise(
    options: str, verified: ssl.VerifyMode, name_verified: bool
) -> None:
    context = parse_address(f"mysql://u@h/d?{options}").arguments()["ssl"]
    assert (context.verify_mode, context.check_hostname) == (verified, name_verified)


@pytest.mark.parametrize("options", ["", "?ssl=false", "?ssl_mode=DISABLED"])
def test_encryption_can_be_left_out(options: str) -> None:
    assert "ssl" not in parse_address(f"mysql://u@h/d{options}").arguments()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("ssl=yes", "'true' or 'false'"),
        ("ssl_mode=PREFERRED", "one of DISABLED, REQUIRED, VERIFY_CA, VERIFY_IDENTITY"),
        ("ssl=true&ssl_mode=DISABLED", "contradict"),
        ("ssl=false&ssl_mode=REQUIRED", "contradict"),
        ("ssl_ca=ca.pem&ssl_mode=REQUIRED", "no certificate is verified"),
        ("ssl_ca=ca.pem&ssl=false", "no certificate is verified"),
    ],
)
def test_contradictions_are_refused(options: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_address(f"mysql://u@h/d?{options}")


async def test_an_authority_that_cannot_be_read_is_an_error_at_once() -> None:
    store = MysqlStore("mysql://u@127.0.0.1:1/d?ssl_ca=/nowhere/ca.pem")
    with pytest.raises(PersistenceError, match="its ssl_ca cannot be read"):
        async with asyncio.timeout(5):
            await store.setup()
    await store.close()
