"""Where a request comes from: its client behind proxies, and the web page that a browser sent it for (CO-24).

All of it is said by headers, which anybody can write: what a proxy adds is believed from trusted proxies only, and
what no browser would write in that form is not believed at all.
"""

import re
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

Address = IPv4Address | IPv6Address
Networks = Sequence[IPv4Network | IPv6Network]

UNKNOWN_ADDRESS: Final = "unknown"
"""The address of a client that has none, as on a Unix socket."""
CLIENT_NETWORK_BITS: Final = 64
"""Of an IPv6 address: what is beyond, its owner chooses anew whenever they like."""
_DEFAULT_PORTS: Final = {"http": 80, "https": 443, "ws": 80, "wss": 443}
_SCHEMES: Final = {"http": "http", "https": "https", "ws": "http", "wss": "https"}
_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*", re.ASCII)
_HOST_AND_PORT: Final = re.compile(
    r"(?:\[([0-9a-f:.]+)\]|([a-z0-9_-]+(?:\.[a-z0-9_-]+)*\.?))(?::([0-9]{1,5}))?", re.ASCII
)
"""A host, which is an IPv6 address in brackets or a name or an IPv4 address, and maybe a port."""


# --- the client -----------------------------------------------------------------------------------------


def parse_networks(texts: Sequence[str]) -> Networks:
    """Networks of texts: `10.0.0.0/8`, or one address. Raises ValueError for what is none."""
    return [ip_network(text) for text in texts]


def find_client_address(peer: str | None, forwarded_for: str | None, trusted: Networks) -> str:
    """Who has sent a request: the peer, or, where that is a trusted proxy, whom it names in `X-Forwarded-For`.

    Read from the right, where the proxy nearest to us has written: the first that is no trusted proxy itself. Whatever
    is left of it came from there, and may be a lie.
    """
    found = _parse_address(peer)
    if found is None:
        return UNKNOWN_ADDRESS
    for text in reversed((forwarded_for or "").split(",")):
        if not _is_in(found, trusted):
            break
        before = _parse_address_with_port(text.strip())
        if before is None:
            break
        found = before
    return str(found)


def to_client_network(address: str) -> str:
    """By what failures of a client are counted: an IPv4 address, or the network that an IPv6 address is of."""
    found = _parse_address(address)
    if not isinstance(found, IPv6Address):
        return address
    return str(IPv6Network((int(found), CLIENT_NETWORK_BITS), strict=False))


def is_trusted(peer: str | None, trusted: Networks) -> bool:
    """Return whether a peer is a trusted proxy."""
    found = _parse_address(peer)
    return found is not None and _is_in(found, trusted)


def get_scheme(peer: str | None, forwarded_proto: str | None, is_tls: bool, trusted: Networks) -> str:
    """`http` or `https`, as the client has it: where the peer is a trusted proxy, what `X-Forwarded-Proto` says."""
    own = "https" if is_tls else "http"
    if forwarded_proto is None or not is_trusted(peer, trusted):
        return own
    # Of several, the last one: it was written by the proxy that we know.
    return _SCHEMES.get(forwarded_proto.rpartition(",")[2].strip().lower(), own)


def _is_in(address: Address, networks: Networks) -> bool:
    return any(address in network for network in networks)


def _parse_address(text: str | None) -> Address | None:
    try:
        found = ip_address((text or "").partition("%")[0])
    except ValueError:
        return None
    # A socket for both versions tells IPv4 addresses in this form.
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return mapped or found


def _parse_address_with_port(text: str) -> Address | None:
    """Some proxies name the port too."""
    parts = _HOST_AND_PORT.fullmatch(text.lower())
    return _parse_address(text if parts is None else parts[1] or parts[2])


# --- the page ---------------------------------------------------------------------------------------------


def normalize_origin(text: str) -> str | None:
    """`scheme://host[:port]` in the one form that is compared: lower case, no default port. None for what is none."""
    scheme, separator, place = text.lower().partition("://")
    if not separator or _SCHEME.fullmatch(scheme) is None:
        return None
    return _normalize_origin_parts(scheme, place)


def is_allowed_origin(origin: str | None, scheme: str, host_header: str | None, allowed: frozenset[str]) -> bool:
    """Whether a page of that origin may speak to us: one that we served, or one of those allowed (`normalize_origin`).

    Without an `Origin` header it is no page: browsers send one with every WebSocket and every cross-origin request.
    The origin `null` is anybody's, and never allowed.
    """
    if origin is None:
        return True
    normal = normalize_origin(origin)
    if normal is None:
        return False
    return normal in allowed or normal == _normalize_origin_parts(scheme, (host_header or "").lower())


def is_loopback_host(host_header: str | None) -> bool:
    """Whether a `Host` header names this machine.

    A server that lets everybody in must ask: a page of a foreign name whose address was changed to 127.0.0.1 (DNS
    rebinding) is of the same origin as we are, to its browser.
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
