"""A throw-away S3 server: moto's, as a process of its own, or one as trusting whose endpoint PERDURE_TEST_S3 names."""

from __future__ import annotations

import atexit
import functools
import http.client
import os
import sys
from typing import Any, Final
from urllib.parse import urlsplit

from tests.servers.process import Process, free_port

VARIABLE: Final = "PERDURE_TEST_S3"

# One request after the other: moto checks a condition and writes in two steps, which are one only that way. But each is read
# whole before it is its turn, so that a client that is stopped in the middle of a request stops nobody else.
_SERVER: Final = """
import io, sys, threading
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, run_simple

moto = DomainDispatcherApplication(create_backend_app)
turn = threading.Lock()

def answer(environ, start_response):
    environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)))
    with turn:
        return [b"".join(moto(environ, start_response))]

WSGIRequestHandler.protocol_version = "HTTP/1.1"
run_simple("127.0.0.1", int(sys.argv[1]), answer, threaded=True)
"""


class S3Server:
    """An S3 server for tests. What it holds is in its memory, so `kill` loses everything."""

    def __init__(self) -> None:
        self._given = os.environ.get(VARIABLE)
        self._process: Process | None = None
        self._port = 0

    @property
    def endpoint(self) -> str:
        """How to reach it."""
        return self._given or f"http://127.0.0.1:{self._port}"

    @property
    def process(self) -> Process:
        """Its process. Raises RuntimeError when it is somebody else's, or was not started."""
        if self._process is None:
            raise RuntimeError("this S3 server was not started here")
        return self._process

    def start(self) -> None:
        """Start it and return when it answers. Raises RuntimeError when moto is not installed."""
        if self._given is None:
            self._process = Process("s3")
            self._port = free_port()
            self._process.start([sys.executable, "-c", _SERVER, str(self._port)], self._answers)

    def remove(self) -> None:
        """Stop it."""
        if self._process is not None:
            self._process.remove()
            self._process = None

    def make_bucket(self, name: str) -> None:
        """Have an empty bucket. Raises RuntimeError when the server refuses."""
        status = self._ask("PUT", f"/{name}")
        if status != http.client.OK:
            raise RuntimeError(f"the S3 server answered {status} when bucket {name!r} was to be made")

    def options(self) -> dict[str, Any]:
        """What `obstore.store.S3Store(bucket, **options)` needs."""
        return options_for(self.endpoint)

    def _answers(self) -> bool:
        try:
            return self._ask("GET", "/") == http.client.OK
        except OSError:
            return False

    def _ask(self, method: str, path: str) -> int:
        connection = http.client.HTTPConnection(urlsplit(self.endpoint).netloc, timeout=10)
        try:
            connection.request(method, path)
            return connection.getresponse().status
        finally:
            connection.close()


def options_for(endpoint: str) -> dict[str, Any]:
    """What `obstore.store.S3Store(bucket, **options)` needs for a bucket at this endpoint."""
    return {
        "endpoint": endpoint,
        "region": "us-east-1",
        "access_key_id": os.environ.get("AWS_ACCESS_KEY_ID", "test"),
        "secret_access_key": os.environ.get("AWS_SECRET_ACCESS_KEY", "test"),
        "client_options": {"allow_http": True},
    }


@functools.cache
def shared_server() -> S3Server:
    """The one server of this process's tests, started by the first who asks and removed when the process ends."""
    server = S3Server()
    server.start()
    atexit.register(server.remove)
    return server
