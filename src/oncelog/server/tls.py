"""The server's certificate and private key, which can be replaced while the server runs."""

import os
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

from oncelog.errors import SettingsError
from oncelog.server.auth import secret_files
from oncelog.server.auth.secret_files import FileContents, SecretCheck
from oncelog.server.limits import TLS_FILE_BYTES_MAX, TLS_HANDSHAKE_BYTES_MAX
from oncelog.server.settings import ServerSettings

_DESCRIPTOR_DIRECTORY: Final = Path("/dev/fd")


class ServerCertificate:
    """The content of `tls.certificate` and `tls.private_key`. The attributes have values only with TLS."""

    def __init__(self, settings: ServerSettings, check: SecretCheck | None = None) -> None:
        """`check` replaces the check of the private key's permissions that the settings specify."""
        self._settings = settings
        self._check = settings.secret_check if check is None else check
        self.context: ssl.SSLContext | None = None
        """The context for HTTP. `load` changes it in place, so that open listeners use the new certificate."""
        self.pem: tuple[bytes, bytes] | None = None
        """The private key and certificate chain for gRPC."""

    def load(self) -> None:
        """Read each file once. Raises SettingsError on failure, and keeps the previously loaded certificate."""
        chain_path, key_path = self._settings.tls.certificate, self._settings.tls.private_key
        if chain_path is None or key_path is None:
            return
        try:
            key, chain = (
                secret_files.read_file(key_path, TLS_FILE_BYTES_MAX),
                secret_files.read_file(chain_path, TLS_FILE_BYTES_MAX),
            )
            key.check_secret("a private key", self._check)
            context = _new_context()
            # A wrong key leaves a context without a certificate, so try the files in a new context first.
            _load_chain(context, chain, key)
            if self.context is None:
                self.context = context
            else:
                _load_chain(self.context, chain, key)
        except SettingsError as error:
            raise SettingsError(f"tls.certificate and tls.private_key cannot be used: {error}") from error
        self.pem = (key.data, chain.data)


class LimitedHandshake(ssl.SSLObject):
    """A TLS connection that fails if the client sends too many bytes before the handshake is complete.

    Without it, OpenSSL buffers a ClientHello of up to 128 KiB, and a second one after a HelloRetryRequest.
    """

    incoming: ssl.MemoryBIO
    """Bytes from the client that OpenSSL has not read yet."""
    handshake_bytes = 0

    def do_handshake(self) -> None:
        """Continue the handshake. The event loop calls it after every read."""
        pending_bytes = self.incoming.pending
        try:
            super().do_handshake()
        except ssl.SSLWantReadError:  # incomplete: all pending bytes belong to the handshake
            self.handshake_bytes += pending_bytes
            if self.handshake_bytes <= TLS_HANDSHAKE_BYTES_MAX:
                raise
            message = f"the handshake has more than {TLS_HANDSHAKE_BYTES_MAX} bytes"
            raise ssl.SSLError(ssl.SSL_ERROR_SSL, message) from None


class ServerContext(ssl.SSLContext):
    """A server's TLS context, which limits the size of handshakes."""

    sslobject_class = LimitedHandshake

    def wrap_bio(self, incoming: ssl.MemoryBIO, *arguments: Any, **options: Any) -> ssl.SSLObject:
        """See `ssl.SSLContext`. The event loop calls it for every connection."""
        handshake = super().wrap_bio(incoming, *arguments, **options)
        assert isinstance(handshake, LimitedHandshake)  # noqa: S101 - `sslobject_class`
        handshake.incoming = incoming
        return handshake


def _new_context() -> ssl.SSLContext:
    """Return a context with the server defaults of `ssl.create_default_context`."""
    context = ServerContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _load_chain(context: ssl.SSLContext, chain: FileContents, key: FileContents) -> None:
    """Load a certificate and its key into a context. Raises SettingsError if OpenSSL refuses them."""
    try:
        with _open_path(chain) as chain_path, _open_path(key) as key_path:
            # Without this argument OpenSSL would prompt for an encrypted key's password on the terminal.
            context.load_cert_chain(chain_path, key_path, password="")
    except ssl.SSLError as error:
        raise SettingsError(_describe_problem(error, chain, key)) from error
    except OSError as error:
        raise SettingsError(f"{chain.path} and {key.path} cannot be loaded: {error.strerror}") from error


def _describe_problem(error: ssl.SSLError, chain: FileContents, key: FileContents) -> str:
    """Explain why OpenSSL refused the files. Its errors do not identify the file."""
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"the private key in {key.path} does not match the certificate in {chain.path}"
    if b"ENCRYPTED" in key.data:
        return (
            f"the private key in {key.path} is encrypted, and the server has no password for it. Store it unencrypted"
        )
    for contents, kind in ((chain, "CERTIFICATE"), (key, "PRIVATE KEY")):
        if f"{kind}-----".encode() not in contents.data:
            return f"{contents.path} contains no PEM {kind.lower()}"
    return f"OpenSSL refuses {chain.path} or {key.path}: {error.reason or error}"


@contextmanager
def _open_path(contents: FileContents) -> Iterator[str]:
    """Yield a path from which OpenSSL, which accepts only paths, reads the bytes that the server has checked.

    The original file may have been replaced meanwhile. On systems where a descriptor has no path, OpenSSL reads the
    original file.
    """
    with _open_memory_file() as file:
        source = _DESCRIPTOR_DIRECTORY / str(file.fileno())
        if not os.access(source, os.R_OK):
            yield contents.path
            return
        file.write(contents.data)
        file.seek(0)  # flushes, and rewinds on systems where the path shares the file position
        yield str(source)


def _open_memory_file() -> IO[bytes]:
    """Return an empty, unnamed file, in memory where the system supports it."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("oncelog-tls", os.MFD_CLOEXEC), "w+b")
    return tempfile.TemporaryFile()
