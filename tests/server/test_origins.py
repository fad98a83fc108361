"""Client addresses and schemes forwarded by trusted proxies, and allowed origins of web pages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncelog.server.origins import (
    UNKNOWN_ADDRESS,
    find_client_address,
    get_scheme,
    is_allowed_origin,
    is_loopback_host,
    normalize_origin,
    parse_networks,
    to_client_network,
)

TRUSTED = parse_networks(["10.0.0.0/8", "192.0.2.1", "fd00::/8"])
APP = frozenset({"https://app.example.org"})


# --- the client -----------------------------------------------------------------------------------------


@pytest.mark.rule("CO-24")
@pytest.mark.parametrize(
    ("peer", "forwarded_for", "client"),
    [
        ("203.0.113.9", None, "203.0.113.9"),
        ("203.0.113.9", "198.51.100.1", "203.0.113.9"),  # not a trusted proxy, so its header is ignored
        ("10.0.0.1", None, "10.0.0.1"),
        ("10.0.0.1", "", "10.0.0.1"),
        ("10.0.0.1", "198.51.100.1", "198.51.100.1"),
        ("10.0.0.1", "6.6.6.6, 198.51.100.1", "198.51.100.1"),  # the first address was forged by the client
        ("10.0.0.1", "6.6.6.6,198.51.100.1 , 10.2.3.4,192.0.2.1", "198.51.100.1"),
        ("10.0.0.1", "10.0.0.7, 10.0.0.8", "10.0.0.7"),
        ("10.0.0.1", "198.51.100.1, nonsense", "10.0.0.1"),
        ("10.0.0.1", "198.51.100.1, nonsense, 10.0.0.9", "10.0.0.9"),
        ("10.0.0.1", "198.51.100.1:4711", "198.51.100.1"),
        ("10.0.0.1", "[2001:DB8::1]:4711", "2001:db8::1"),
        ("10.0.0.1", "2001:db8::1", "2001:db8::1"),
        ("::ffff:10.0.0.1", "198.51.100.1", "198.51.100.1"),
        ("::ffff:203.0.113.9", None, "203.0.113.9"),
        ("fd00::5", "198.51.100.1", "198.51.100.1"),
        ("fe80::1%eth0", None, "fe80::1"),
        (None, "198.51.100.1", UNKNOWN_ADDRESS),
        ("", "198.51.100.1", UNKNOWN_ADDRESS),
    ],
)
def test_client_is_the_rightmost_address_that_is_not_a_trusted_proxy(
    peer: str | None, forwarded_for: str | None, client: str
) -> None:
    assert find_client_address(peer, forwarded_for, TRUSTED) == client


def test_forwarded_address_is_ignored_without_trusted_proxies() -> None:
    assert find_client_address("127.0.0.1", "198.51.100.1", ()) == "127.0.0.1"


@given(said=st.text(alphabet="0123456789.:,[]% af", max_size=60))
def test_client_cannot_forge_the_address_that_the_proxy_adds(said: str) -> None:
    assert find_client_address("10.0.0.1", f"{said}, 198.51.100.1", TRUSTED) == "198.51.100.1"


@given(said=st.text(max_size=60))
def test_arbitrary_headers_raise_no_error(said: str) -> None:
    find_client_address("10.0.0.1", said, TRUSTED)
    get_scheme("10.0.0.1", said, False, TRUSTED)
    is_allowed_origin(said, "https", said, APP)
    is_loopback_host(said)


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("198.51.100.1", "198.51.100.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::", "2001:db8:1:2::/64"),
        (UNKNOWN_ADDRESS, UNKNOWN_ADDRESS),
    ],
)
def test_ipv6_clients_are_grouped_by_64_bit_prefix(address: str, network: str) -> None:
    assert to_client_network(address) == network


@pytest.mark.rule("CO-24")
@pytest.mark.parametrize(
    ("peer", "forwarded_proto", "is_tls", "scheme"),
    [
        ("10.0.0.1", "https", False, "https"),
        ("10.0.0.1", "http", True, "http"),
        ("10.0.0.1", "WSS", False, "https"),
        ("10.0.0.1", "http, https", False, "https"),
        ("10.0.0.1", "gopher", False, "http"),
        ("10.0.0.1", "", True, "https"),
        ("10.0.0.1", None, False, "http"),
        ("203.0.113.9", "https", False, "http"),
        ("203.0.113.9", "http", True, "https"),
        (None, "https", False, "http"),
    ],
)
def test_scheme_is_taken_from_a_trusted_proxy_or_the_connection(
    peer: str | None, forwarded_proto: str | None, is_tls: bool, scheme: str
) -> None:
    assert get_scheme(peer, forwarded_proto, is_tls, TRUSTED) == scheme


# --- the page -----------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-24")
@pytest.mark.parametrize(
    ("origin", "scheme", "host"),
    [
        (None, "http", "log.example.org"),
        (None, "http", None),
        ("http://log.example.org", "http", "log.example.org"),
        ("http://log.example.org", "http", "log.example.org:80"),
        ("http://log.example.org:80", "http", "log.example.org"),
        ("https://log.example.org", "https", "log.example.org:443"),
        ("HTTPS://Log.Example.Org", "https", "LOG.example.org"),
        ("http://localhost:7171", "http", "localhost:7171"),
        ("http://[::1]:7171", "http", "[::1]:7171"),
        ("http://[0:0::1]:7171", "http", "[::1]:7171"),
        ("https://app.example.org", "http", "log.example.org"),
        ("https://APP.example.org:443", "http", "log.example.org"),
    ],
)
def test_missing_origin_same_origin_and_configured_origins_are_allowed(
    origin: str | None, scheme: str, host: str | None
) -> None:
    assert is_allowed_origin(origin, scheme, host, APP)


@pytest.mark.rule("CO-24")
@pytest.mark.parametrize(
    ("origin", "scheme", "host"),
    [
        ("https://evil.example", "https", "log.example.org"),
        ("http://log.example.org", "https", "log.example.org"),
        ("https://log.example.org", "http", "log.example.org"),
        ("http://log.example.org:8080", "http", "log.example.org"),
        ("http://log.example.org", "http", "log.example.org:8080"),
        ("http://app.example.org", "http", "log.example.org"),
        ("https://app.example.org:444", "http", "log.example.org"),
        ("https://app.example.org.evil.example", "http", "log.example.org"),
        ("https://evil.example#app.example.org", "http", "log.example.org"),
        ("https://app.example.org@evil.example", "http", "log.example.org"),
        ("https://app.example.org/", "http", "log.example.org"),
        ("https://app.example.org, https://app.example.org", "http", "log.example.org"),
        ("null", "http", "log.example.org"),
        ("null", "http", "null"),
        ("", "http", ""),
        ("", "http", None),
        ("http://", "http", ""),
        ("http://", "http", None),
        ("*", "http", "*"),
        ("http://*", "http", "*"),
    ],
)
def test_other_origins_are_not_allowed(origin: str, scheme: str, host: str | None) -> None:
    assert not is_allowed_origin(origin, scheme, host, APP)


def test_null_origin_cannot_be_configured() -> None:
    assert not is_allowed_origin("null", "http", "log.example.org", frozenset({"null"}))


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("https://app.example.org", "https://app.example.org"),
        ("HTTPS://App.Example.Org:443", "https://app.example.org"),
        ("http://a:443", "http://a:443"),
        ("tauri://localhost", "tauri://localhost"),
        ("chrome-extension://abcdef", "chrome-extension://abcdef"),
        ("http://[2001:DB8:0::1]:80", "http://[2001:db8::1]"),
        ("https://a:65535", "https://a:65535"),
        ("https://a:65536", None),
        ("https://a:0", None),
        ("https://a:", None),
        ("https://a/", None),
        ("https://a/path", None),
        ("https://*.example.org", None),
        ("https://user@a", None),
        ("https://[a]", None),
        ("https://[::1", None),
        ("https:// a", None),
        ("https://a\n", None),
        ("//a", None),
        ("a", None),
        ("*", None),
        ("", None),
    ],
)
def test_origin_is_normalized(text: str, normal: str | None) -> None:
    assert normalize_origin(text) == normal


@pytest.mark.rule("CO-21")
@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:7171",
        "localhost.",
        "app.localhost:1",
        "127.0.0.1",
        "127.0.0.1:7171",
        "127.255.3.4",
        "[::1]",
        "[::1]:7171",
        "[0:0:0:0:0:0:0:1]",
    ],
)
def test_loopback_host_is_recognized(host: str) -> None:
    assert is_loopback_host(host)


@pytest.mark.rule("CO-21")
@pytest.mark.parametrize(
    "host",
    [
        None,
        "",
        "evil.example",
        "evil.example:7171",
        "localhost.evil.example",
        "notlocalhost",
        ".localhost",
        "127.0.0.1.evil.example",
        "127.evil.example",
        "0.0.0.0",  # noqa: S104 - nothing is bound here
        "10.0.0.1",
        "[::]",
        "[::1",
        "::1",
        "localhost:",
        "localhost:99999",
        "localhost@evil.example",
        "evil.example/localhost",
        "evil.example, localhost",
        "localhost\n",
    ],
)
def test_other_host_is_not_loopback(host: str | None) -> None:
    assert not is_loopback_host(host)
