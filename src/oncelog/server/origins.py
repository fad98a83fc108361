"""Origin of a request: the client's address behind proxies, and the web page that made a browser send it (CO-24).

Clients can forge the headers that contain the address and the origin. The server accepts proxy headers only from
trusted proxies, and refuses an origin in a form that no browser sends.
"""

import re
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

Address = IPv4Address | IPv6Address
Networks = Sequence[IPv4Network | IPv6Network]

UNKNOWN_ADDRESS: Final = "unknown"
"""Address of a client without an IP address, such as one on a Unix socket."""
CLIENT_NETWORK_BITS: Final = 64
"""Leading bits of an IPv6 address that identify a client. Its owner can change the other bits at any time."""
_DEFAULT_PORTS: Final = {"http": 80, "https": 443, "ws": 80, "wss": 443}
_SCHEMES: Final = {"http": "http", "https": "https", "ws": "http", "wss": "https"}
_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*", re.ASCII)
_HOST_AND_PORT: Final = re.compile(
    r"(?:\[([0-9a-f:.]+)\]|([a-z0-9_-]+(?:\.[a-z0-9_-]+)*\.?))(?::([0-9]{1,5}))?", re.ASCII
)
"""Matches a host (an IPv6 address in brackets, a name or an IPv4 address) with an optional port."""


# --- the client -----------------------------------------------------------------------------------------


def parse_networks(texts: Sequence[str]) -> Networks:
    """Parse addresses, or networks such as `10.0.0.0/8`. Raises ValueError for malformed input."""
    return [ip_network(text) for text in texts]


def find_client_address(peer: str | None, forwarded_for: str | None, trusted: Networks) -> str:
    """Return a client's address: the peer or, behind trusted proxies, an address from `X-Forwarded-For`.

    The nearest proxy wrote the rightmost address. Read from the right, the first address that is not a trusted proxy is
    the client. The client may have forged the addresses to the left of it.
    """
    found = _parse_address(peer)
    if found is None:
        return UNKNOWN_ADDRESS
    for text in reversed((forwarded_for or "").split(",")):
        if not _is_in(found, trusted):
            break
        parts = _HOST_AND_PORT.fullmatch(text.strip().lower())  # some proxies add the port
        before = _parse_address(text.strip() if parts is None else parts[1] or parts[2])
        if before is None:
            break
        found = before
    return str(found)


def to_client_network(address: str) -> str:
    """Return the key under which a client is counted: its IPv4 address, or the network of its IPv6 address."""
    found = _parse_address(address)
    if not isinstance(found, IPv6Address):
        return address
    return str(IPv6Network((int(found), CLIENT_NETWORK_BITS), strict=False))


def is_trusted(peer: str | None, trusted: Networks) -> bool:
    """Return whether a peer is a trusted proxy."""
    found = _parse_address(peer)
    return found is not None and _is_in(found, trusted)


def get_scheme(peer: str | None, forwarded_proto: str | None, is_tls: bool, trusted: Networks) -> str:
    """Return the scheme that the client used: from `X-Forwarded-Proto` of a trusted proxy, or else the server's own."""
    own = "https" if is_tls else "http"
    if forwarded_proto is None or not is_trusted(peer, trusted):
        return own
    # The trusted proxy wrote the last of several values.
    return _SCHEMES.get(forwarded_proto.rpartition(",")[2].strip().lower(), own)


def _is_in(address: Address, networks: Networks) -> bool:
    return any(address in network for network in networks)


def _parse_address(text: str | None) -> Address | None:
    """Parse an IP address. Returns None for any other string."""
    try:
        found = ip_address((text or "").partition("%")[0])
    except ValueError:
        return None
    # A dual-stack socket reports IPv4 addresses in this form.
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return mapped or found


# --- the page ---------------------------------------------------------------------------------------------


def normalize_origin(text: str) -> str | None:
    """Return `scheme://host[:port]` in lower case and without the default port, or None for a malformed origin."""
    scheme, separator, place = text.lower().partition("://")
    if not separator or _SCHEME.fullmatch(scheme) is None:
        return None
    return _normalize_origin_parts(scheme, place)


def is_allowed_origin(origin: str | None, scheme: str, host_header: str | None, allowed: frozenset[str]) -> bool:
    """Return whether a page of this origin may connect: the origin must be the server's own, or be in `allowed`.

    Browsers send `Origin` with every WebSocket and every cross-origin request, so a request without this header is
    allowed. Pages of many sites share the origin `null`, which is never allowed.
    """
    if origin is None:
        return True
    normal = normalize_origin(origin)
    if normal is None:
        return False
    return normal in allowed or normal == _normalize_origin_parts(scheme, (host_header or "").lower())


def is_loopback_host(host_header: str | None) -> bool:
    """Return whether a `Host` header refers to this machine.

    A server in development mode checks this to prevent DNS rebinding: after an attacker changes a host name to resolve
    to 127.0.0.1, the browser treats pages of that host as pages of this server.
    """
    parts = _HOST_AND_PORT.fullmatch((host_header or "").lower())
    if parts is None or not _is_port(parts[3]):
        return False
    address = _parse_address(parts[1] or parts[2])
    if address is not None:
        return address.is_loopback
    name = (parts[2] or "").removesuffix(".")
    return name == "localhost" or name.endswith(".localhost")


def _normalize_origin_parts(scheme: str, host_and_port: str) -> str | None:
    parts = _HOST_AND_PORT.fullmatch(host_and_port)
    if parts is None or not _is_port(parts[3]):
        return None
    host: str = parts[2] or ""
    if parts[1] is not None:
        address = _parse_address(parts[1])
        if address is None:
            return None
        host = f"[{address}]"
    port = _DEFAULT_PORTS.get(scheme) if parts[3] is None else int(parts[3])
    return f"{scheme}://{host}" if port in (None, _DEFAULT_PORTS.get(scheme)) else f"{scheme}://{host}:{port}"


def _is_port(text: str | None) -> bool:
    return text is None or 1 <= int(text) <= 65_535
