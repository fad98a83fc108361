"""`oncelog profiles`: list the profiles, and the server that commands use."""

from typing import Any

from oncelog.cli.output import escape_unprintable, format_table, print_result
from oncelog.cli.profiles import Profile, load_profiles
from oncelog.cli.server_options import ServerOptions, choose_server
from oncelog.cli.terminal import AsJson


def profiles(as_json: AsJson = False) -> None:
    """List the profiles, and the server that commands use without options. Tokens are not printed.

    A profile names a server and its token. The file is ~/.config/oncelog/profiles.toml, or ONCELOG_PROFILES_FILE:

      default = "production"

      profiles.production.url = "https://log.example.org"

      profiles.production.token_file = "production.token"

      profiles.production.client_id = "billing"

    Only its owner may read the file if it contains a token (`token = "…"` instead of `token_file`). The options --url
    and --profile come first, then ONCELOG_URL, then ONCELOG_PROFILE, then `default`. A token is used only for the
    address of its profile.

    Example:  oncelog profiles --json
    """
    file, choice = load_profiles(), choose_server(ServerOptions())
    found = [_to_json(name, profile, is_used=name == choice.profile_name) for name, profile in file.profiles.items()]
    fields = {"file": file.path, "url": choice.url, "source": choice.source, "profiles": found}
    rows = [
        (
            "*" if profile["is_used"] else "",
            profile["name"],
            profile["url"],
            profile["token"] or "none",
            profile["client_id"] or "",
        )
        for profile in found
    ]
    lines = [
        *format_table(("", "profile", "url", "token", "client id"), rows),
        f"profile file: {escape_unprintable(file.path)}{'' if found else ' (no profiles)'}",
        f"commands use {choice.url} ({choice.source})",
    ]
    print_result(fields, lines, as_json)


def _to_json(name: str, profile: Profile, *, is_used: bool) -> dict[str, Any]:
    """Return a profile as JSON. `token` says where the token is."""
    token = "in the profile" if profile.token is not None else profile.token_file
    return {"name": name, "url": profile.url, "token": token, "client_id": profile.client_id, "is_used": is_used}
