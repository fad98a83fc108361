"""The operator of a command, for audit records."""

import os
import pwd
from typing import Final

from oncelog.storage.leaps import Operator

CLI_ACTOR: Final = "system:cli"


def get_cli_operator() -> Operator:
    """Return the command line as the actor, with the name of the operating system's user."""
    number = os.getuid()
    try:
        return Operator(CLI_ACTOR, pwd.getpwuid(number).pw_name)
    except KeyError:  # a container may run as a user without a name
        return Operator(CLI_ACTOR, str(number))
