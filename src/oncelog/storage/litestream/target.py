"""Targets of continuous backups: a directory, or a prefix in a bucket of an S3-compatible store."""

import re
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from msgspec import Struct

from oncelog.errors import SettingsError

_FILE: Final = "file://"
_S3: Final = "s3://"
_SCHEME_PATTERN: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_BUCKET_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{2,62}")
_PREFIX_PATTERN: Final = re.compile(r"[A-Za-z0-9!_.*'()/=+ -]+")
DEFAULT_REGION: Final = "us-east-1"
"""Region that is sent to an S3-compatible store if none is set. Such stores usually ignore it."""


class BackupTarget(Struct, frozen=True):
    """Location of a continuous backup. It contains no credentials."""

    name: str
    """The URL, for messages."""
    replica: dict[str, Any]
    """The target in Litestream's configuration."""

    @property
    def is_remote(self) -> bool:
        """Whether the target is reached over the network."""
        return bool(self.replica["type"] != "file")

    @property
    def directory(self) -> Path | None:
        """The directory of a `file://` target."""
        return None if self.is_remote else Path(self.replica["path"])


def decode_replica(replica: dict[str, Any]) -> BackupTarget:
    """Return the target for an entry of Litestream's configuration."""
    place = replica["path"] if replica["type"] == "file" else f"{replica['bucket']}/{replica['path']}"
    return BackupTarget(f"{_FILE if replica['type'] == 'file' else _S3}{place}", replica)


def is_target(destination: str) -> bool:
    """Return whether a name is a URL of a backup target, rather than a path or a database address."""
    return destination.lower().startswith((_FILE, _S3))


def parse_target(url: str, endpoint: str | None = None, region: str | None = None) -> BackupTarget:
    """Parse `file://DIR` or `s3://BUCKET/PREFIX`. `endpoint` and `region` are for S3 only. Raises SettingsError.

    Messages quote only the scheme of a URL that may contain credentials.
    """
    scheme = _SCHEME_PATTERN.match(url)
    if scheme is None or not is_target(url):
        found = scheme[0] if scheme else "something else"
        raise SettingsError(f"a backup target is file://DIR or s3://BUCKET/PREFIX, but the URL begins with {found}")
    place = url[scheme.end() :]
    if url.lower().startswith(_FILE):
        return _parse_directory(place, endpoint)
    return _parse_bucket(place, endpoint, region)


def _parse_directory(place: str, endpoint: str | None) -> BackupTarget:
    if endpoint is not None:
        raise SettingsError("--endpoint is for s3:// targets; a file:// target has none")
    if not place:
        raise SettingsError("file:// needs a directory, for example file:///var/backups/orders")
    directory = Path(place).absolute()
    if directory.exists() and not directory.is_dir():
        raise SettingsError(
            f"{directory} is a file, and a continuous backup is a directory. Give a directory after file://, or leave "
            "out file:// to copy the log into a file once."
        )
    return BackupTarget(f"{_FILE}{directory}", {"type": "file", "path": str(directory)})


def _parse_bucket(place: str, endpoint: str | None, region: str | None) -> BackupTarget:
    bucket, _, prefix = place.partition("/")
    prefix = prefix.strip("/")
    if "@" in bucket or ":" in bucket:
        raise SettingsError(
            "an s3:// URL must not contain credentials, because other users of the machine can read command lines. Set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment, and write s3://BUCKET/PREFIX."
        )
    if "?" in place or "#" in place:
        raise SettingsError("an s3:// URL must not have parameters: set the endpoint with --endpoint URL")
    if not _BUCKET_PATTERN.fullmatch(bucket):
        raise SettingsError(f"{bucket!r} is not a bucket name, which has 3 to 63 letters, digits, '.', '-' or '_'")
    if not prefix:
        raise SettingsError(
            f"s3://{bucket} has no prefix: write s3://{bucket}/NAME, so that the bucket can hold several backups"
        )
    if not _PREFIX_PATTERN.fullmatch(prefix):
        raise SettingsError(f"the prefix {prefix!r} may contain only letters, digits and !_.*'()/=+-")
    replica = {"type": "s3", "bucket": bucket, "path": prefix}
    if endpoint is not None:
        replica |= {"endpoint": _parse_endpoint(endpoint), "region": region or DEFAULT_REGION}
    elif region is not None:
        replica["region"] = region
    return BackupTarget(f"{_S3}{bucket}/{prefix}", replica)


def _parse_endpoint(endpoint: str) -> str:
    try:
        parts = urlsplit(endpoint)
        is_valid = parts.scheme in {"http", "https"} and bool(parts.hostname)
    except ValueError:
        is_valid = False
    if not is_valid:
        raise SettingsError("the endpoint must be a URL like https://s3.example.org or http://127.0.0.1:9000")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise SettingsError(
            "the endpoint must not contain credentials or parameters: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY "
            "in the environment"
        )
    return endpoint.rstrip("/")
