"""Keep a chat client's store open until end of input: python chat_store_holder_worker.py FILE"""

import sys

from oncelog.client.chat.store import ChatStore

store = ChatStore(sys.argv[1])
store.open("phone")
sys.stdout.write("open\n")
sys.stdout.flush()
sys.stdin.read()
