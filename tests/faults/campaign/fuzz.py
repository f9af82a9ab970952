"""Hostile bytes into all that decodes: only RecordError comes out, and little memory is taken.

Inputs are random bytes, valid ones that were mutated, and structures made to claim more than they
hold. Memory is measured by tracemalloc, which sees all that Python and msgpack allocate. What is
read from a store may take its own size and 1 MiB; a message between the server and its own worker
may take what its packet's values take.
"""

import random
import tracemalloc

import msgpack

from tiered_mmcache.disk import layout, protocol
from tiered_mmcache.entries.extras import MAX_EXTRAS_BYTES, decode_extras, encode_extras
from tiered_mmcache.entries.record import (
    MAX_RECORD_BYTES,
    EntryHeader,
    Record,
    decode_record,
    digest,
    encode_record,
)
from tiered_mmcache.errors import RecordError

from .children import Child, ChildFailedError
from .outcome import Outcome
from .subject import MIB

_BATCH = 1000
# Pieces that a mutation puts in: headers that claim much, extensions, timestamps, floats.
_CLAIMS = [
    b"\xdd\xff\xff\xff\xff",
    b"\xdd\x00\xff\xff\xff",
    b"\xdc\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xde\xff\xff",
    b"\xc6\x7f\xff\xff\xff",
    b"\xdb\x7f\xff\xff\xff",
    b"\xc9\x7f\xff\xff\xff\x01",
    b"\xd7\xff" + bytes(8),
    b"\xc7\x05\x01\xdd\xff\xff\xff\xff",
    b"\xcb\x7f\xf8" + bytes(6),
    b"\xcf" + b"\xff" * 8,
    b"\xc1",
    b"\x90",
    b"\x80",
    b"\xc0",
]


def _signed(body):
    return digest(body) + body


def _header(extras=b""):
    return EntryHeader(
        class_tag="EmbeddingResult",
        dtype="bfloat16",
        item_bytes=2,
        shape=(300, 3584),
        extras=extras,
        device_type="cuda",
        cost_s=0.5,
    )


def _record_bodies():
    header = _header(encode_extras({"num_tokens_per_frame": [1, 2, 3], "big": 2**70}))
    record = Record(
        header=header,
        full_key=b"\x92\xa1i\xa15",
        namespace="fuzz",
        generation=bytes(16),
        digests=bytes(8 * 9),
        created_s=1.0,
    )
    return [encode_record(record)[8:]]


def _messages():
    extents = [(0, 4096), (8192, 4096)]
    names = {"request": 7, "store_key": bytes(16), "full_key": b"abc"}
    totals = protocol.StoreTotals(entries=1, used_bytes=2, payload_bytes=3)
    opening = protocol.Open(
        path="store",
        budget_bytes=1,
        largest_entry_bytes=1,
        synchronous=True,
        namespace="fuzz",
        allow_network=False,
        keep_quarantined=2,
        generation=bytes(16),
        killed_worker=False,
    )
    held = {"header": _header(), "extents": extents}
    return [
        opening,
        protocol.Put(**names, generation=bytes(16), **held),
        protocol.LookUp(**names),
        protocol.Fill(**names, **held),
        protocol.Delete(request=1, store_key=bytes(16)),
        protocol.Clear(request=1, generation=bytes(16)),
        protocol.Flush(request=1),
        protocol.Touch(store_key=bytes(16)),
        protocol.Close(),
        protocol.Ready(generation=bytes(16), totals=totals),
        protocol.Unavailable(cause="a", problem="b"),
        protocol.Done(request=1, totals=totals),
        protocol.Progress(request=1, filled_bytes=5),
        protocol.Found(request=1, header=_header()),
        protocol.Absent(request=1),
        protocol.Failed(request=1, cause="a", problem="b"),
    ]


def _bucket(data):
    return layout.Bucket.from_row(layout.bucket_row(1), data)


