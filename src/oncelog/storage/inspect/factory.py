"""Chooses the inspector for a log by its address."""

from oncelog.storage.address import check_scheme, import_with_driver, is_address
from oncelog.storage.inspect.inspector import Inspector
from oncelog.storage.inspect.sqlite import FileInspector


def create_inspector(log: str, *, is_open_here: bool = False) -> Inspector:
    """Return the inspector for a file path or a database address.

    Set `is_open_here` if this process has the log open.

    Raises SettingsError if the address cannot be parsed or has an unsupported scheme, or if the database driver is not
    installed.
    """
    if not is_address(log):
        check_scheme(log)
        return FileInspector(log, is_open_here=is_open_here)
    inspector: Inspector = import_with_driver("oncelog.storage.inspect.postgres").DatabaseInspector(log)
    return inspector
