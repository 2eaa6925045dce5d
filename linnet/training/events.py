"""TensorBoard event files with scalars, written without TensorBoard.

A file is a sequence of records: length, checksum of the length, data, checksum of the data. The
data is an ``Event`` message in the wire form of protocol buffers.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from pathlib import Path

_DOUBLE, _VARINT, _BYTES, _FLOAT = 1, 0, 2, 5


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _crc_table()


def checksum(data: bytes) -> int:
    """CRC-32C, rotated and shifted as the format of the records asks for."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _varint(number: int) -> bytes:
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*data, number])


def _field(number: int, kind: int, data: bytes) -> bytes:
    size = _varint(len(data)) if kind == _BYTES else b""
    return _varint(number << 3 | kind) + size + data


class EventFile:
    """One event file in a folder.

    Args:
      folder: the folder that TensorBoard is pointed at.
    """

    def __init__(self, folder: Path):
        now = time.time()
        name = f"events.out.tfevents.{int(now)}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("ab")
        self._write(
            _field(1, _DOUBLE, struct.pack("<d", now)) + _field(3, _BYTES, b"brain.Event:2")
        )

    def add(self, step: int, when: float, metrics: dict[str, float]) -> None:
        """Writes scalars of one step."""
        values = b"".join(
            _field(
                1,
                _BYTES,
                _field(1, _BYTES, name.encode()) + _field(2, _FLOAT, struct.pack("<f", value)),
            )
            for name, value in metrics.items()
        )
        head = _field(1, _DOUBLE, struct.pack("<d", when)) + _field(2, _VARINT, _varint(step))
        self._write(head + _field(5, _BYTES, values))

    def _write(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        self._file.write(length + struct.pack("<I", checksum(length)))
        self._file.write(event + struct.pack("<I", checksum(event)))

    def flush(self) -> None:
        """Hands what was written to the system."""
        self._file.flush()

    def close(self) -> None:
        """Ends the file."""
        self._file.close()
