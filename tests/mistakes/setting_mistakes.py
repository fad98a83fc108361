"""Mistakes in the server's settings."""

from mistakes.mistake import SECRET, MistakeTable

MISTAKES = MistakeTable()
command = MISTAKES.add_command

SERVE = "serve --config oncelog.toml"


def settings(name: str, content: str, *wrong: str, remedy: str) -> None:
    """Add a mistake in the settings file of a server that is otherwise in development mode."""
    file = {"oncelog.toml": f"development = true\nport = 0\n{content}\n"}
    command(name, SERVE, "oncelog.toml", *wrong, remedy=remedy, files=file)


# --- the file

command("missing settings file", "serve --config none.toml", "none.toml", remedy="check the path")
command("directory as settings file", "serve --config folder", "folder is not a file", remedy="name a regular file")
settings("malformed settings", "host = localhost", "not valid TOML", "line 3", remedy="write text in quotes")
settings("address without quotes", "host = 127.0.0.1", "not valid TOML", "line 3", remedy="write text in quotes")
settings("level without quotes", "[log]\nlevel = info", "not valid TOML", "line 4", remedy="write text in quotes")
settings("setting written twice", "port = 1", "not valid TOML", "line 3", remedy="Cannot overwrite a value")
settings("misspelt setting", "hots = '127.0.0.1'", "'hots'", remedy="did you mean host")
settings("misspelt table", "[limit]\nqueue_items_max = 5", "limit", remedy="did you mean limits")
settings(
    "misspelt setting in a table",
    "[limits]\nque_items_max = 5",
    "limits.que_items_max",
    remedy="did you mean limits.queue_items_max",
)
settings(
    "setting outside of its table",
    "queue_items_max = 5",
    "'queue_items_max'",
    remedy="did you mean limits.queue_items_max",
)
settings("table that is a value", "tls = 'server.pem'", "tls", remedy="must be a table")

# --- values

settings("number in quotes", "shutdown_ms = '5000'", "shutdown_ms", remedy="must be a whole number")
settings(
    "several mistakes",
    "metrics_port = 'x'\nshutdown_ms = 0.5",
    "port must",
    "shutdown_ms must",
    remedy="2 settings are invalid",
)
settings("fraction", "shutdown_ms = 0.5", "shutdown_ms", remedy="must be a whole number")
settings("flag in quotes", "grpc = 'no'", "grpc", remedy="must be true or false")
settings("port out of range", "metrics_port = 70000", "metrics_port", "70000", remedy="to 65535")
settings(
    "negative limit", "[limits]\nqueue_items_max = -1", "limits.queue_items_max", "-1", remedy="whole number from 1"
)
settings("one origin instead of a list", "origins = 'https://app.example.org'", "origins", remedy="must be a list")
settings(
    "origin with a path", "origins = ['https://app.example.org/chat']", "origins", "/chat", remedy="must have the form"
)
settings(
    "proxy that is a name", "trusted_proxies = ['proxy']", "trusted_proxies", "'proxy'", remedy="must be IP addresses"
)
settings("unknown log level", "[log]\nlevel = 'verbose'", "log.level", remedy="must be debug, info")
settings("host that is a url", "host = 'http://localhost'", "host", remedy="must be an IP address or a host name")
settings("file mode for the world", "file_mode = '0644'", "file_mode", remedy="0600")
settings("malformed tenant", "tenants = ['acme records=5']", "tenants", remedy="records_max")
settings(
    "unknown algorithm for tokens",
    "[tokens]\nalgorithms = ['HS512']\nkey_files = ['secret:a']",
    "tokens.algorithms",
    remedy="HS256",
)
settings(
    "algorithm none", "[tokens]\nalgorithms = ['none']\nkey_files = ['secret:a']", "tokens.algorithms", remedy="HS256"
)
settings(
    "key file without a kind",
    "[tokens]\nalgorithms = ['HS256']\nkey_files = ['a.key']",
    "tokens.key_files",
    remedy="kind:path",
)
settings("store without a name", "store = ''", "store", remedy="must")
command(
    "latency report in a missing directory",
    "serve --development --port 0 --set latency_report=reports/latency.json",
    "latency_report: reports/latency.json",
    "No such file or directory",
    remedy="check the directory",
)