def _extras_examples():
    return [
        encode_extras({"num_tokens_per_frame": [4, 5, 6], "name": "x" * 40}),
        encode_extras({"t": (1, (2, {"k": [None, True, 1.5, b"y"]})), "big": -(2**80)}),
    ]


class Decoder:
    """One decoder, valid inputs, and how long an input may be."""

    def __init__(self, name, decode, valid, most_bytes, dress=bytes):
        self.name = name
        self.decode = decode
        self.valid = valid
        self.most_bytes = most_bytes
        self.dress = dress  # what is put around a mutated body, such as its digest


def decoders():
    bookkeeping = layout.Bookkeeping(entries=3, used_bytes=4096)
    bucket = layout.Bucket(number=1, namespace="n", generation=bytes(16), stale=False)
    packets = [protocol.encode_message(message) for message in _messages()]
    row_bytes = 64 * 1024
    return [
        Decoder("record", decode_record, _record_bodies(), MAX_RECORD_BYTES - 8, _signed),
        Decoder("extras", decode_extras, _extras_examples(), MAX_EXTRAS_BYTES),
        Decoder("protocol", protocol.decode_message, packets, protocol.MAX_PACKET_BYTES),
        Decoder("totals", layout.Bookkeeping.from_bytes, [bookkeeping.to_bytes()], row_bytes),
        Decoder("bucket", _bucket, [bucket.to_bytes()], row_bytes),
        Decoder("format", layout.format_version, [layout.format_value()], row_bytes),
        Decoder("place", layout.Place.from_bytes, [layout.Place(1, 2).to_bytes()], row_bytes),
    ]


# Inputs


def _mutated(generator, valid):
    data = bytearray(generator.choice(valid))
    for _ in range(generator.choice([1, 1, 2, 4])):
        at = generator.randrange(len(data) + 1)
        way = generator.randrange(6)
        if way == 0 and at < len(data):
            data[at] ^= 1 << generator.randrange(8)
        elif way == 1:
            data[at : at + generator.randrange(9)] = generator.choice(_CLAIMS)
        elif way == 2:
            data[at:at] = generator.choice(_CLAIMS)
        elif way == 3:
            del data[at : at + generator.randrange(1, 9)]
        elif way == 4:
            other = generator.choice(valid)
            start = generator.randrange(len(other))
            data[at:at] = other[start : start + generator.randrange(33)]
        else:
            data[at:at] = generator.randbytes(generator.randrange(1, 9))
    return bytes(data)


def _input(generator, decoder):
    if generator.random() < 0.2:
        return generator.randbytes(generator.randrange(200))
    return _mutated(generator, decoder.valid)


