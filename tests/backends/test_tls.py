"""Encryption against real servers with a certificate of their own making: who is trusted, and who is not.

Each store is opened in another process: drivers read certificates on the event loop, which the tests' guard does not let pass.
"""

from __future__ import annotations

import pwd
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import pytest

from tests.backends.places import directory
from tests.backends.registry import MYSQL, POSTGRES, REDIS, Backend
from tests.servers.certificates import Certificate, make_certificate
from tests.servers.mysql import MysqlServer
from tests.servers.postgres import PostgresServer, unprivileged_user
from tests.servers.process import free_port
from tests.servers.redis import RedisServer

PROGRAM: Final = """
import asyncio, sys
from perdure import open_store
from perdure.errors import PersistenceError

async def main():
    store = open_store(sys.argv[1])
    try:
        async with asyncio.timeout(10):
            await store.setup()
        print("connected")
    except PersistenceError as error:
        print(error)
    await store.close()

asyncio.run(main())
"""


class TlsServer(NamedTuple):
    """A server that takes only encrypted connections: its DSN for a host, and the options of three kinds of clients."""

    dsn: str  # with {host}
    trusting: str  # with {ca}, the certificate that is trusted
    by_default: str
    without_verifying: str


def start_mysql(made: Certificate) -> tuple[MysqlServer, TlsServer]:
    server = MysqlServer(f"ssl-cert={made.certificate}", f"ssl-key={made.key}", "require-secure-transport=ON", own=True)
    server.start()
    dsn = server.dsn.replace("127.0.0.1", "{host}")
    return server, TlsServer(dsn, "?ssl_ca={ca}", "?ssl=true", "?ssl_mode=REQUIRED")


def start_postgres(made: Certificate) -> tuple[PostgresServer, TlsServer]:
    server = PostgresServer("ssl=on", f"ssl_cert_file={made.certificate}", f"ssl_key_file={made.key}", own=True)
    server.start()
    dsn = server.dsn.replace("127.0.0.1", "{host}").replace("?sslmode=disable", "")
    trusting = "?sslmode=verify-full&sslrootcert={ca}"
    return server, TlsServer(dsn, trusting, "?sslmode=verify-full", "?sslmode=require")


def start_redis(made: Certificate) -> tuple[RedisServer, TlsServer]:
    port = free_port()
    options = {"--tls-port": port, "--tls-cert-file": made.certificate, "--tls-key-file": made.key, "--tls-auth-clients": "no"}
    options["--tls-ca-cert-file"] = made.certificate
    server = RedisServer(*(str(part) for option in options.items() for part in option))
    server.start()
    return server, TlsServer(
        f"rediss://{{host}}:{port}/0", "?ssl_ca_certs={ca}", "", "?ssl_cert_reqs=none&ssl_check_hostname=false"
    )


Start: TypeAlias = Callable[[Certificate], tuple[MysqlServer | PostgresServer | RedisServer, TlsServer]]


def mysql_user() -> str | None:
    return "mysql" if unprivileged_user() and "mysql" in {entry.pw_name for entry in pwd.getpwall()} else unprivileged_user()


STARTS: Final[dict[Backend, tuple[Start, Callable[[], str | None]]]] = {
    MYSQL: (start_mysql, mysql_user),
    POSTGRES: (start_postgres, unprivileged_user),
    REDIS: (start_redis, lambda: None),
}


@pytest.fixture(scope="module")
def certificates() -> Iterator[Path]:
    """A directory that every user can enter, as the servers run under users of their own."""
    with directory() as inside:
        inside.chmod(0o755)
        make_certificate(inside, "other")
        yield inside


@pytest.fixture(scope="module", params=STARTS, ids=str)
def server(request: pytest.FixtureRequest, certificates: Path) -> Iterator[TlsServer]:
    start, user = STARTS[request.param]
    server, tls = start(make_certificate(certificates, "server", user=user()))
    yield tls
    server.remove()


def connect(dsn: str) -> str:
    """What a client says in the end."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, dsn], capture_output=True, text=True, check=False, timeout=60)
    return (done.stdout or done.stderr).strip()


def test_a_server_with_a_certificate_of_a_trusted_authority_is_connected_to(server: TlsServer, certificates: Path) -> None:
    trusting = server.trusting.format(ca=certificates / "server.pem")
    assert connect(server.dsn.format(host="localhost") + trusting) == "connected"


def test_a_server_that_no_trusted_authority_vouches_for_is_refused(server: TlsServer, certificates: Path) -> None:
    trusting = server.trusting.format(ca=certificates / "other.pem")
    assert "certificate verify failed" in connect(server.dsn.format(host="localhost") + trusting).lower()
    said = connect(server.dsn.format(host="localhost") + server.by_default).lower()
    assert "certificate" in said
    assert "connected" not in said


def test_a_certificate_of_another_host_is_refused(server: TlsServer, certificates: Path) -> None:
    trusting = server.trusting.format(ca=certificates / "server.pem")
    assert "certificate" in connect(server.dsn.format(host="127.0.0.1") + trusting).lower()


def test_encryption_without_verifying_has_to_be_asked_for(server: TlsServer) -> None:
    assert connect(server.dsn.format(host="localhost") + server.without_verifying) == "connected"
