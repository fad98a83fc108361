"""Script: write three events to a log in a file.

write_log.py FILE
"""

import sys
from uuid import UUID

import oncelog
from oncelog import event

if __name__ == "__main__":
    with oncelog.open_blocking(sys.argv[1]) as log:
        for number in range(3):
            log.submit(event(UUID(int=number), {"type": "tick"}, ["p"]))
