"""An engine that costs its client nothing: ready bytes, one event in each write. ``python -m benches.server ...``

It runs in a process of its own, so that the client's CPU time is the client's alone, and pauses between events, as an
engine does: without pauses many events would arrive in one read.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benches.streams import cumulative, incremental

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PAUSE: Final = 0.0005  # seconds from one event to the next
_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n"
    b"connection: close\r\n\r\n"
)


@contextlib.contextmanager
def serving(mode: str, tokens: int, per_event: int, *, pause: float = PAUSE) -> Iterator[str]:
    """Serve one reply, again and again, while the block runs; the address. ``pause``: seconds before each event."""
    command = [sys.executable, "-m", "benches.server", mode, str(tokens), str(per_event), str(pause)]
    with subprocess.Popen(command, cwd=Path(__file__).parent.parent, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


async def _serve(events: Sequence[bytes], pause: float) -> None:
    chunks = [b"%x\r\n%b\r\n" % (len(event), event) for event in events]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(int(head.partition(b"content-length:")[2].split(maxsplit=1)[0]))
            writer.write(_HEAD)
            for chunk in chunks:
                await asyncio.sleep(pause)
                writer.write(chunk)
                await writer.drain()
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


def _events(mode: str, tokens: int, per_event: int) -> list[bytes]:
    stream = (incremental if mode == "incremental" else cumulative)(tokens, per_event)
    return [event + b"\n\n" for event in b"".join(stream.reads).split(b"\n\n")[:-1]]


if __name__ == "__main__":
    asyncio.run(_serve(_events(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])), float(sys.argv[4])))
