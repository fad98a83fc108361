"""The Events API: partitioned events in one global order (EV-1 to EV-16), over WebSocket, HTTP and SSE."""
