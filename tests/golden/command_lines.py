"""Record the command line: output and exit status of every command on a small fixed log, including failures."""

import re
import shlex
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Final

from databases import address_of
from golden.commands import fixed_server, run_command, run_script

HERE: Final = Path(__file__).parent
SECRET: Final = "0123456789abcdef" * 4
CSV: Final = "SKU,name,Price (EUR),stock\np1,Tea,3.5,7\np2,Milk,1,\n"
DELTA: Final = (
    '{"op":"INSERT","table":"products","rowId":"p9","columns":[{"column":"name","value":"Salt"}],'
    '"hlc":"115816896921600009","clientId":"till-2"}'
)
EVENT: Final = '{"type":"order.placed","order":17}'
ID: Final = "0198f3c2-7d55-7c1e-9a61-2f6f0c1b5a10"
IMPORT: Final = "deltas import shop products rows.csv --url {url} --client-id loader"

LOG_COMMANDS: Final = (
    "--version",
    "--no-such-option",
    "no-such-command",
    "verify app.db",
    "verify app.db --json",
    "verify app.db --no-side-state",
    "verify missing.db",
    "verify text.txt",
    "verify damaged.db",
    "verify damaged.db --json",
    "verify",
    "head app.db",
    "head missing.db",
    "show app.db 00000000-0000-0000-0000-000000000001 --policy events",
    "show app.db 00000000000000000000000000000001",
    "show app.db 00000000000000000000000000000001 --policy events --json",
    "show app.db 00000000-0000-0000-0000-000000000002 --policy events",
    "show app.db 0:3",
    "show app.db 0:99",
    "show app.db 9:1",
    "show app.db 0002000000000001",
    "show app.db msg_00000000000020000000000007",
    "show app.db 'note 1'",
    "show app.db 'note 9' --json",
    "show app.db ''",
    "show missing.db 0:1",
    "proof app.db 0:1 --output proof.json",
    "proof app.db 0:1 --output proof.json",
    "proof app.db --lane 2 --position 1",
    "proof app.db 0:99",
    "proof app.db 00000000000000000000000000000001",
    "proof --check proof.json",
    "proof --check proof.json --head head.json",
    f"proof --check proof.json --block-hash {'00' * 32}",
    "proof --check text.txt",
    "audit app.db",
    "audit app.db --json",
    "audit app.db --act erase --actor user:ada",
    "audit app.db --since yesterday",
    "stats app.db",
    "stats app.db --json",
    "stats missing.db",
    "clock app.db",
    "clock app.db --json",
    "clock app.db --confirm",
    "epoch app.db",
    "epoch app.db --json",
    "backup app.db copy.db",
    "backup app.db copy.db",
    "backup app.db copy.db --force",
    "backup app.db other.db --file-mode 0777",
    "restore text.txt restored.db",
    "restore copy.db restored.db --full",
    "restore copy.db restored.db",
    "restore copy.db restored.db --force --above 2000000",
    "verify restored.db",
    "verify restored.db --head head.json",
    "head restored.db",
    "epoch restored.db --renew",
    "audit restored.db --act restore",
    "move app.db elsewhere.db",
    "move missing.db postgresql://app@127.0.0.1:1/none",
)
KEY_COMMANDS: Final = (
    "token --key secret.txt --alg HS256 --sub ada --read 'orders/*' --write orders/1",
    "token --key secret.txt --alg none --sub ada",
    "token --key missing.txt --alg HS256 --sub ada",
    "apikey create keys.json --client-id till --name 'Till 1' --read 'orders/*' --write orders/1",
    "apikey create keys.json --client-id '' --name none",
    "apikey list keys.json",
    "apikey list keys.json --json",
    "apikey revoke keys.json no-such-key",
    "apikey list missing.json",
    "init conf --port 99999",
    "init conf --client-id till --read orders --write orders --tokens",
    "init conf",
    "doctor",
    "doctor app.db --config conf/oncelog.toml",
)
IDENTITIES: Final = {
    "key jcs": '{"b": 1.0, "a": [-0, 1e21, "é"]}\n{"a":1,"a":2}\n9007199254740993\n',
    "key args": '{"b": 1, "a": [null, "é"]}\n{"a": 1.5}\n',
    "key fingerprint": '{"partitions":["b","a","b"],"event":{"type":"x","n":1.0}}\n{"partitions":[]}\n',
    "key delta": '{"clientId":"c","hlc":"1","table":"t","rowId":"r","columns":[]}\n{"clientId":1}\n',
    "key run": (
        '{"plan_id":null,"campaign_id":7,"event_type":"e","tool_name":null,"ruleset_version":null,"args_json":{}}\n{}\n'
    ),
}
SERVE_COMMANDS: Final = (
    "serve --set port=none",
    "serve --set no_such_setting=1",
    "serve --set limits.request_events_max=0 --development",
    "serve --host 0.0.0.0 --development",
    "serve --store log.db",
    "serve --config missing.toml",
    "serve --set port",
    "serve --development --store text.txt --port 0",
    "serve --set tokens.algorithms=HS256 --set tokens.key_files=secret:missing.txt",
    "serve --development --set tenants='ledger/acme bytes_max=x'",
)
SHELL_COMMANDS: Final = (
    "profiles",
    "profiles --json",
    "completion bash",
    "completion zsh",
    "completion fish",
    "completion tcsh",
)
SERVER_COMMANDS: Final = (
    f"submit --url {{url}} --partition orders --id {ID} '{EVENT}'",
    f"submit --url {{url}} --partition orders --id {ID} '{EVENT}' --json",
    f'submit --url {{url}} --partition orders --id {ID} \'{{"type":"other"}}\'',
    f"submit --url {{url}} --partition orders --id {ID} 'no event'",
    f"submit --url {{url}} '{EVENT}'",
    'submit --url {url} --partition orders \'{"type":"generated"}\'',
    f"submit --url {{url}} --partition orders --expected-committed-id 9 '{EVENT}'",
    f"submit --url ftp://server --partition orders '{EVENT}'",
    "tail --url {url} --partition orders --limit 2 --json",
    "tail --url {url} --partition orders --limit 2 --pretty",
    "tail --url {url} --partition orders --since 1 --limit 1",
    "tail --url {url} --partition orders --epoch 0000000000000000 --limit 1",
    "tail --url {url}",
    "load --url {url} --retries 101",
    "deltas push shop deltas.jsonl --url {url} --client-id till-1",
    "deltas push shop deltas.jsonl --url {url} --client-id till-1 --json",
    "deltas push shop missing.jsonl --url {url} --client-id till-1",
    "deltas push . deltas.jsonl --url {url} --client-id till-1",
    "deltas pull shop --url {url}",
    "deltas pull shop --url {url} --pretty --since 0 --limit 1",
    "deltas pull shop --url {url} --epoch 0000000000000000",
    f"{IMPORT} --row-id SKU --infer --rename 'Price (EUR)=price' --dry-run",
    f"{IMPORT} --row-id SKU --infer --rename 'Price (EUR)=price' --at 2026-01-01T00:00:00Z --json",
    f"{IMPORT} --row-id none",
    "deltas rows shop products --url {url}",
    "deltas rows shop products --url {url} --format csv",
    "deltas rows shop products --url {url} --format table",
    "deltas rows shop products --url {url} --row p1",
    "deltas rows shop products --url {url} --row none",
    "deltas snapshot shop --url {url}",
    "deltas compact shop --url {url} --keep 1 --json",
    "deltas compact shop --url {url} --keep 1",
    "deltas compact shop --url {url}",
    "deltas pull shop --url {url} --since 1",
    "audit --url {url}",
    "audit --url {url} --json",
    "audit",
    f"show {ID} --url {{url}} --partition orders",
    f"show {ID} --url {{url}} --partition orders --json",
    f"show {ID} --url {{url}} --partition none",
    f"show {ID} --url {{url}}",
    f"show {ID}",
    "show served.db 0:1 --url {url}",
    "stats",
    "submit --url {url} --partition orders -",
    "tail --profile none --partition orders",
)
MOVE_COMMANDS: Final = (
    "move app.db {database}",
    "move app.db {database}",
    "verify {database}",
    "head {database}",
    "epoch {database}",
    "stats app.db",
    "show {database} 0:3",
    "proof {database} 0:1",
    "backup {database} copy.db",
    "restore app.db {database}",
    "move app.db {database}-missing",
)
_VOLATILE: Final = (
    (re.compile(r'"took_s":[0-9.e-]+'), '"took_s":<seconds>'),
    (re.compile(r'"os_user":"[^"]*"'), '"os_user":"<user>"'),
)


