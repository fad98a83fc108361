"""Times as people read them."""

from datetime import UTC, datetime, timedelta


def format_utc(time_ms: int) -> str:
    """Milliseconds since 1970 as a time in UTC; the number itself where no calendar goes."""
    try:
        moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=time_ms)
    except OverflowError:
        return f"{time_ms} ms"
    return moment.isoformat(sep=" ", timespec="milliseconds").replace("+00:00", " UTC")
