"""Small model of a gateway, as specified in docs/reference/deltas.md, for tests without a network.

The model keeps the deltas of every row and computes a row in the simplest way: it replays the deltas in stamp order. A
row whose tombstone was dropped has no deltas. The model does not use `oncelog.core`.
"""

import hashlib
import json
from collections.abc import Callable
from copy import deepcopy
from typing import Any

DRIFT_MS = 5000
BAD = "bad"
"""Value that the gateway's schema refuses."""

HORIZON_CLIENT = "oncelog.horizon"

Delta = dict[str, Any]
Row = dict[str, Any]
Name = tuple[str, str]


def json_bytes(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def id_of(delta: Delta) -> str:
    """Return the id of a delta whose values `json` writes in canonical form."""
    fields = {name: delta[name] for name in ("clientId", "hlc", "table", "rowId", "columns")}
    return hashlib.sha256(json_bytes(fields)).hexdigest()


def stamp_of(delta: Delta) -> tuple[int, bytes, str]:
    return int(delta["hlc"]), delta["clientId"].encode("utf-16-be"), delta["deltaId"]


def exists(row: Row) -> bool:
    if row["written"] is None or row["deleted"] is None:
        return row["written"] is not None
    return stamp_of(row["written"]) > stamp_of(row["deleted"])


def horizon_delete(horizon: int, name: Name) -> Delta:
    """Return the DELETE that represents a dropped tombstone."""
    table, row_id = name
    made = {"clientId": HORIZON_CLIENT, "hlc": str(horizon), "table": table, "rowId": row_id, "columns": []}
    return {**made, "op": "DELETE", "deltaId": id_of(made)}


class Refusal(Exception):  # noqa: N818 - an error answer
    def __init__(self, status: int, code: str, **members: Any) -> None:
        super().__init__(code)
        self.status = status
        self.body = json_bytes({"error": f"refused by the model: {code}", "code": code, **members})


class ModelGateway:
    def __init__(self) -> None:
        self.log: list[Delta] = []
        """Deltas that readers receive, in order."""
        self.known: dict[str, int] = {}
        """Sequence of each pushed delta, by id."""
        self.deltas: dict[Name, list[Delta]] = {}
        """Deltas of each row that has state."""
        self.horizon: int | None = None
        self.compacted = 0
        self.epoch = "epoch 1"
        self.previous_epochs: list[str] = []
        self.now_ms = 1_700_000_000_000
        self.busy = False
        self.lost: set[str] = set()
        """Ids of deltas that were lost when a backup was restored."""
        self._backup: tuple[Any, ...] = ([], {}, {}, None)
        self._epochs = 1

    # --- requests

    def push(self, body: bytes) -> bytes:
        deltas: list[Delta] = json.loads(body)["deltas"]
        if self.busy:
            raise Refusal(503, "SERVER_BUSY", retryAfterMs=5)
        for index, delta in enumerate(deltas):
            if delta["deltaId"] != id_of(delta):
                raise Refusal(400, "DELTA_ID_MISMATCH", index=index)
        fresh = [(index, one) for index, one in enumerate(deltas) if one["deltaId"] not in self.known]
        for index, delta in fresh:
            ahead_ms = (int(delta["hlc"]) >> 16) - self.now_ms
            if ahead_ms > DRIFT_MS:
                raise Refusal(409, "CLOCK_DRIFT", index=index, retryAfterMs=ahead_ms - DRIFT_MS, serverTime=self.now_ms)
            if any(column["value"] == BAD for column in delta["columns"]):
                raise Refusal(422, "INVALID", index=index)
        results = []
        for delta in deltas:
            name = delta["deltaId"]
            is_known = name in self.known
            if not is_known:
                self.log.append(self._merge(delta))
                self.known[name] = len(self.log)
            results.append({"deltaId": name, "sequence": self.known[name], "duplicate": is_known})
        answer = {"epoch": self.epoch, "previousEpochs": self.previous_epochs, "results": results}
        return json_bytes({**answer, "serverTime": self.now_ms})

    def _merge(self, delta: Delta) -> Delta:
        """Store a new delta unless it is older than the horizon. Return the delta that readers receive."""
        name = (delta["table"], delta["rowId"])
        deltas = self.deltas.get(name) or ([] if self.horizon is None else [horizon_delete(self.horizon, name)])
        deletes = [one for one in deltas if one["op"] == "DELETE"]
        newest = max(deletes, key=stamp_of, default=None)
        if newest is not None and newest["clientId"] == HORIZON_CLIENT and stamp_of(delta) < stamp_of(newest):
            self.deltas[name] = deltas
            return newest
        self.deltas[name] = [*deltas, delta]
        return delta

    def pull(self, since: int, epoch: str, limit: int) -> bytes:
        self._check_history(since, epoch)
        if 0 < since < self.compacted and self.horizon is not None:
            raise Refusal(409, "HISTORY_CHANGED", epoch=self.epoch, newest=len(self.log), snapshot=True)
        if since < self.compacted:
            return json_bytes({"deltas": [], "snapshot": True, "cursor": since, "hasMore": True, "epoch": self.epoch})
        page = [{**one, "sequence": since + 1 + place} for place, one in enumerate(self.log[since : since + limit])]
        cursor = since + len(page)
        return json_bytes({"deltas": page, "cursor": cursor, "hasMore": cursor < len(self.log), "epoch": self.epoch})

    def live(self, since: int, epoch: str, limit: int) -> bytes:
        """Return the next message of a live connection."""
        try:
            page = json.loads(self.pull(since, epoch, limit))
        except Refusal as refusal:
            return json_bytes({"type": "error", **json.loads(refusal.body)})
        if page.get("snapshot"):
            return json_bytes({"type": "snapshot"})
        return json_bytes({"type": "deltas", "deltas": page["deltas"], "cursor": page["cursor"]})

    def snapshot(self, page: str, limit: int) -> bytes:
        cursor, horizon, after = (len(self.log), self.horizon, ["", ""]) if not page else json.loads(page)
        if cursor > len(self.log):
            raise Refusal(400, "BAD_REQUEST")  # page token of a different history
        if horizon != self.horizon:
            raise Refusal(409, "HISTORY_CHANGED", epoch=self.epoch, snapshot=True)
        rows = sorted(self._merged_rows().items())
        chosen = [(list(name), row) for name, row in rows if list(name) > after][:limit]
        is_last = not chosen or chosen[-1][0] == list(rows[-1][0])
        following = "" if is_last else json.dumps([cursor, horizon, chosen[-1][0]])
        shown = [{"table": name[0], "rowId": name[1], **row} for name, row in chosen]
        answer = {"rows": shown, "cursor": cursor, "next": following, "epoch": self.epoch}
        return json_bytes(answer if horizon is None else {**answer, "horizon": str(horizon)})

    def _check_history(self, since: int, epoch: str) -> None:
        if epoch not in ("", self.epoch) or since > len(self.log):
            raise Refusal(409, "HISTORY_CHANGED", epoch=self.epoch, newest=len(self.log))

    # --- operations

    def compact(self, keep: int) -> None:
        self.compacted = max(self.compacted, len(self.log) - keep)

    def drop_tombstones(self, is_chosen: Callable[[], bool]) -> None:
        """Drop some of the deleted rows whose DELETE has been compacted."""
        for name, row in self._merged_rows().items():
            deleted = row["deleted"]
            is_late = deleted is not None and deleted["clientId"] == HORIZON_CLIENT
            sequence = self.compacted if is_late else self.known.get((deleted or {}).get("deltaId", ""), 0)
            if exists(row) or sequence > self.compacted or not is_chosen():
                continue
            del self.deltas[name]
            self.horizon = max(self.horizon or 0, int(deleted["hlc"]) + (not is_late))

    def back_up(self) -> None:
        self._backup = deepcopy((self.log, self.known, self.deltas, self.horizon))

    def restore(self) -> None:
        before = self.known.keys()
        self.log, self.known, self.deltas, self.horizon = deepcopy(self._backup)
        self.lost |= before - self.known.keys()
        self.compacted = min(self.compacted, len(self.log))
        self._epochs += 1
        self.previous_epochs = [*self.previous_epochs, self.epoch]
        self.epoch = f"epoch {self._epochs}"

    # --- rows

    def _merged_rows(self) -> dict[Name, Row]:
        return {name: self._replay(deltas) for name, deltas in self.deltas.items()}

    def _replay(self, deltas: list[Delta]) -> Row:
        columns: dict[str, Any] = {}
        written = deleted = None
        for delta in sorted(deltas, key=stamp_of):
            stamp = {name: delta[name] for name in ("hlc", "clientId", "deltaId")}
            if delta["op"] == "DELETE":
                columns, deleted = {}, stamp
            else:
                written = stamp
                columns |= {one["column"]: {**one, **stamp} for one in delta["columns"]}
        return {"columns": list(columns.values()), "written": written, "deleted": deleted}

    def rows(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Return the rows that are not deleted."""
        shown = {}
        for name, row in self._merged_rows().items():
            if exists(row):
                shown[name] = {one["column"]: one["value"] for one in row["columns"]}
        return shown
