"""Bytes made wrong at random, the same way for the same seed."""

import re

_NUMBER = re.compile(rb"-?\d+")
_WORDS = [
    b'"', b"{", b"}", b"[", b"]", b":", b",", b"\\", b"null", b"true", b"NaN", b"1e400", b"0.5",
    b'"dtype"', b'"shape"', b'"data_offsets"', b'"__metadata__"', b'"F32"', b'"BOOL"', b'"F64"',
    b"\\ud800", b"\xff", b"\x00", b"[[[[", b"{{{{", b'"..":', b"[]",
]  # fmt: skip
_NUMBERS = [
    b"-1", b"0", b"1", b"2", b"3", b"8", b"255", b"65536", b"2147483648", b"4294967295",
    b"9223372036854775807", b"9223372036854775808", b"18446744073709551616", b"1.5", b"-0", b"1e3",
    b"00", b"9" * 30,
]  # fmt: skip
# Heads of msgpack: lists, maps, text, bytes and extensions of great length, and nonsense.
_HEADS = [
    b"\xdc\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xde\xff\xff", b"\xdf\xff\xff\xff\xff",
    b"\xd9\xff", b"\xdb\xff\xff\xff\xff", b"\xc4\xff", b"\xc6\xff\xff\xff\xff", b"\xc7\x04\x01",
    b"\xc9\xff\xff\xff\xff\x01", b"\xd4\x01", b"\xd8\x01", b"\xc1", b"\x91", b"\x81", b"\xc0",
    b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff", b"\xd3\x80\x00\x00\x00\x00\x00\x00\x00", b"\xcb",
]  # fmt: skip


def mutated(rng, seeds, words=()):
    """One of some inputs, with one to four changes.

    Args:
      rng: a ``random.Random``.
      seeds: inputs that are right.
      words: pieces to put in.
    """
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.choice((1, 1, 2, 4))):
        change = rng.choice(_CHANGES)
        change(rng, data, seeds, words)
    return bytes(data)


def _span(rng, data, most=16):
    start = rng.randrange(len(data) + 1)
    return start, min(len(data), start + rng.randrange(1, most))


def _flip(rng, data, seeds, words):
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _overwrite(rng, data, seeds, words):
    if data:
        data[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def _remove(rng, data, seeds, words):
    start, end = _span(rng, data)
    del data[start:end]


def _repeat(rng, data, seeds, words):
    start, end = _span(rng, data, 64)
    data[start:start] = data[start:end] * rng.choice((1, 2, 50))


def _cut(rng, data, seeds, words):
    del data[rng.randrange(len(data) + 1) :]


def _extend(rng, data, seeds, words):
    data += rng.randbytes(rng.randrange(1, 40))


def _splice(rng, data, seeds, words):
    other = rng.choice(seeds)
    start, end = _span(rng, data, 64)
    first = rng.randrange(len(other) + 1)
    data[start:end] = other[first : first + rng.randrange(1, 64)]


def _insert_word(rng, data, seeds, words):
    start = rng.randrange(len(data) + 1)
    end = start + rng.choice((0, 0, 1, 4))
    data[start:end] = rng.choice(words or [b"\x00"]) * rng.choice((1, 1, 1, 200))


def _change_number(rng, data, seeds, words):
    found = list(_NUMBER.finditer(data))
    if found:
        place = rng.choice(found)
        data[place.start() : place.end()] = rng.choice(_NUMBERS)


_CHANGES = [
    _flip, _overwrite, _remove, _repeat, _cut, _extend, _splice, _insert_word, _insert_word,
    _change_number, _change_number,
]  # fmt: skip


def mutated_safetensors(rng, seeds):
    """A safetensors file made wrong; mostly in the header, whose length is then right again."""
    if rng.random() < 0.2:
        return mutated(rng, seeds, _WORDS)
    data = rng.choice(seeds)
    size = 8 + int.from_bytes(data[:8], "little")
    headers = [seed[8 : 8 + int.from_bytes(seed[:8], "little")] for seed in seeds]
    header = mutated(rng, [data[8:size], rng.choice(headers)], _WORDS)
    return len(header).to_bytes(8, "little") + header + data[size:]


def mutated_msgpack(rng, seeds):
    """Msgpack bytes made wrong."""
    return mutated(rng, seeds, _HEADS)


def mutated_json(rng, seeds):
    """JSON text made wrong."""
    return mutated(rng, seeds, _WORDS)
