"""A gRPC client that discovers the service through server reflection and imports nothing from oncelog."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import grpc
from google.protobuf import json_format, text_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from deadlines import WAIT_S

SERVICE: Final = "oncelog.ledger.v1.Ledger"
_VOLATILE_METADATA: Final = ("date", "user-agent")


class LedgerStub:
    """Calls gRPC methods by name, with messages in JSON form."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        database = ProtoReflectionDescriptorDatabase(channel)
        self._pool = DescriptorPool(database)
        self._service = self._pool.FindServiceByName(SERVICE)
        self.services: list[str] = sorted(database.get_services())

    def describe(self) -> str:
        """Return the service names and the server's description of the ledger messages and methods."""
        found = self._service.file
        proto = _new_file_proto()
        found.CopyToProto(proto)
        return "".join(f"# service {name}\n" for name in self.services) + text_format.MessageToString(proto)

    def call(self, name: str, message: Any, metadata: Sequence[tuple[str, str]], count: int) -> tuple[str, list[str]]:
        """Call a method; return the request as text, and lines with answers, status and trailing metadata.

        A stream of requests has one message. The messages that answer it are shown as one, because how the server
        divides the answers depends on the machine.
        """
        method = self._service.methods_by_name[name]
        request = json_format.ParseDict(message, GetMessageClass(method.input_type)())
        answer_type = GetMessageClass(method.output_type)
        path = f"/{SERVICE}/{name}"
        kinds = (_serialize, answer_type.FromString)
        lines = []
        if method.client_streaming:
            stream = self._channel.stream_stream(path, *kinds)(iter([request]), metadata=metadata, timeout=WAIT_S)
            answers = answer_type()
            try:
                for answer in stream:
                    answers.MergeFrom(answer)
                return _format_line(request), [*_format_lines(answers), *_format_status(stream)]
            except grpc.RpcError as error:
                lines = _format_lines(answers) if answers.ByteSize() else []
                return _format_line(request), [*lines, *_format_status(error)]
        if method.server_streaming:
            call = self._channel.unary_stream(path, *kinds)(request, metadata=metadata, timeout=WAIT_S)
            try:
                for _ in range(count):
                    lines += _format_lines(next(call))
                call.cancel()
                return _format_line(request), [*lines, "(the client cancels the call)"]
            except grpc.RpcError as error:
                return _format_line(request), [*lines, *_format_status(error)]
        try:
            answer, call = self._channel.unary_unary(path, *kinds).with_call(request, metadata=metadata, timeout=WAIT_S)
            return _format_line(request), [*_format_lines(answer), *_format_status(call)]
        except grpc.RpcError as error:
            return _format_line(request), _format_status(error)


def _new_file_proto() -> Any:
    from google.protobuf import descriptor_pb2  # noqa: PLC0415 - its types are generated

    return descriptor_pb2.FileDescriptorProto()


def _serialize(message: Any) -> bytes:
    return bytes(message.SerializeToString())


def _format_line(message: Any) -> str:
    return text_format.MessageToString(message, as_utf8=True, as_one_line=True)


def _format_lines(message: Any) -> list[str]:
    return text_format.MessageToString(message, as_utf8=True).splitlines() or ["(empty message)"]


def _format_status(call: Any) -> list[str]:
    trailing = [
        f"{name}: {value!r}" for name, value in call.trailing_metadata() or () if name not in _VOLATILE_METADATA
    ]
    return [f"status {call.code().name} {call.details() or ''!r}", *trailing]


@contextmanager
def ledger_stub(address: str) -> Iterator[LedgerStub]:
    """Connect to the server at `address`."""
    with grpc.insecure_channel(address) as channel:
        yield LedgerStub(channel)
