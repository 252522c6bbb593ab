"""Faults of the machine under a server: its clock, its disk, its network and its memory."""

from __future__ import annotations

import asyncio
import os
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from doubles.tcp import tcp_connection, tcp_server
from perf.harness import PerfError

_STATE = struct.Struct("=3q")


def built_library(folder: Path) -> Path:
    """`preload.c` as a library in the folder. Raises PerfError without a C compiler."""
    library = folder / "preload.so"
    source = Path(__file__).with_name("preload.c")
    words = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise PerfError("There is no C compiler (cc), which the clock's and the disk's faults need.") from None
    if done.returncode:
        raise PerfError(f"The preloaded library does not compile:\n{done.stderr}")
    return library


class FaultyMachine:
    """The clock and the disk of processes that are started with `environment`; faults take effect at once."""

    def __init__(self, library: Path, state: Path, folder: Path) -> None:
        """`state`: a file of this object; `folder`: the files whose disk becomes slow or full."""
        self.environment = {
            "LD_PRELOAD": str(library),
            "SPACESERVE_CHAOS_STATE": str(state),
            "SPACESERVE_CHAOS_FOLDER": str(folder),
        }
        self._state = state
        self._clock_seconds, self._write_seconds, self._is_full = 0.0, 0.0, False
        self._write()

    def set_clock(self, seconds: float) -> None:
        """Move the calendar clock that much ahead of the machine's, or behind it."""
        self._clock_seconds = seconds
        self._write()

    def set_disk(self, *, write_seconds: float = 0.0, is_full: bool = False) -> None:
        """`write_seconds`: that each write takes longer."""
        self._write_seconds, self._is_full = write_seconds, is_full
        self._write()

    def _write(self) -> None:
        values = (round(self._clock_seconds * 1e9), round(self._write_seconds * 1e6), int(self._is_full))
        descriptor = os.open(self._state, os.O_WRONLY | os.O_CREAT)  # in place: processes have mapped the file
        try:
            os.write(descriptor, _STATE.pack(*values))
        finally:
            os.close(descriptor)


class NetworkLink:
    """A TCP port in front of another, whose connections can be broken or held.

    async with NetworkLink("127.0.0.1:9100") as link:
        link.address; link.drop(); link.hold(); link.mend()
    """

    def __init__(self, target: str) -> None:
        """`target`: HOST:PORT."""
        self.address = ""
        self._target = target
        self._flows = asyncio.Event()
        self._flows.set()
        self._is_down = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._server = tcp_server(self._connected)

    async def __aenter__(self) -> NetworkLink:
        self.address = await self._server.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        self.drop()
        await self._server.__aexit__(None, None, None)

    def drop(self) -> None:
        """Break all connections; new ones are closed at once."""
        self._is_down = True
        for writer in self._writers:
            writer.transport.abort()

    def hold(self) -> None:
        """Let no byte through; connections stay open."""
        self._flows.clear()

    def mend(self) -> None:
        self._is_down = False
        self._flows.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            await self._flows.wait()
            if not self._is_down:
                async with tcp_connection(self._target) as (back, there):
                    await self._pass_on(reader, writer, back, there)
        except OSError:
            pass
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, back: asyncio.StreamReader,
        there: asyncio.StreamWriter,
    ) -> None:  # fmt: skip
        self._writers.add(there)
        pumps = [asyncio.create_task(self._pump(reader, there)), asyncio.create_task(self._pump(back, writer))]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._writers.discard(there)
            for pump in pumps:
                pump.cancel()
            await asyncio.wait(pumps)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await reader.read(1 << 16):
                await self._flows.wait()
                writer.write(piece)
                await writer.drain()


async def press_memory(mebibytes: int, seconds: float) -> None:
    """Hold so much memory, every page written, in a process of its own."""
    code = f"import time; block = b'x' * ({mebibytes} << 20); time.sleep({seconds})"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    try:
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
