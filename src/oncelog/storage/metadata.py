"""Metadata of a log: schema version, epoch, settings, and the leaps of its numbers.

`core.rules.leaps` defines leaps. The numbers of all leaps are stored as one string in the log's state. Every
transaction reads that row anyway, so a log that was never restored does no extra work.
"""

import logging
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec
import orjson
from msgspec import Struct

from oncelog.core.internal_records import Gap, count_missing_numbers
from oncelog.core.limits import LEAP_ABOVE_MAX, REQUESTED_ABOVE_MAX
from oncelog.core.rules.leaps import CLOCK_BEHIND_MS_MAX, choose_leap_number, find_highest_number, find_last_commit_ms
from oncelog.core.values import LaneHead, Leap, Request, RequestedSettings, Settings
from oncelog.errors import CorruptError, NewerSchemaError, SettingsError

EPOCH_BYTES: Final = 8
DAMAGE_HINT: Final = "run `oncelog verify`; if it reports damage, restore a backup"
"""Advice in errors about stored data that contradicts itself."""


class LogMetadata(Struct, frozen=True):
    """Properties of a log. Only the epoch and the schema version ever change."""

    schema_version: int
    epoch: str
    settings: Settings
    index_secret: bytes
    created_ms: int

    @classmethod
    def from_columns(cls, log_name: str, columns: Iterable[Any]) -> "LogMetadata":
        """Return metadata from the columns of the statement `log`. Raises CorruptError for invalid settings."""
        schema_version, epoch, lanes, eviction_interval, index_secret, created_ms = columns
        try:
            settings = Settings(lanes, eviction_interval)
        except SettingsError as error:
            raise CorruptError(f"{log_name} is marked as a log, but its settings are invalid: {error}") from error
        return cls(schema_version, epoch, settings, index_secret, created_ms)


def new_epoch() -> str:
    """Return a random name for a new history."""
    return secrets.token_hex(EPOCH_BYTES)


def new_settings(wanted: Settings | RequestedSettings | None) -> Settings:
    """Return the settings of a new log."""
    return wanted.to_settings() if isinstance(wanted, RequestedSettings) else wanted or Settings()


def check_schema_version(log_name: str, version: int, newest: int) -> None:
    """Raise NewerSchemaError for a log that a newer version of Oncelog wrote."""
    if version > newest:
        raise NewerSchemaError(
            f"{log_name} was created by a newer Oncelog (schema {version}; this version reads schemas up to {newest}). "
            "Nothing was changed. Upgrade Oncelog to open it."
        )


def check_settings(log_name: str, stored: Settings, requested: Settings | RequestedSettings | None) -> None:
    """Raise SettingsError if the requested settings differ from the log's settings. None accepts any settings."""
    for name in Settings.__struct_fields__:
        stored_value, requested_value = getattr(stored, name), getattr(requested, name, None)
        if requested_value is not None and stored_value != requested_value:
            raise SettingsError(
                f"{log_name} was created with {name}={stored_value}, which cannot change, and cannot be opened with "
                f"{name}={requested_value}. Leave out the settings to open the log with its stored settings."
            )


logger: Final = logging.getLogger("oncelog.stores")

_LEAPS_DECODER: Final = msgspec.json.Decoder(tuple[int, ...])


class EpochRenewal(Struct, frozen=True):
    """A new history of a log: the old and new epochs, and the number above which all numbers continue."""

    old_epoch: str
    new_epoch: str
    above: int


class ReplacedLog(Struct, frozen=True):
    """Log that a restore replaces: its epoch, and the highest number that it has assigned."""

    epoch: str = ""
    highest_number: int = 0
    lowest_above: int = 0
    """Lower bound for the number above which the restored log continues by default. It is 0 unless the replaced log may
    have assigned higher numbers than `highest_number`."""


@lru_cache(maxsize=8)
def decode_leaps(text: str | None) -> tuple[int, ...]:
    """Decode the numbers of all leaps, in ascending order. Raises CorruptError."""
    if text is None:
        return ()
    try:
        return _LEAPS_DECODER.decode(text)
    except msgspec.MsgspecError as error:
        raise CorruptError(f"the stored list of leaps is damaged: {error}") from error


