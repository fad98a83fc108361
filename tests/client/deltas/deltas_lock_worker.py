"""Keep a deltas client's store open until end of input: python deltas_lock_worker.py FILE"""

import sys

from oncelog.client.deltas.store import DeltasStore
from oncelog.client.deltas.values import DeltasLimits

store = DeltasStore(sys.argv[1], DeltasLimits())
store.open("ann", "shop")
sys.stdout.write("open\n")
sys.stdout.flush()
sys.stdin.read()
