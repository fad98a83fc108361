"""Entry point of the `oncelog` script.

It is outside of the package `oncelog`: while the package and the commands are imported, which takes about a third of a
second, Ctrl-C has to end the process. An exception in the middle of an import prints a traceback, and can crash an
extension module.
"""

import signal


def main() -> None:
    """Run the `oncelog` command."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from oncelog import cli  # noqa: PLC0415 - see above

    cli.main()
