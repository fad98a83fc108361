"""Named consumers: readers whose cursor is stored in the log."""

from oncelog.core.batch_state import BatchState
from oncelog.core.values import Applied, Reason, Refused, SetCursor


def set_cursor(item: SetCursor, state: BatchState) -> Applied | Refused:
    """Keeps a consumer's cursor: never beyond the newest, and back only when it is told to rewind."""
    identity = (item.scope, item.consumer)
    lane = state.get_stream_lane(item.scope) if item.scope else state.get_lane(0)
    newest = (state.streams.get(item.scope) or 0) if item.scope else lane.position
    if item.cursor is not None and not 0 <= item.cursor <= newest:
        return Refused(
            Reason.INVALID_CURSOR, f"cursor {item.cursor} is not from 0 to {newest}, the newest", "cursor", newest
        )
    stored = state.consumers.get(identity)
    is_behind = item.cursor is not None and stored is not None and item.cursor < stored
    if item.cursor == stored or (is_behind and not item.rewind):
        return Applied(changed=False)
    state.consumers.put(identity, item.cursor)
    lane.is_touched = True
    return Applied(changed=True)
