"""Chooses the inspector of a log by its address."""

from oncelog.storage.address import check_scheme, import_with_driver, is_address
from oncelog.storage.inspect.inspector import Inspector
from oncelog.storage.inspect.sqlite import FileInspector


def create_inspector(log: str) -> Inspector:
    """Return the inspector for the path of a file, or the address of a database.

    Raises SettingsError for an address that cannot be read or has another scheme, and where the database's driver is
    not installed.
    """
    if not is_address(log):
        check_scheme(log)
        return FileInspector(log)
    inspector: Inspector = import_with_driver("oncelog.storage.inspect.postgres").DatabaseInspector(log)
    return inspector
