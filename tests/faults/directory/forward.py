"""A process that forwards connections from one port of loopback to another, until it is stopped: `forward.py FROM TO`."""

from __future__ import annotations

import asyncio
import sys


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
    except OSError:
        pass
    finally:
        sink.close()


async def _main(listen: int, target: int) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", target)
        await asyncio.gather(_pump(reader, back), _pump(there, writer))

    server = await asyncio.start_server(connected, "127.0.0.1", listen)
    await server.serve_forever()


asyncio.run(_main(int(sys.argv[1]), int(sys.argv[2])))
