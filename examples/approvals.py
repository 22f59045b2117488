"""A release that a person approves through a link, in a web application of any framework.

    python examples/approvals.py

The links are served by `runtime.approval_app()`, an ASGI application. Here a few lines stand for the web server and the browser:

    ada opens her link: 200, asked about 4.2
    a mail scanner opens it too: 200
    still nothing is deployed: []
    ada clicks on Approve: 200
    ada clicks twice: 409
    bob's link comes too late: 409
    a link that was changed: 403
    deployed ['4.2'], approved by ada
"""

import asyncio
import re
import secrets
from typing import Any

from perdure import Approved, Context, Runtime, stores, workflow

deployed: list[str] = []
links: dict[str, str] = {}


async def deploy(version: str) -> None:
    deployed.append(version)


async def mail_link(run_id: str, person: str) -> None:
    token = await runtime.approval_token(run_id, "release", by=person)
    links[person] = f"/approvals/{token}"  # here a mail would be sent


@workflow
async def release(ctx: Context, version: str) -> str:
    people = ["ada", "bob"]
    decision, *_ = await asyncio.gather(
        ctx.approve("release", {"version": version}, expires_in="1d", assignees=people),
        *(ctx.step(mail_link, ctx.run_id, person, key=f"mail:{person}") for person in people),
    )
    if not isinstance(decision, Approved):
        return "not deployed"
    await ctx.step(deploy, decision.payload["version"])
    return f"approved by {decision.by}"


# In a program the secret comes from its settings, and is the same in all its processes.
runtime = Runtime(stores.memory(), [release], secret=secrets.token_bytes(32))
app = runtime.approval_app()


async def request(method: str, path: str, body: bytes = b"") -> tuple[int, str]:
    """What a browser gets: the status and the page."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/x-www-form-urlencoded")]
    await app({"type": "http", "method": method, "path": path, "headers": headers}, receive, send)
    return sent[0]["status"], sent[1]["body"].decode()


async def main() -> None:
    async with runtime:
        run = await runtime.start(release, "4.2", id="release-4.2")
        await run.outcome()  # the links are sent, and the run waits
        status, page = await request("GET", links["ada"])
        print(f"ada opens her link: {status}, asked about {re.findall('<td>(.*?)</td>', page)[0]}")
        print(f"a mail scanner opens it too: {(await request('GET', links['ada']))[0]}")
        print(f"still nothing is deployed: {deployed}")
        print(f"ada clicks on Approve: {(await request('POST', links['ada'], b'action=approve'))[0]}")
        print(f"ada clicks twice: {(await request('POST', links['ada'], b'action=approve'))[0]}")
        print(f"bob's link comes too late: {(await request('POST', links['bob'], b'action=reject&reason=no'))[0]}")
        print(f"a link that was changed: {(await request('GET', links['ada'][:-1]))[0]}")
        value = await run
        print(f"deployed {deployed}, {value}")


if __name__ == "__main__":
    asyncio.run(main())