PREVIOUS_EPOCHS_MAX: Final = 100
"""Maximum number of previous epochs that are returned, for the newest restores."""


class Operator(Struct, frozen=True):
    """Caller that restores a log, as recorded in the bodies of the restore records."""

    actor: str = ""
    os_user: str = ""
    """Operating-system user. The name is not authenticated, so it is not the actor."""


class _RestoreBody(Struct):
    previous_epoch: str
    replaced_epoch: str = ""


def decode_previous_epochs(bodies: Iterable[bytes]) -> tuple[str, ...]:
    """Return the epochs that restores ended, from the bodies of the restore records. An erased body names no epoch."""
    named: list[str] = []
    for body in bodies:
        with suppress(msgspec.MsgspecError):
            restored = msgspec.json.decode(body, type=_RestoreBody)
            named += [restored.previous_epoch, restored.replaced_epoch]
    return tuple(dict.fromkeys(filter(None, named)))


def build_leap_request(
    heads: Mapping[int, LaneHead],
    metadata: LogMetadata,
    above: int | None,
    now_ms: int,
    new_epoch: str,
    replaced: ReplacedLog = ReplacedLog(),
    operator: Operator = Operator(),
) -> tuple[Request, EpochRenewal]:
    """Return the batch that performs a leap. Raises SettingsError if `above` is too low or too high.

    `replaced` is the log that this one replaces, and `operator` is the caller, if known.
    """
    highest = max(find_highest_number(heads.values()), replaced.highest_number)
    chosen = above
    if chosen is None:
        chosen = max(choose_leap_number(heads.values(), metadata.created_ms, now_ms), highest, replaced.lowest_above)
        behind_ms = find_last_commit_ms(heads.values(), metadata.created_ms) - now_ms
        if behind_ms > CLOCK_BEHIND_MS_MAX and chosen > replaced.highest_number:
            logger.warning(
                "the clock is %d ms behind the last commit of the log, so the time since that commit is unknown, and "
                "numbers continue only %d above the highest one. If the lost history may have assigned higher numbers, "
                "run `oncelog epoch LOG --renew --above N` before anything uses the log",
                behind_ms,
                chosen - highest,
            )
    if chosen < highest:
        raise SettingsError(
            f"above must be at least {highest}, the highest number that the log has assigned, not {chosen}"
        )
    above_max = REQUESTED_ABOVE_MAX if above is not None and highest < REQUESTED_ABOVE_MAX else LEAP_ABOVE_MAX
    if chosen > above_max:
        hint = ", so that later restores have higher numbers left" if above is not None else "; set it with --above"
        raise SettingsError(f"above must be at most {above_max}, not {chosen}{hint}")
    body: dict[str, str | int] = {
        "above": chosen,
        "epoch": new_epoch,
        "previous_epoch": metadata.epoch,
        "type": "restore",
    }
    if replaced.epoch:
        body["replaced_epoch"] = replaced.epoch
    if operator.actor:
        body |= {"actor": operator.actor, "os_user": operator.os_user}
    return Request((Leap(chosen, orjson.dumps(body)),)), EpochRenewal(metadata.epoch, new_epoch, chosen)


class LaneGaps(NamedTuple):
    """Numbers that leaps have skipped in a lane."""

    positions: tuple[Gap, ...] = ()
    heights: tuple[Gap, ...] = ()


NO_GAPS: Final = LaneGaps()


def count_records(heads: Mapping[int, LaneHead], gaps: Mapping[int, LaneGaps]) -> int:
    """Return the number of records up to the heads."""
    return sum(
        head.position - count_missing_numbers(gaps.get(lane, NO_GAPS).positions, 0, head.position)
        for lane, head in heads.items()
    )


def count_blocks(heads: Mapping[int, LaneHead], gaps: Mapping[int, LaneGaps]) -> int:
    """Return the number of blocks up to the heads."""
    return sum(
        head.height - count_missing_numbers(gaps.get(lane, NO_GAPS).heights, 0, head.height)
        for lane, head in heads.items()
    )
