"""Keep a ledger client's store open until end of input: python ledger_lock_worker.py FILE"""

import sys

from oncelog.client.ledger.store import LedgerStore

store = LedgerStore(sys.argv[1])
store.open("billing-1")
sys.stdout.write("open\n")
sys.stdout.flush()
sys.stdin.read()
