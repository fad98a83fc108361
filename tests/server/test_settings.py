"""Settings: sources and their precedence, validation, and errors with the setting and its source."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from oncelog.cli.server_options import CLIENT_VARIABLES
from oncelog.core.limits import SETTING_NUMBER_MAX
from oncelog.core.tenants import Tenant
from oncelog.engine.limits import Limits
from oncelog.errors import AuthError, SettingsError
from oncelog.server.auth.api_keys import ApiKeys
from oncelog.server.auth.authenticator import Authenticator, DevelopmentAuthenticator
from oncelog.server.auth.principal import parse_grants
from oncelog.server.auth.signing_keys import KeyFile, KeyKind
from oncelog.server.auth.tokens import TokenSettings, issue_token
from oncelog.server.limits import SETTINGS_FILE_BYTES_MAX, ApiLimits
from oncelog.server.origins import normalize_origin, parse_networks
from oncelog.server.settings import (
    ApiKeySettings,
    ServerSettings,
    load,
    new_authenticator,
)
from oncelog.server.settings_sources import to_variable
from oncelog.testing.clock import ManualClock
from server.auth.auth_material import load_keys
from server.setting_descriptions import SettingDescription, describe_settings
from tools.site.reference import generate_page

PAGE = (Path(__file__).parents[2] / "docs/guides/server.md").read_text(encoding="utf-8")
REFERENCE = generate_page("settings")
NAMES = {one.name: one for one in describe_settings()}
OPEN = {"development": "true"}
TOKENS = {"tokens.algorithms": "EdDSA", "tokens.key_files": "pem:keys.pem"}


def load_flags(**overrides: str) -> ServerSettings:
    """Load settings from the command line, in development mode. `limits__poll_ms` means `limits.poll_ms`."""
    return load(None, {}, {**OPEN, **{name.replace("__", "."): text for name, text in overrides.items()}})


def settings_file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "oncelog.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def refusal(
    path: str | None = None, environment: Mapping[str, str] | None = None, overrides: Mapping[str, str] | None = None
) -> str:
    with pytest.raises(SettingsError) as caught:
        load(path, environment or {}, overrides or {})
    return str(caught.value)


# --- sources -------------------------------------------------------------------------------------------------


def test_settings_have_the_documented_defaults() -> None:
    assert load(None, {}, OPEN) == ServerSettings(development=True)
    settings = ServerSettings(development=True)
    assert (settings.store, settings.host, settings.port) == ("oncelog.db", "127.0.0.1", 7171)
    assert (settings.engine_limits, settings.api_limits) == (Limits(), ApiLimits())


def test_command_line_overrides_the_environment_and_the_file(tmp_path: Path) -> None:
    path = settings_file(tmp_path, 'port = 1\nstore = "1"\nhost = "::1"\ndevelopment = true\n[limits]\npoll_ms = 1\n')
    environment = {"ONCELOG_PORT": "2", "ONCELOG_STORE": "2", "ONCELOG_LIMITS__POLL_MS": "2", "HOME": "/"}
    settings = load(path, environment, {"port": "3"})
    assert (settings.port, settings.store, settings.host, settings.engine_limits.poll_ms) == (3, "2", "::1", 2)
    assert load(path, {}, {"limits.poll_ms": "4"}).engine_limits.poll_ms == 4


def test_list_from_a_later_source_replaces_the_earlier_list(tmp_path: Path) -> None:
    path = settings_file(tmp_path, 'development = true\norigins = ["https://a", "https://b"]')
    assert load(path, {}, {}).origins == ("https://a", "https://b")
    assert load(path, {"ONCELOG_ORIGINS": "https://c"}, {}).origins == ("https://c",)
    assert load(path, {"ONCELOG_ORIGINS": ""}, {}).origins == ()


def test_empty_variable_resets_an_optional_setting(tmp_path: Path) -> None:
    path = settings_file(tmp_path, 'development = true\nvalidate = "a.b:c"')
    assert load(path, {}, {}).validate == "a.b:c"
    assert load(path, {"ONCELOG_VALIDATE": ""}, {}).validate is None


def sample(setting: SettingDescription) -> tuple[str, Any]:
    """Return a non-default value, as text and as loaded."""
    if setting.kind == "whole number":
        return "1_0", 10
    if setting.kind == "true or false":
        return ("false", False) if setting.default == "true" else ("True", True)
    return {
        "log.level": ("error", "error"),
        "log.format": ("json", "json"),
        "host": ("localhost", "localhost"),
        "origins": ("https://a, http://b:1", ("https://a", "http://b:1")),
        "trusted_proxies": ("10.0.0.0/8,::1", ("10.0.0.0/8", "::1")),
        "tenants": (
            "ledger/acme bytes_max=1_000 new_writes_per_second_max=5, orders",
            (Tenant("ledger/acme", bytes_max=1000, new_writes_per_second_max=5), Tenant("orders")),
        ),
        "tokens.algorithms": ("HS256,RS256", ("HS256", "RS256")),
        "tokens.key_files": (
            "jwks:a:b, pem#k:c",
            (KeyFile("a:b", KeyKind.JWKS), KeyFile("c", KeyKind.PEM, "k")),
        ),
        "tokens.audiences": ("a,b", ("a", "b")),
        "check_secret_files": ("false", False),
        "file_mode": ("0660", "0660"),
        "tracing.endpoint": ("https://collector:4318/otlp", "https://collector:4318/otlp"),
    }.get(setting.name, ("other", "other"))


def setting_value(settings: ServerSettings, name: str) -> Any:
    table, _, field = name.rpartition(".")
    if table == "limits":
        return getattr(settings.engine_limits if hasattr(Limits(), field) else settings.api_limits, field)
    return getattr(getattr(settings, table) if table else settings, field)


@pytest.mark.rule("CO-30")
@pytest.mark.parametrize("name", NAMES)
def test_every_setting_can_be_set_in_every_source(name: str, tmp_path: Path) -> None:
    text, value = sample(NAMES[name])
    # Settings that other settings require.
    others = {**OPEN, "tls.certificate": "c", "tls.private_key": "k", "limits.request_events_max": "1", **TOKENS}
    others["limits.request_members_max"] = "1"
    others.pop(name, None)
    assert setting_value(load(None, {}, {**others, name: text}), name) == value
    assert setting_value(load(None, {to_variable(name): text}, others), name) == value
    table, _, field = name.rpartition(".")
    quoted = text.lower() if NAMES[name].kind in ("whole number", "true or false") else f'"{text}"'
    if NAMES[name].kind.startswith("list"):
        quoted = str([one.strip() for one in text.split(",")])
    written = f"[{table}]\n{field} = {quoted}" if table else f"{field} = {quoted}"
    assert setting_value(load(settings_file(tmp_path, written), {}, others), name) == value


def test_environment_variable_names_are_distinct() -> None:
    assert to_variable("port") == "ONCELOG_PORT"
    assert to_variable("tls.certificate") == "ONCELOG_TLS__CERTIFICATE"
    assert len({to_variable(name) for name in NAMES}) == len(NAMES)


# --- errors --------------------------------------------------------------------------------------------


def test_unknown_setting_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    path = settings_file(tmp_path, "[limits]\nqueue_item_max = 1")
    assert refusal(path) == (f"{path}: unknown setting 'limits.queue_item_max'; did you mean limits.queue_items_max?")
    assert "'limts'" in refusal(settings_file(tmp_path, "[limts]"))
    assert "'limits.more'" in refusal(settings_file(tmp_path, "[limits.more]"))
    assert refusal(None, {"ONCELOG_PROT": "1"}) == (
        "environment: unknown setting 'ONCELOG_PROT'; did you mean ONCELOG_PORT?"
    )
    assert refusal(None, {}, {"limits": "1"}).startswith("command line: unknown setting 'limits'")


def test_all_invalid_settings_are_reported_together(tmp_path: Path) -> None:
    path = tmp_path / "oncelog.toml"
    path.write_text('prot = 80\nhost = "no host"\n[log]\nlevel = 5\n')
    with pytest.raises(SettingsError) as refused:
        load(str(path), {"ONCELOG_POTR": "1"}, {"port": "x", "limits.queue_items_max": "0"})
    first, *problems = str(refused.value).split("\n  ")
    assert first == "6 settings are invalid:"
    assert [line.split(" must ")[0] for line in problems] == [
        f"{path}: unknown setting 'prot'; did you mean port?",
        "environment: unknown setting 'ONCELOG_POTR'; did you mean ONCELOG_PORT?",
        f"{path}: host",
        f"{path}: log.level",
        "command line: limits.queue_items_max",
        "command line: port",
    ]
    assert refused.value.__context__ is None


def test_unknown_variable_does_not_reveal_its_value() -> None:
    assert "hunter2" not in refusal(None, {"ONCELOG_SECRET": "hunter2"})


def test_secret_set_instead_of_its_file_is_not_revealed() -> None:
    for environment in ({"ONCELOG_TOKENS__KEY_FILES": "hunter2"}, {"ONCELOG_TOKENS__KEY_FILES": "secret:,hunter2"}):
        assert "hunter2" not in refusal(None, environment)


def test_other_environment_variables_are_ignored() -> None:
    assert load(None, {"PORT": "x", "ONCELOGGER": "x", "oncelog_port": "x"}, OPEN).port == 7171


@pytest.mark.parametrize(
    ("name", "text", "limit"),
    [
        ("port", "65536", "from 0 to 65535, not 65536"),
        ("port", "-1", "from 0 to 65535, not -1"),
        ("port", "tcp://10.0.0.1:7171", "a whole number from 0 to 65535"),
        ("port", "1.5", "a whole number"),
        ("port", " 1", "a whole number"),
        ("port", "", "a whole number"),
        ("port", "٣", "a whole number"),
        ("port", "9" * 5000, "a whole number"),
        ("development", "yes", "true or false"),
        ("development", "1", "true or false"),
        ("store", "", "a non-empty string"),
        ("host", "", "a non-empty string"),
        ("host", "a b", "an IP address or a host name"),
        ("host", "http://a", "an IP address or a host name"),
        ("host", "a..b", "an IP address or a host name"),
        ("metrics_host", "a" * 64, "an IP address or a host name"),
        ("validate", "a:b:c", "package.module:callable"),
        ("validate", "a b", "package.module:callable"),
        ("shutdown_ms", "-1", "from 0 on, not -1"),
        ("origins", "*", "scheme://host[:port]"),
        ("origins", "https://a,https://b/", "not 'https://b/'"),
        ("origins", "app.example.org", "scheme://host[:port]"),
        ("origins", "null", "scheme://host[:port]"),
        ("origins", "https://a,,https://b", "none of them empty"),
        ("trusted_proxies", "proxy.example.org", "IP addresses or networks"),
        ("trusted_proxies", "10.0.0.1/8", "IP addresses or networks"),
        ("log.level", "INFO", "debug, info, warning or error"),
        ("log.format", "xml", "text or json"),
        ("tokens.algorithms", "none", "one or more of HS256"),
        ("tokens.algorithms", "", "one or more of HS256"),
        ("tokens.key_files", "keys.pem", '"kind:path"'),
        ("tokens.key_files", "der:keys.pem", '"kind:path"'),
        ("tokens.key_files", "pem:", '"kind:path"'),
        ("tokens.key_files", "pem#:keys.pem", '"kind:path"'),
        ("tokens.key_files", "", "at least one file"),
        ("tokens.leeway_ms", "300001", "from 0 to 300000, not 300001"),
        ("tokens.grants_claim", "sub", "must not be a registered claim name"),
        ("tokens.token_characters_max", "0", "from 1 to 16384"),
        ("limits.queue_items_max", "0", "from 1 on, not 0"),
        ("limits.cache_entries_max", "-1", "from 0 on, not -1"),
        ("limits.page_events_max", "0", "from 1 on, not 0"),
        ("limits.frames_per_second_max", "-1", "from 0 on, not -1"),
        ("limits.new_events_per_second_max", "1000001", "from 0 to 1000000, not 1000001"),
        ("limits.request_events_max", "10001", "from 1 to 10000, not 10001"),
        ("limits.request_members_max", "10000", "from 1 to 9999, not 10000"),
        ("limits.poll_ms", str(SETTING_NUMBER_MAX + 1), f"at most {SETTING_NUMBER_MAX}"),
    ],
)
def test_wrong_value_is_refused_with_its_name_source_and_limit(name: str, text: str, limit: str) -> None:
    for place, message in (
        ("command line", refusal(None, {}, {name: text})),
        (f"environment variable {to_variable(name)}", refusal(None, {to_variable(name): text})),
    ):
        assert message.startswith(f"{place}: {name} must ")
        assert limit in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('port = "7171"', "port must be a whole number"),
        ("port = true", "port must be a whole number"),
        ("port = 1.0", "port must be a whole number"),
        ("[port]\na = 1", "port must be a whole number"),
        ("port = 70000", "port must be a whole number from 0 to 65535"),
        (f"shutdown_ms = {2**64}", "shutdown_ms must be a whole number"),
        ("development = 1", "development must be true or false"),
        ('development = "true"', "development must be true or false"),
        ("store = 1", "store must be a non-empty string"),
        ('validate = ""', "validate must be a non-empty string"),
        ('store = "a\\u0000b"', "store must be a non-empty string without U+0000"),
        ('origins = "https://a"', "origins must be a list of strings"),
        ("origins = [1]", "origins must be a list of strings: each must be a non-empty string"),
        ('origins = [""]', "origins must be a list of strings, none of them empty"),
        ("limits = 1", "limits must be a table"),
        ("[log]\nlevel = 1", "log.level must be debug, info, warning or error"),
        ('[tokens]\nkey_files = [{ kind = "pem" }]', "tokens.key_files must be a list of key files: each"),
        ('[tokens]\nkey_files = [{ kind = "pem", path = "a", kid = "b" }]', "tokens.key_files must be a list"),
        ('[tokens]\nkey_files = [{ kind = "pem", path = 1 }]', "tokens.key_files must be a list"),
        ('[tokens]\nkey_files = [{ kind = "pem", path = "a", key_id = "" }]', "tokens.key_files must be a list"),
        ("[tokens]\nkey_files = [[]]", "tokens.key_files must be a list"),
    ],
)
def test_wrong_value_in_a_file_is_refused_with_its_path(text: str, message: str, tmp_path: Path) -> None:
    path = settings_file(tmp_path, text)
    assert refusal(path, {}, {}).startswith(f"{path}: {message}")


def test_unreadable_or_malformed_file_is_refused(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.toml")
    assert refusal(missing) == f"{missing} cannot be read: No such file or directory; check the path"
    assert refusal(str(tmp_path)) == f"{tmp_path} is not a file: name a regular file"
    path = settings_file(tmp_path, "port = = 1")
    assert re.search(r"is not valid TOML: .*line 1", refusal(path))
    assert "is not valid TOML" in refusal(settings_file(tmp_path, "port = 1\nport = 2"))
    assert "is not valid TOML" in refusal(settings_file(tmp_path, "port = " + "9" * 5000))
    assert "nested too deeply" in refusal(settings_file(tmp_path, "port = " + "[" * 100_000))
    assert "is larger than" in refusal(settings_file(tmp_path, "#" * (SETTINGS_FILE_BYTES_MAX + 1)))


def test_error_for_a_non_utf_8_file_does_not_quote_it(tmp_path: Path) -> None:
    path = tmp_path / "oncelog.toml"
    path.write_bytes(b"# hunter2 \xff")
    with pytest.raises(SettingsError, match="is not valid TOML: not UTF-8") as caught:
        load(str(path), {}, {})
    assert "hunter2" not in str(caught.value)
    assert (caught.value.__cause__, caught.value.__context__) == (None, None)


@example(name="tenants", text="/")
@example(name="tenants", text="a/")
@example(name="tenants", text="/a")
@example(name="tenants", text="a/*")
@example(name="tenants", text="a,a")
@example(name="tenants", text="e\u0301")
@example(name="tenants", text="a records_max=-1")
@example(name="tenants", text="a new_writes_at_once_max=1")
@given(name=st.sampled_from(sorted(set(NAMES) - {"tls.certificate", "tls.private_key"})), text=st.text(max_size=20))
def test_arbitrary_text_is_accepted_or_refused_with_its_setting(name: str, text: str) -> None:
    message = ""
    try:
        load(None, {}, {"api_keys.file": "keys.json", **TOKENS, name: text})
    except SettingsError as error:
        message = str(error)
    assert message == "" or message.startswith(
        (f"command line: {name} must ", "limits.request_events_max (", "limits.request_members_max (")
    )


# --- combinations -----------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-21")
@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost", "LocalHost"])
def test_development_mode_is_allowed_on_loopback(host: str) -> None:
    assert load_flags(host=host).host == host


@pytest.mark.rule("CO-21")
@pytest.mark.parametrize(
    "host",
    [
        *("0.0.0.0", "::", "10.0.0.1", "128.0.0.1"),  # noqa: S104
        *("example.org", "localhost.example.org", "127.0.0.1%lo", "::ffff:127.0.0.1"),
    ],
)
def test_development_mode_is_refused_on_other_hosts(host: str) -> None:
    message = refusal(None, {}, {**OPEN, "host": host, **TOKENS})
    assert "loopback" in message
    assert host in message
    assert load(None, {}, {"host": host, **TOKENS}).host == host


@pytest.mark.rule("CO-21")
def test_settings_without_any_authentication_are_refused() -> None:
    message = refusal()
    for way_out in ("development", "tokens.algorithms", "tokens.key_files", "api_keys.file"):
        assert way_out in message
    assert load(None, {}, {"api_keys.file": "keys.json"}).tokens is None
    assert load(None, {}, TOKENS).tokens == TokenSettings(
        algorithms=("EdDSA",), key_files=(KeyFile("keys.pem", KeyKind.PEM),)
    )


@pytest.mark.parametrize("missing", sorted(TOKENS))
def test_tokens_need_algorithms_and_keys(missing: str) -> None:
    others = {name: text for name, text in TOKENS.items() if name != missing}
    assert refusal(None, {}, {**OPEN, **others}) == f"{missing} must be set if any other tokens setting is"


@pytest.mark.rule("CO-24")
def test_certificate_and_private_key_must_be_set_together() -> None:
    for name in ("certificate", "private_key"):
        assert "set together" in refusal(None, {}, {**OPEN, f"tls.{name}": "a.pem"})
    tls = load_flags(tls__certificate="a.pem", tls__private_key="b.pem").tls
    assert (tls.certificate, tls.private_key) == ("a.pem", "b.pem")


def test_api_request_limit_must_not_exceed_the_log_limit() -> None:
    message = refusal(None, {}, {**OPEN, "limits.request_items_max": "999"})
    assert "limits.request_events_max (1000) must not exceed limits.request_items_max (999)" in message
    assert load_flags(limits__request_items_max="1000").engine_limits.request_items_max == 1000


def test_settings_built_in_code_are_also_validated() -> None:
    for wrong in ({"port": -1}, {"origins": ("*",)}, {"host": "0.0.0.0"}, {"development": False}):  # noqa: S104
        with pytest.raises(SettingsError):
            ServerSettings(**{"development": True, **wrong})  # type: ignore[arg-type]


@pytest.mark.rule("CO-30")
@pytest.mark.parametrize("name", ApiLimits.__struct_fields__)
def test_api_limit_out_of_range_is_refused(name: str) -> None:
    wrong: list[Any] = [-1, 1.5, "1", None, True, SETTING_NUMBER_MAX + 1]
    for value in wrong:
        with pytest.raises(SettingsError, match=name):
            ApiLimits(**{name: value})


@pytest.mark.rule("CO-30")
def test_zero_is_accepted_only_where_it_means_no_limit() -> None:
    allowing = set()
    for name in ApiLimits.__struct_fields__:
        try:
            ApiLimits(**{name: 0})
        except SettingsError:
            continue
        allowing.add(name)
    assert allowing == {
        "auth_failures_per_minute_max",
        "connections_per_address_max",
        "connections_per_principal_max",
        "unauthenticated_connections_max",
        "requests_per_second_max",
        "new_events_per_second_max",
        "frames_per_second_max",
        "user_messages_per_second_max",
        "chat_messages_per_second_max",
        "user_chats_per_second_max",
    }


def test_engine_and_api_limits_have_distinct_names() -> None:
    assert not set(Limits.__struct_fields__) & set(ApiLimits.__struct_fields__)


# --- derived values ---------------------------------------------------------------------------------------


@pytest.mark.rule("CO-24")
def test_origins_and_proxies_are_normalized() -> None:
    settings = load_flags(origins="HTTPS://App.Example.Org:443,http://b:8080", trusted_proxies="10.0.0.0/8, ::1")
    assert [*map(normalize_origin, settings.origins)] == ["https://app.example.org", "http://b:8080"]
    assert [str(one) for one in parse_networks(settings.trusted_proxies)] == ["10.0.0.0/8", "::1/128"]


@pytest.mark.rule("CO-21")
def test_authenticator_accepts_only_the_configured_credentials(tmp_path: Path) -> None:
    clock = ManualClock()
    secret = tmp_path / "secret.txt"
    secret.touch(mode=0o600)
    secret.write_bytes(b"s" * 32)
    source = KeyFile(str(secret), KeyKind.SECRET)
    (key,) = load_keys([source], ["HS256"])
    now_ms = clock.wall_ms()
    token = issue_token(key, subject="ada", grants=parse_grants(), issued_ms=now_ms, expires_ms=now_ms + 60_000)
    api_keys = ApiKeys(tmp_path / "keys.json", clock.wall_ms)
    api_key = api_keys.create("billing", "bills", parse_grants()).text

    tokens = {"tokens.algorithms": "HS256", "tokens.key_files": f"secret:{secret}"}
    file = {"api_keys.file": str(tmp_path / "keys.json")}
    for overrides, good in ((tokens, {token}), (file, {api_key}), ({**tokens, **file}, {token, api_key})):
        authenticator = new_authenticator(load(None, {}, overrides), clock.wall_ms)
        assert isinstance(authenticator, Authenticator)
        authenticator.reload()
        for credential in (token, api_key):
            if credential in good:
                assert authenticator.authenticate(credential).actor in ("user:ada", "client:billing")
            else:
                with pytest.raises(AuthError):
                    authenticator.authenticate(credential)


def test_development_mode_requires_no_credential() -> None:
    settings = ServerSettings(development=True, api_keys=ApiKeySettings(file="missing.json"))
    authenticator = new_authenticator(settings, ManualClock().wall_ms)
    assert isinstance(authenticator, DevelopmentAuthenticator)
    authenticator.reload()
    assert authenticator.authenticate(None).actor == "user:developer"


# --- documentation ----------------------------------------------------------------------------------------


def test_every_setting_is_described() -> None:
    fields = {*Limits.__struct_fields__, *ApiLimits.__struct_fields__}
    assert {name.removeprefix("limits.") for name in NAMES if name.startswith("limits.")} == fields
    assert NAMES["port"] == SettingDescription(
        "port", "whole number", "7171", "The port to listen on. 0 selects any free one."
    )
    assert NAMES["tokens.key_files"].kind == "list of key files"
    assert NAMES["tokens.algorithms"].default == "required"
    assert NAMES["tls.certificate"].default == "none"
    assert NAMES["log.format"].kind == "text or json"
    ours = [NAMES[f"limits.{name}"] for name in ApiLimits.__struct_fields__]
    ours += [one for name, one in NAMES.items() if not name.startswith(("tokens.", "limits."))]
    assert [one.name for one in ours if not one.text] == []


@pytest.mark.rule("CO-30")
def test_every_setting_is_documented_with_its_default() -> None:
    rows = re.findall(r"^\| `([a-z_.]+)` \| `([^`]+)` \| ?(.*) \|$", REFERENCE, re.MULTILINE)
    assert sorted((name, default) for name, default, _ in rows) == sorted(
        (one.name, one.default) for one in describe_settings()
    )
    assert all(text for _, _, text in rows)


def test_documented_settings_file_is_valid(tmp_path: Path) -> None:
    *_, example = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    settings = load(settings_file(tmp_path, example), {}, {})
    assert set(tomllib.loads(example)) >= {"log", "tls", "tokens", "api_keys", "limits"}
    assert settings.tokens is not None
    assert settings.tokens.key_files[0] == KeyFile("keys/login.pem", KeyKind.PEM, "2026-11")
    assert settings.engine_limits.queue_items_max == 5000


def test_documented_variables_exist() -> None:
    shown = set(re.findall(r"ONCELOG_[A-Z_]*[A-Z]", PAGE))
    assert shown
    assert shown <= {to_variable(name) for name in NAMES} | CLIENT_VARIABLES


# --- ports ---------------------------------------------------------------------------------------------------

DEFAULT_GRPC_PORT = "; grpc_port is 100 above port unless it is set"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"metrics_port": "7271"},
            f"grpc_port and metrics_port must be different, but both are 7271{DEFAULT_GRPC_PORT}",
        ),
        (
            {"grpc_port": "9000", "metrics_port": "9000"},
            "grpc_port and metrics_port must be different, but both are 9000",
        ),
        ({"metrics_port": "7171"}, "port and metrics_port must be different, but both are 7171"),
        ({"grpc_port": "7171"}, "port and grpc_port must be different, but both are 7171"),
        (
            {"metrics_port": "7171", "metrics_host": "::"},
            "port and metrics_port must be different, but both are 7171",
        ),
        (
            {"metrics_port": "7171", "metrics_host": "localhost"},
            "port and metrics_port must be different, but both are 7171",
        ),
    ],
)
def test_two_listeners_on_one_port_are_refused_with_both_setting_names(given: dict[str, str], message: str) -> None:
    assert refusal(overrides={**OPEN, **given}) == message


@pytest.mark.parametrize(
    "given",
    [
        {"port": "0", "grpc_port": "0", "metrics_port": "0"},
        {"metrics_port": "7271", "grpc": "false"},
        {"metrics_port": "7271", "metrics": "false"},
        {"metrics_port": "7271", "metrics_host": "127.0.0.2"},
        {"metrics_port": "7271", "grpc_port": "7272"},
    ],
)
def test_listeners_on_different_ports_are_accepted(given: dict[str, str]) -> None:
    assert load_flags(**given).port == int(given.get("port", "7171"))