def record_commands(directory: Path) -> dict[str, str]:
    """Record the commands that work on a log file, and the key commands."""
    _prepare(directory)
    recorder = Recorder(directory)
    lines = [*recorder.run_all(LOG_COMMANDS), *recorder.run_all(KEY_COMMANDS)]
    lines += [line for command, stdin in IDENTITIES.items() for line in recorder.run(command, stdin)]
    lines += recorder.run_all(SERVE_COMMANDS)
    lines += recorder.run_all(SHELL_COMMANDS)
    return {"cli-commands.txt": "\n".join(lines)}


def record_server_commands(directory: Path) -> dict[str, str]:
    """Record the commands that connect to a server."""
    _prepare(directory)
    with fixed_server(str(directory / "served.db"), "--development", "--quiet") as server:
        recorder = Recorder(directory, {"url": server.url})
        lines = recorder.run_all(SERVER_COMMANDS)
    return {"cli-server-commands.txt": "\n".join(lines)}


def record_postgres_commands(directory: Path) -> dict[str, str]:
    """Record moving a log into a database, and commands that read that database."""
    _prepare(directory)
    recorder = Recorder(directory, {"database": address_of(directory / "moved")})
    return {"cli-postgres-commands.txt": "\n".join(recorder.run_all(MOVE_COMMANDS))}


