"""A process with 64 descriptors and a server in another one: what becomes of calls and aborts. Prints JSON."""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
from typing import Any

import uvloop

from streamfold.client.drivers.asyncio_sockets import AsyncioSockets
from streamfold.client.drivers.direct import DirectDriver
from support.driving import Driven, asked, told
from support.replay import until

SERVER = """
import asyncio, collections, json, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
seen = collections.Counter()
async def serve(reader, writer):
    try:
        while True:
            head = await reader.readuntil(b"\\r\\n\\r\\n")
            path = head.split(b" ")[1].decode()
            seen[path] += 1
            if path == "/generate":
                await reader.read()
                return
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\\r")[0]))
            body = json.dumps(seen).encode()
            writer.write(b"HTTP/1.1 200 OK\\r\\ncontent-length: %d\\r\\n\\r\\n" % len(body) + body)
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()
async def main():
    servers = [await asyncio.start_server(serve, "127.0.0.1", 0, backlog=512) for _ in range(2)]
    print(*[server.sockets[0].getsockname()[1] for server in servers], flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


async def connected(driver: DirectDriver, url: str) -> tuple[list[Driven], list[Driven]]:
    """Of more calls than there are descriptors: those that have a connection, and those that have failed."""
    calls = [Driven(driver, asked(url, connect_timeout=0.5)) for _ in range(70)]
    await until(lambda: all(call.kinds for call in calls))
    return [call for call in calls if call.kinds == ["connected"]], [call for call in calls if "failed" in call.kinds]


async def aborts(driver: DirectDriver, url: str, _: str) -> dict[str, Any]:
    streams, _failed = await connected(driver, url)
    told_all = [Driven(driver, told(url)) for _ in streams]
    failed = [driven.detail("failed").message for driven in told_all if "failed" in await driven.ended()]
    last = Driven(driver, told(url, "/seen"))
    await last.ended()
    seen = json.loads(last.exchange.take_body())
    return {"streams": len(streams), "aborts": seen["/abort_request"], "failed": failed}


async def waits(driver: DirectDriver, url: str, _: str) -> dict[str, Any]:
    streams, failed = await connected(driver, url)
    later = [Driven(driver, asked(url, connect_timeout=30)) for _ in range(10)]
    await asyncio.sleep(0.2)
    assert not any(call.kinds for call in later)
    for stream in streams[:12]:
        stream.exchange.end()
    await until(lambda: all(call.kinds for call in later))
    return {
        "failed": [call.detail("failed").message for call in failed],
        "timed_out": all(call.detail("failed").timed_out for call in failed),
        "later": sum(call.kinds == ["connected"] for call in later),
    }


async def room(driver: DirectDriver, url: str, other: str) -> dict[str, Any]:
    idle = [Driven(driver, told(url, connect_timeout=30)) for _ in range(30)]
    for driven in idle:
        await driven.ended()
    streams = [Driven(driver, asked(other, connect_timeout=30)) for _ in range(40)]
    await until(lambda: all(call.kinds for call in streams))
    return {"reached": all(call.kinds == ["connected"] for call in streams)}


async def main(script: str, ports: list[str]) -> None:
    driver = DirectDriver(AsyncioSockets(), kept_seconds=3600)
    try:
        found = await {"aborts": aborts, "waits": waits, "room": room}[script](
            driver, *(f"http://127.0.0.1:{port}" for port in ports)
        )
    finally:
        await driver.aclose()
    print(json.dumps(found))


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        ports = server.stdout.readline().split()
        try:
            {"asyncio": asyncio.run, "uvloop": uvloop.run}[sys.argv[2]](main(sys.argv[1], ports))
        finally:
            server.kill()
