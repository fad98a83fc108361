"""Create API keys in a file and revoke every second one: `api_keys_worker.py FILE NAME COUNT`."""

import sys

from oncelog.server.auth.api_keys import ApiKeys
from oncelog.server.auth.principal import parse_grants


def main(path: str, name: str, count: str) -> None:
    keys = ApiKeys(path, lambda: 1)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    for number in range(int(count)):
        created = keys.create(name, f"{name} {number}", parse_grants([f"{name}/*"]))
        if number % 2:
            keys.revoke(created.key.id)
        sys.stdout.write(f"{created.text}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
