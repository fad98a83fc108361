"""A server that speaks the PostgreSQL protocol and knows no user."""

import socket
import struct
import threading


class PasswordServer:
    """Speaks the PostgreSQL protocol up to authentication, and rejects every password."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._refuse_all)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"postgresql://ann:secret@127.0.0.1:{self._listening.getsockname()[1]}/orders"

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join()

    def _refuse_all(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            with connection:
                self._refuse(connection)

    def _refuse(self, connection: socket.socket) -> None:
        data = connection.recv(4096)
        if data[4:8] == struct.pack("!i", 80877103):  # TLS request
            connection.sendall(b"N")
            data = connection.recv(4096)
        if data:
            connection.sendall(b"R" + struct.pack("!ii", 8, 3))
            connection.recv(4096)
            refusal = b'SFATAL\0VFATAL\0C28P01\0Mpassword authentication failed for user "ann"\0\0'
            connection.sendall(b"E" + struct.pack("!i", 4 + len(refusal)) + refusal)
