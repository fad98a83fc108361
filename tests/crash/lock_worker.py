"""Opens a log, commits one event and closes the log: python lock_worker.py FILE"""

import sys

import oncelog

with oncelog.open_blocking(sys.argv[1]) as log:
    log.submit(oncelog.event("00000000-0000-4000-8000-000000000001", {"type": "other"}, ["p"]))
