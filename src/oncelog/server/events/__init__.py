"""The Events API: one global order of events in partitions (EV-1 to EV-16), over WebSocket, HTTP and SSE."""
