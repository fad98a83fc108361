"""Keep a client's store open until end of input: python store_holder_worker.py FILE"""

import sys

from oncelog.client.events.store import ClientStore

store = ClientStore(sys.argv[1])
store.open(None, ["a"], None)
sys.stdout.write("open\n")
sys.stdout.flush()
sys.stdin.read()
