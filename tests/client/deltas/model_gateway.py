"""Small model of a gateway, as specified in docs/deltas.md, for clients without a network.

It keeps every delta that was pushed, and computes rows in the simplest way: it sorts the deltas of a row by stamp
and replays them in order. It does not use `oncelog.core`.
"""

import hashlib
import json
from collections import defaultdict
from typing import Any

DRIFT_MS = 5000
BAD = "bad"
"""Value that the schema of the gateway refuses."""

Delta = dict[str, Any]
Row = dict[str, Any]


def json_bytes(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def id_of(delta: Delta) -> str:
    """Return the id of a delta whose values are canonical as `json` writes them."""
    fields = {name: delta[name] for name in ("clientId", "hlc", "table", "rowId", "columns")}
    return hashlib.sha256(json_bytes(fields)).hexdigest()


def stamp_of(delta: Delta) -> tuple[int, bytes, str]:
    return int(delta["hlc"]), delta["clientId"].encode("utf-16-be"), delta["deltaId"]


class Refusal(Exception):  # noqa: N818 - an error answer
    def __init__(self, status: int, code: str, **members: Any) -> None:
        super().__init__(code)
        self.status = status
        self.body = json_bytes({"error": f"refused by the model: {code}", "code": code, **members})


class ModelGateway:
    def __init__(self) -> None:
        self.log: list[Delta] = []
        self.known: dict[str, int] = {}
        self.compacted = 0
        self.epoch = "epoch 1"
        self.now_ms = 1_700_000_000_000
        self.busy = False
        self.lost: set[str] = set()
        """Ids of deltas that were lost by restoring a backup."""
        self._backup: list[Delta] = []
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
                self.log.append(delta)
                self.known[name] = len(self.log)
            results.append({"deltaId": name, "sequence": self.known[name], "duplicate": is_known})
        return json_bytes({"epoch": self.epoch, "results": results, "serverTime": self.now_ms})

    def pull(self, since: int, epoch: str, limit: int) -> bytes:
        self._demand_history(since, epoch)
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
        cursor, after = (len(self.log), ["", ""]) if not page else json.loads(page)
        if cursor > len(self.log):
            raise Refusal(400, "BAD_REQUEST")  # page token of another history
        rows = sorted(self._played().items())
        chosen = [(list(name), row) for name, row in rows if list(name) > after][:limit]
        is_last = not chosen or chosen[-1][0] == list(rows[-1][0])
        following = "" if is_last else json.dumps([cursor, chosen[-1][0]])
        shown = [{"table": name[0], "rowId": name[1], **row} for name, row in chosen]
        return json_bytes({"rows": shown, "cursor": cursor, "next": following, "epoch": self.epoch})

    def _demand_history(self, since: int, epoch: str) -> None:
        if epoch not in ("", self.epoch) or since > len(self.log):
            raise Refusal(409, "HISTORY_CHANGED", epoch=self.epoch, newest=len(self.log))

    # --- operations

    def compact(self, keep: int) -> None:
        self.compacted = max(self.compacted, len(self.log) - keep)

    def back_up(self) -> None:
        self._backup = list(self.log)

    def restore(self) -> None:
        self.lost |= {one["deltaId"] for one in self.log[len(self._backup) :]}
        self.log = list(self._backup)
        self.known = {one["deltaId"]: place + 1 for place, one in enumerate(self.log)}
        self.compacted = min(self.compacted, len(self.log))
        self._epochs += 1
        self.epoch = f"epoch {self._epochs}"

    # --- rows

    def _played(self) -> dict[tuple[str, str], Row]:
        of_rows: dict[tuple[str, str], list[Delta]] = defaultdict(list)
        for delta in self.log:
            of_rows[delta["table"], delta["rowId"]].append(delta)
        return {name: self._play(deltas) for name, deltas in of_rows.items()}

    def _play(self, deltas: list[Delta]) -> Row:
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
        for name, row in self._played().items():
            is_newer = row["deleted"] is None or (
                row["written"] is not None and stamp_of(row["written"]) > stamp_of(row["deleted"])
            )
            if row["written"] is not None and is_newer:
                shown[name] = {one["column"]: one["value"] for one in row["columns"]}
        return shown
