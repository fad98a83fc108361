"""Addresses of the ports that a server listens on."""

import asyncio
import errno
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from msgspec import Struct

from oncelog.errors import SettingsError

BACKLOG: Final = 4096
"""Length of the kernel's accept queue. The kernel may enforce a lower limit (`somaxconn`)."""


class ListenAddress(Struct, frozen=True):
    """The address of a port in the settings."""

    host: str
    port: int
    purpose: str = ""
    """What the port is for, in error messages, such as ` for metrics`."""
    setting: str = "port"

    async def bind(self) -> list[socket.socket]:
        """Open listening sockets on all addresses of the host. Raises SettingsError if that fails."""
        sockets: list[socket.socket] = []
        with self._translate_errors(), ExitStack() as opened:
            for family, address in await asyncio.to_thread(self._resolve):
                bound = opened.enter_context(socket.create_server(address, family=family, backlog=BACKLOG))
                bound.setblocking(False)
                sockets.append(bound)
            opened.pop_all()
        return sockets

    async def check(self) -> None:
        """Check that no other program uses the port. Raises SettingsError."""
        with self._translate_errors():
            await asyncio.to_thread(self.probe)

    def probe(self) -> None:
        """Check that this process can listen on the port. Raises OSError.

        The sockets do not listen, so that clients cannot connect yet.
        """
        for family, address in self._resolve():
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)

    def _resolve(self) -> Iterable[tuple[socket.AddressFamily, Any]]:
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except UnicodeError as error:  # an empty or overlong label
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known") from error
        return dict.fromkeys((family, address) for family, _, _, _, address in found)

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # `socket.create_server` puts the address into its error text, but this error already contains the address.
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or error
            advice = f"; stop the program that uses it, or set another {self.setting}"
            raise SettingsError(
                f"cannot listen{self.purpose} on {self.host}:{self.port}: {reason}"
                f"{advice if error.errno == errno.EADDRINUSE else ''}"
            ) from error
