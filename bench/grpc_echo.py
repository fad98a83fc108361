"""A gRPC server that answers every write with the same bytes, and does nothing else: `python -m bench.grpc_echo`."""

import asyncio
import signal
from typing import Any

import grpc
import grpc.aio
import uvloop

from oncelog.ledger.v1 import ledger_pb2 as pb

SERVICE = "oncelog.ledger.v1.Ledger"


def answer() -> bytes:
    """Return an answer that is as long as the answer of a ledger with a few hundred records per block."""
    success = pb.WriteSuccess(
        committed_tx_id="0001000000000001",
        block_height=1000,
        block_header=pb.BlockHeader(
            lane=1,
            height=1000,
            first_position=100_000,
            count=200,
            timestamp_ms=1_790_000_000_000,
            previous_hash=bytes(32),
            merkle_root=bytes(32),
            hash=bytes(32),
        ),
        transaction_proof=pb.TransactionProof(index=1, count=200, path=[bytes(32)] * 8, salt=bytes(16)),
        assigned_sequence=1000,
        version=100_000,
        timestamp_ms=1_790_000_000_000,
        actor="user:developer",
    )
    return pb.WriteResponse(success=success).SerializeToString()


async def main() -> None:
    said = answer()

    async def write(_data: bytes, _context: object) -> bytes:
        return said

    handler: Any = grpc.unary_unary_rpc_method_handler(write)
    server = grpc.aio.server(handlers=[grpc.method_handlers_generic_handler(SERVICE, {"Write": handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"listening grpc=127.0.0.1:{port}", flush=True)
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    await stopped.wait()
    await server.stop(0)


if __name__ == "__main__":
    uvloop.run(main())
