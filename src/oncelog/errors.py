"""The one tree of errors. Outcomes of a submission are values (`core.values`), never one of these.

OncelogError
├── CanonicalError     a value has no canonical form; says where in it and why
├── PolicyError        a policy that contradicts itself, refused when it is declared
└── SettingsError      a setting of the log out of its range, refused at start
"""


class OncelogError(Exception):
    """The root: catch it to catch all that Oncelog raises on purpose."""


class CanonicalError(OncelogError, ValueError):
    """A value that has no canonical form. `path` says where (`$.items[2].price`), `reason` why."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class PolicyError(OncelogError, ValueError):
    """A policy that contradicts itself."""


class SettingsError(OncelogError, ValueError):
    """A setting of the log that is out of its range."""
