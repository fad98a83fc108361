"""The server's certificate and private key: checked, loaded, and replaced while the server runs."""

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_IMODE
from typing import Final

from oncelog.doors import files
from oncelog.doors.settings import ServerSettings
from oncelog.errors import SettingsError

_DESCRIPTORS: Final = Path("/dev/fd")


class ServerCertificate:
    """The files `tls.certificate` and `tls.private_key`. Both attributes are None where TLS is not configured."""

    def __init__(self, settings: ServerSettings) -> None:
        self._paths = (settings.tls.certificate, settings.tls.private_key)
        self._check = settings.secret_check
        self.context: ssl.SSLContext | None = None
        """For HTTP. `load` changes it in place, so that open listeners use the new certificate."""
        self.pem: tuple[bytes, bytes] | None = None
        """Private key and certificate chain, for gRPC."""

    def load(self) -> None:
        """Read both files. Raises SettingsError, and keeps the certificate that was loaded before."""
        chain, key = self._paths
        if chain is None or key is None:
            return
        try:
            with self._opened(chain, key) as (chain_source, key_source):
                context = _new_context()
                # A wrong key leaves a context without any certificate, so a new context is tried first.
                _load(context, chain_source, key_source)
                pem = (Path(key_source).read_bytes(), Path(chain_source).read_bytes())
                if self.context is None:
                    self.context = context
                else:
                    _load(self.context, chain_source, key_source)
                self.pem = pem
        except (OSError, ssl.SSLError, SettingsError) as error:
            raise SettingsError(f"tls.certificate and tls.private_key cannot be used: {error}") from error

    @contextmanager
    def _opened(self, chain: str, key: str) -> Iterator[tuple[str, str]]:
        """Open both files and check the key's permissions; yield paths that lead to the opened files."""
        with files.opened(key) as (key_descriptor, found), files.opened(chain) as (chain_descriptor, _):
            files.check_secret_file(key, found.st_uid, S_IMODE(found.st_mode), "a private key", self._check)
            yield _path_of(chain_descriptor, chain), _path_of(key_descriptor, key)


def _path_of(descriptor: int, path: str) -> str:
    """Return the path of an open descriptor: OpenSSL takes paths only, and another file may have taken the name."""
    source = _DESCRIPTORS / str(descriptor)
    return str(source) if os.access(source, os.R_OK) else path


def _new_context() -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _load(context: ssl.SSLContext, chain: str, key: str) -> None:
    # With a password, even an empty one: OpenSSL would ask for that of an encrypted key on the terminal, and wait.
    context.load_cert_chain(chain, key, password="")
