"""Has the kernel drop what other hosts than the job's send to a listening socket: a classic BPF program on it (Linux)."""

from __future__ import annotations

import ctypes
import ipaddress
import socket
import struct
import sys
from collections.abc import Sequence

_SO_ATTACH_FILTER = 26
# Offsets from the network header (SKF_NET_OFF), whatever the socket has stripped off.
_NET = 0xFFF00000
_SOURCE, _DESTINATION = {4: 12, 6: 8}, {4: 16, 6: 24}
_LOAD_WORD, _LOAD_BYTE, _RSHIFT, _JUMP, _JUMP_EQUAL, _RETURN = 0x20, 0x30, 0x74, 0x05, 0x15, 0x06
_ACCEPT, _DROP = 0xFFFFFFFF, 0
_MAX_INSTRUCTIONS = 4096

Instruction = tuple[int, int, int, int]


def program(sources: Sequence[str], destinations: Sequence[str] | None = None) -> list[Instruction]:
    """Returns the program that accepts packets between some addresses: (code, jump if true, jump if false, constant) each.

    Args:
        sources: IPv4 and IPv6 addresses that may send.
        destinations: those of this host that they may send to; None: all.

    Raises:
        ValueError: for what is no address.
    """
    fours, sixes = (
        [
            *([] if destinations is None else _any_of(destinations, version, _DESTINATION[version])),
            *_any_of(sources, version, _SOURCE[version]),
            (_RETURN, 0, 0, _ACCEPT),
        ]
        for version in (4, 6)
    )
    head = [(_LOAD_BYTE, 0, 0, _NET), (_RSHIFT, 0, 0, 4), (_JUMP_EQUAL, 1, 0, 4), (_JUMP, 0, 0, len(fours))]
    return [*head, *fours, *sixes]


def _any_of(addresses: Sequence[str], version: int, offset: int) -> list[Instruction]:
    """Goes on behind itself if one of the addresses of this version stands at the offset, else drops the packet."""
    parsed = [ipaddress.ip_address(address.partition("%")[0]) for address in dict.fromkeys(addresses)]
    blocks: list[list[Instruction]] = []
    for address in (item for item in parsed if item.version == version):
        words = struct.unpack(f">{len(address.packed) // 4}I", address.packed)
        block: list[Instruction] = []
        for index, word in enumerate(words):
            # A conditional jump reaches 255 instructions only: past this block.
            behind = 2 * (len(words) - 1 - index) + 1
            block += [(_LOAD_WORD, 0, 0, _NET + offset + 4 * index), (_JUMP_EQUAL, 0, behind, word)]
        blocks.append(block)
    length = sum(len(block) + 1 for block in blocks) + 1
    result: list[Instruction] = []
    for block in blocks:
        result += block
        result.append((_JUMP, 0, 0, length - len(result) - 1))
    return [*result, (_RETURN, 0, 0, _DROP)]


def admit_only(listener: socket.socket, sources: Sequence[str], destinations: Sequence[str] | None = None) -> str | None:
    """Attaches the program to a listening TCP socket, in place of an earlier one; connections that it accepts inherit it.

    Args:
        listener: the socket.
        sources: addresses of all hosts of the job, loopback included if it is to be accepted.
        destinations: see :func:`program`.

    Returns:
        Why it was not attached, None if it was.
    """
    if sys.platform != "linux":
        return f"only Linux can do that, this is {sys.platform}"
    instructions = program(sources, destinations)
    if len(instructions) > _MAX_INSTRUCTIONS:
        return f"{len(sources)} addresses are too many for a filter"
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in instructions)
    buffer = ctypes.create_string_buffer(code)
    try:
        listener.setsockopt(
            socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", len(instructions), ctypes.addressof(buffer))
        )
    except OSError as error:
        return str(error)
    return None
