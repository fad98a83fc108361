"""Who looks at a log, by what names it."""

from oncelog.stores.address import is_address, with_driver
from oncelog.stores.sqlite.inspecting import FileInspector
from oncelog.stores.viewing import Inspector


def inspector_of(log: str) -> Inspector:
    """For the path of a file, or the address of a database.

    Raises SettingsError for an address that cannot be read, and where the database's driver is not installed.
    """
    if not is_address(log):
        return FileInspector(log)
    inspector: Inspector = with_driver("oncelog.stores.postgres.inspecting").inspector_of(log)
    return inspector