class Recorder:
    """Runs commands in a directory. `values` maps the placeholders in the commands, such as `{url}`, to values."""

    def __init__(self, directory: Path, values: Mapping[str, str] | None = None) -> None:
        self._directory = directory
        self._values = dict(values or {})
        self._runs = 0

    def run_all(self, commands: Iterable[str]) -> list[str]:
        return [line for command in commands for line in self.run(command)]

    def run(self, command: str, stdin: str = "") -> list[str]:
        """Run a command and return its command line, standard output, standard error and exit status as lines."""
        self._runs += 1
        arguments = map(self._fill_in_values, shlex.split(command))
        done = run_command(*arguments, stdin=stdin, cwd=self._directory, seed=str(self._runs))
        return [
            f"$ oncelog {command}",
            *(f"stdin: {line}" for line in stdin.splitlines()),
            *(line.rstrip() for line in self._replace_values(done.stdout).splitlines()),
            *(f"stderr: {line.rstrip()}" for line in self._replace_values(done.stderr).splitlines()),
            f"exit status {done.returncode}\n",
        ]

    def _fill_in_values(self, word: str) -> str:
        for name, value in self._values.items():
            word = word.replace(f"{{{name}}}", value)
        return word

    def _replace_values(self, text: str) -> str:
        for name, value in self._values.items():
            text = text.replace(value, f"{{{name}}}")
        for pattern, replacement in _VOLATILE:
            text = pattern.sub(replacement, text)
        return text.replace(str(self._directory), "<directory>")


def _prepare(directory: Path) -> None:
    """Write the log and the other files that the commands use."""
    run_script(HERE / "fixed_history.py", str(directory / "app.db"))
    _damage(directory / "app.db", directory / "damaged.db")
    head = run_command("head", "app.db", cwd=directory).stdout
    contents = {
        "text.txt": "This is not a log.\n",
        "secret.txt": SECRET,
        "head.json": head,
        "rows.csv": CSV,
        "deltas.jsonl": DELTA + "\n",
    }
    for name, text in contents.items():
        (directory / name).write_text(text, encoding="utf-8")
        (directory / name).chmod(0o600)


def _damage(path: Path, copy: Path) -> None:
    """Copy a log and change the body of one record in the copy."""
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
        (place,) = target.execute("SELECT min(place) FROM oncelog_records WHERE policy = 'events'").fetchone()
        target.execute("UPDATE oncelog_records SET body = CAST('{}' AS BLOB) WHERE place = ?", [place])
        target.commit()
    copy.chmod(0o600)