def _greedy(size):
    """Bodies of some size that are made to take much memory."""
    nested = b"\xdd" + max(1, size - 5).to_bytes(4, "big")
    whole = b"\xdd" + (size - 5).to_bytes(4, "big")
    leaf = msgpack.packb([None] * 15)
    return {
        "nested claims": (nested * 1000)[:size].ljust(size, b"\xc0"),
        "nested claims of 64": (b"\xdc\x00\x40" * 1000)[:size].ljust(size, b"\xc0"),
        "nils": whole + b"\xc0" * (size - 5),
        "empty lists": whole + b"\x90" * (size - 5),
        "empty maps": whole + b"\x80" * (size - 5),
        "small tree": b"\xdd" + (size // 16).to_bytes(4, "big") + leaf * (size // 16),
        "map of integers": _map_of_integers(size),
        "nested map of it": b"\x81\xa1x" + _map_of_integers(size - 3),
        "wide text": b"\xdb" + (size - 5).to_bytes(4, "big") + _wide_text(size - 5),
        "named empty lists": _named(b"\xdd", size - 8, b"\x90" * (size - 8)),
        "tuples": _nested_tuples(size),
        "one binary": b"\x97\x01\xc6" + (size - 7).to_bytes(4, "big") + bytes(size - 7),
        "many extensions": whole + b"\xd4\x05\x00" * ((size - 5) // 3),
        "digits": _named(b"\xc9", size - 9, b"\x02" + b"9" * (size - 9)),
    }


def _map_of_integers(size):
    pairs = max(1, (size - 5) // 4)
    body = b"".join(b"\xcd" + (n % 65536).to_bytes(2, "big") + b"\xc0" for n in range(pairs))
    return b"\xdf" + pairs.to_bytes(4, "big") + body


def _wide_text(size):
    return b"a" * (size - 4) + "\N{GRINNING FACE}".encode()


def _nested_tuples(size):
    items = b"\xdd" + max(1, size - 30).to_bytes(4, "big") + b"\xc0" * max(1, size - 30)
    return _named(b"\xc9", len(items), b"\x01" + items)


def _named(first, count, body):
    """A map that holds one thing, under a name."""
    return b"\x81\xa1x" + first + count.to_bytes(4, "big") + body


# In the server


def _serve(connection):
    by_name = {decoder.name: decoder for decoder in decoders()}
    for name, kind, number in connection:
        decoder = by_name[name]
        if kind == "memory":
            connection.send(_memory(decoder, number))
        else:
            connection.send(_batch(decoder, number))


def _batch(decoder, number):
    generator = random.Random(f"{decoder.name} {number}")
    accepted, escaped = 0, []
    for _ in range(_BATCH):
        data = decoder.dress(_input(generator, decoder))
        try:
            decoder.decode(data)
            accepted += 1
        except RecordError:
            continue
        except Exception as error:  # noqa: BLE001 - this is what is looked for
            escaped.append(f"{decoder.name}: {error!r} of {data[:200].hex()}")
    return accepted, escaped


def _memory(decoder, size):
    """The most bytes above its own that each hungry input of about that size takes."""
    taken = {}
    for name, body in _greedy(min(size, decoder.most_bytes)).items():
        data = decoder.dress(body[: decoder.most_bytes])
        tracemalloc.start()
        try:
            decoder.decode(data)
        except RecordError:
            pass
        except Exception as error:  # noqa: BLE001 - this is what is looked for
            taken[f"{name} ({error!r})"] = 2**62
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        taken[name] = peak_bytes - len(data)
    return taken


def run(folder, *, full):
    outcome = Outcome(campaign="fuzz")
    all_decoders = decoders()
    batches = (200_000 if full else 14_000) // (_BATCH * len(all_decoders)) + 1
    sizes = [1000, 60_000, 190_000, 2_000_000, 16_000_000] if full else [1000, 60_000, 400_000]
    server = Child(_serve, stderr=folder / "stderr.log")
    accepted = 0
    worst_bytes, worst_message_bytes, worst = 0, 0, "nothing"
    try:
        for decoder in all_decoders:
            for number in range(batches):
                valid, escaped = server.ask((decoder.name, "batch", number))
                accepted += valid
                outcome.cases += _BATCH
                outcome.deaths += len(escaped)
                outcome.missed += escaped[:2]
            for size in sizes:
                if size > decoder.most_bytes and size != sizes[0]:
                    continue
                for name, taken_bytes in server.ask((decoder.name, "memory", size)).items():
                    outcome.cases += 1
                    if decoder.name == "protocol":
                        worst_message_bytes = max(worst_message_bytes, taken_bytes)
                    elif taken_bytes > worst_bytes:
                        worst_bytes, worst = taken_bytes, f"{decoder.name}, {name} of {size} bytes"
    except ChildFailedError as error:
        outcome.deaths += 1
        outcome.missed.append(str(error))
    server.end()
    outcome.figures.append(f"{accepted:,} inputs were valid after all")
    outcome.bound("MiB taken beyond the input's own size:", worst_bytes / MIB, "<= 1")
    outcome.figures.append(f"most by {worst}")
    outcome.bound("MiB by a message, of 192 KiB at most:", worst_message_bytes / MIB, "<= 16")
    return outcome