# --- combinations

command("tokens without keys", "serve --port 0 --set tokens.algorithms=HS256", "tokens.key_files", remedy="must be set")
command(
    "latency report that replaces the log",
    "serve --development --store orders.db --set latency_report=./orders.db",
    "latency_report",
    "./orders.db",
    remedy="name another file",
)
command(
    "certificate without a key",
    "serve --development --set tls.certificate=server.pem",
    "tls.certificate",
    remedy="must be set together",
)
command(
    "limits that contradict",
    "serve --development --set limits.request_items_max=100",
    "limits.request_events_max",
    "100",
    remedy="must not exceed",
)

command(
    "development on all addresses",
    "serve --development --host 0.0.0.0",
    "development",
    "0.0.0.0",  # noqa: S104 - in the message
    remedy="must be a loopback address",
)
command("no way to authenticate", "serve --port 0", "authenticate", remedy="--development")
command(
    "same ports",
    "serve --development --port 8080 --set grpc_port=8080",
    "grpc_port",
    "8080",
    remedy="must be different",
)
command(
    "lanes of an existing log",
    "serve --development --port 0 --store app.db --set ledger.eviction_interval=7",
    "app.db",
    "eviction_interval=7",
    remedy="Leave out the settings",
)

# --- other sources

command(
    "misspelt variable", "serve --development", "ONCELOG_PROT", remedy="did you mean ONCELOG_PORT", ONCELOG_PROT="8080"
)
command(
    "misspelt variable of a table",
    "serve --development",
    "ONCELOG_LIMITS_QUEUE_ITEMS_MAX",
    remedy="did you mean ONCELOG_LIMITS__QUEUE_ITEMS_MAX",
    ONCELOG_LIMITS_QUEUE_ITEMS_MAX="5",
)
command("variable of a wrong type", "serve --development", "ONCELOG_PORT", remedy="whole number", ONCELOG_PORT="http")
command("flag with a word", "serve", "ONCELOG_DEVELOPMENT", remedy="true or false", ONCELOG_DEVELOPMENT="yes")
command("set without a value", "serve --development --set port", "--set port", remedy="NAME=VALUE")
command("misspelt set", "serve --development --set limits.queue=5", "limits.queue", remedy="did you mean")

# --- files that settings name

KEYS = "serve --port 0 --set tokens.algorithms=HS256 --set tokens.key_files=secret:"
command("readable secret", f"{KEYS}readable.key", "readable.key", remedy="chmod 600")
command("missing secret", f"{KEYS}none.key", "none.key", remedy="check the path")
command("empty secret", f"{KEYS}empty.key", "empty.key", remedy="at least", files={"empty.key": ""})
command("missing api keys", "serve --port 0 --set api_keys.file=none.json", "none.json", remedy="check the path")
command(
    "api keys that are a secret",
    "serve --port 0 --set api_keys.file=secret.key",
    "secret.key is not an API key file: not JSON",
    remedy="oncelog apikey create",
    files={"secret.key": SECRET},
)
command(
    "missing certificate",
    "serve --development --port 0 --set tls.certificate=a.pem --set tls.private_key=b.pem",
    "b.pem",
    remedy="check the path",
)
command(
    "file that is not a certificate",
    "serve --development --port 0 --set tls.certificate=server.pem --set tls.private_key=server.pem",
    "server.pem",
    remedy="PEM",
)
command(
    "missing schemas",
    "serve --development --port 0 --set deltas_schemas=none.json",
    "none.json",
    remedy="check the path",
)
command(
    "malformed schemas", "serve --development --port 0 --set deltas_schemas=notes.txt", "notes.txt", remedy="not JSON"
)
command(
    "missing validator",
    "serve --development --port 0 --set validate=shop.checks:check",
    "shop.checks",
    remedy="install the module",
)
command(
    "malformed validator",
    "serve --development --port 0 --set 'validate=shop checks'",
    "validate",
    remedy="package.module:callable",
)
