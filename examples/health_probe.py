"""A worker that answers HTTP probes on a port of its own, with nothing but the standard library.

    python examples/health_probe.py

`GET /` gives 200 while the store replies and the worker claims runs, otherwise 503 with the reasons. Here the program probes
itself: while it works, and after the worker has stopped. It prints:

    200 {"ok": true, "reasons": []}
    503 {"ok": false, "reasons": ["this Runtime was closed", "the worker has stopped"]}
"""

import asyncio
import json
import sys
import tempfile
from pathlib import Path

from perdure import Context, Runtime, workflow


@workflow
async def nothing(ctx: Context) -> None: ...


async def serve_probe(runtime: Runtime) -> asyncio.Server:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        health = await runtime.health(timeout="1s")
        body = json.dumps({"ok": health.ok, "reasons": health.reasons})
        status = "200 OK" if health.ok else "503 Service Unavailable"
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()

    return await asyncio.start_server(answer, "127.0.0.1", 0)


async def fetch(port: int) -> str:
    """The status and the body, as a container platform sees them."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    return f"{head.split()[1]} {body}"


async def main(store: str) -> None:
    runtime = Runtime(store, [nothing])
    async with await serve_probe(runtime) as server:
        port = server.sockets[0].getsockname()[1]
        async with runtime:
            print(await fetch(port))
        print(await fetch(port))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else f"sqlite:///{Path(folder) / 'runs.db'}"))
