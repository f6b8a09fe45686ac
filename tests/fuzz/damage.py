"""Damaged model files: a good file is taken apart, changed in its meaning, and encoded again.

Most random changes of bytes fail at the first check. The changes here reach the checks after it: a
metadata value gets another type or size, a tensor another name, shape, type or offset, or a count
is wrong.
"""

import json
import struct
from copy import deepcopy
from dataclasses import dataclass

from gguf_craft import craft, tensor, text

from gguf_tools.file.layout import KINDS, VALUE_FORMAT, GGMLType, ValueType
from gguf_tools.file.reader import GGUFFile

# Numbers at overflows and at our limits.
NUMBERS = (
    *(0, 1, 2, 3, 4, 5, 31, 32, 33, 127, 128, 255, 256, 4095, 4096, 4097, 65535, 65536),
    *((1 << 24) - 1, 1 << 24, (1 << 24) + 1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32),
    *((1 << 40) + 1, (1 << 62) - 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1),
)
TEXTS = (
    *(b"", b"\0", b" ", b"\xff\xfe", b"\xed\xa0\x80", "Ä\u202e\n\x1b[2J".encode(), b"a" * 300),
    *(b"q4_0", b"q8_0", b"Q8_0", b"q2_k", b"skip", b"llama", b"qwen3moe", b"none", b"..", b"%s{0}"),
)
KEYS = (
    *("general.architecture", "general.alignment", "general.name", "general.file_type"),
    *("split.no", "split.count", "split.tensors.count", "tokenizer.ggml.tokens"),
    *("moe_edge.format_version", "moe_edge.tiers", "moe_edge.tier_bpw", "moe_edge.fallbacks"),
    *("moe_edge.quantization", "moe_edge.calibration", "moe_edge.", "moe_edge.loss"),
)
ARCH_KEYS = (
    *("block_count", "context_length", "embedding_length", "feed_forward_length"),
    *("expert_count", "expert_used_count", "expert_shared_count", "nextn_predict_layers"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length"),
    *("attention.value_length", "attention.key_length_mla", "leading_dense_block_count"),
)


@dataclass
class Model:
    """A GGUF in parts. values: (key, encoded value). tensors: (name, shape, type, offset)."""

    values: list[tuple[bytes, bytes]]
    tensors: list[tuple[bytes, list[int], int, int]]
    data: bytes
    alignment: int
    version: int = 3
    magic: bytes = b"GGUF"
    more_values: int = 0
    more_tensors: int = 0

    @classmethod
    def read(cls, path):
        with GGUFFile.open(path) as file:
            start = file.data_offset
            values = [(key.encode(), file.encoded_value(key)) for key in file.metadata]
            tensors = [
                (each.name.encode(), list(each.shape), int(each.type), each.offset - start)
                for each in file.tensors.values()
            ]
            data = file.bytes_at(start, file.size - start).tobytes()
            return cls(values, tensors, data, file.alignment)

    def encoded(self):
        return craft(
            [text(key) + value for key, value in self.values],
            [tensor(name, shape, kind, at & MOST) for name, shape, kind, at in self.tensors],
            self.data,
            n_kv=(len(self.values) + self.more_values) & MOST,
            n_tensors=(len(self.tensors) + self.more_tensors) & MOST,
            magic=self.magic,
            version=self.version,
            align=self.alignment,
        )


MOST = (1 << 64) - 1


def number(value):
    return struct.pack("<Q", value & MOST)


def any_number(random):
    value = random.choice(NUMBERS)
    return value if random.randrange(3) else random.getrandbits(random.choice((3, 8, 32, 64)))


def any_value(random, depth=0):
    """Return a metadata value of any type with its tag. Its length may be wrong."""
    kind = random.choice(list(ValueType)) if depth < 6 else ValueType.UINT8
    return struct.pack("<I", kind) + _body(random, kind, depth)


def _body(random, kind, depth):
    if kind is ValueType.STRING:
        return text(random.choice(TEXTS))
    if kind is ValueType.ARRAY:
        element = random.choice(list(ValueType))
        if depth > 5:
            element = ValueType.UINT8
        n = random.choice((0, 1, 2, 3, 5))
        said = n if random.randrange(8) else any_number(random)
        body = b"".join(_body(random, element, depth + 1) for _ in range(n))
        return struct.pack("<I", element) + number(said) + body
    if kind is ValueType.BOOL:
        return bytes([random.choice((0, 1, 1, 2, 255))])
    return number(any_number(random))[: struct.calcsize(VALUE_FORMAT[kind])]


def _tagged_number(random):
    kind = random.choice((ValueType.UINT32, ValueType.INT32, ValueType.UINT64, ValueType.UINT16))
    return struct.pack("<I", kind) + _body(random, kind, 0)


def _key(model, random):
    if model.values and random.randrange(3):
        return random.choice(model.values)[0]
    arch = next((key for key, _ in model.values if key.endswith(b".block_count")), b"llama.x")
    prefix = arch.rpartition(b".")[0].decode("utf-8", "replace")
    names = (*KEYS, *(f"{prefix}.{each}" for each in ARCH_KEYS))
    return random.choice(names).encode()


def _change_value(model, random):
    key = _key(model, random)
    value = _tagged_number(random) if random.randrange(2) else any_value(random)
    kept = [(name, value if name == key else old) for name, old in model.values]
    model.values = kept if key in dict(model.values) else [*kept, (key, value)]


def _change_names(model, random):
    """Set another list of tiers."""
    names = [text(random.choice(TEXTS)) for _ in range(random.randrange(6))]
    value = struct.pack("<IIQ", ValueType.ARRAY, ValueType.STRING, len(names)) + b"".join(names)
    model.values = [
        (name, value if name == b"moe_edge.tiers" else old) for name, old in model.values
    ]


def _drop(model, random):
    entries = random.choice((model.values, model.values, model.tensors))
    if entries:
        del entries[random.randrange(len(entries))]


def _repeat(model, random):
    """Repeat an entry at any place, and sometimes a tensor under another name."""
    entries = random.choice((model.values, model.tensors))
    if entries:
        entry = random.choice(entries)
        if entries is model.tensors and random.randrange(2):
            entry = (_tensor_name(random), *entry[1:])
        entries.insert(random.randrange(len(entries) + 1), entry)


def _move_tensor(model, random):
    if model.tensors:
        moved = model.tensors.pop(random.randrange(len(model.tensors)))
        model.tensors.insert(random.randrange(len(model.tensors) + 1), moved)


def _rename_value(model, random):
    if model.values:
        at = random.randrange(len(model.values))
        name = random.choice(TEXTS) if random.randrange(2) else _key(model, random)
        model.values[at] = (name, model.values[at][1])


def _change_tensor(model, random):
    if not model.tensors:
        return
    at = random.randrange(len(model.tensors))
    name, shape, kind, offset = model.tensors[at]
    what = random.randrange(5)
    if what == 0:
        name = _tensor_name(random)
    elif what == 1:
        dim = random.randrange(len(shape)) if shape else 0
        shape = [*shape[:dim], any_number(random), *shape[dim + 1 :]]
    elif what == 2:
        shape = [*shape, random.choice((1, 2, 32))] if random.randrange(2) else shape[:-1]
    elif what == 3:
        kind = random.choice((*map(int, GGMLType), 4, 5, 36, 99, 0xFFFFFFFF))
    else:
        offset = random.choice((0, offset + 32, offset + 4096, offset - 32, any_number(random)))
    model.tensors[at] = (name, shape, kind, offset)


def _tensor_name(random):
    il = random.choice(("0", "1", "2", "00", "4095", "4096", "999999999", "9999999999", "-1"))
    ending = random.choice(("", ".moe_edge.q4_0", ".moe_edge.q2_k", ".moe_edge.", ".moe_edge"))
    kind = random.choice((*KINDS, "gate_inp", "x"))
    name = f"blk.{il}.ffn_{kind}_exps.weight{ending}".encode()
    return name if random.randrange(3) else random.choice(TEXTS)


def _change_counts(model, random):
    more = random.choice((-1, 1, any_number(random)))
    setattr(model, random.choice(("more_values", "more_tensors")), more)


def _change_frame(model, random):
    what = random.choice(("version", "alignment", "magic", "data"))
    values = {
        "version": random.choice((0, 1, 2, 3, 4, 3 << 24, 0xFFFFFFFF)),
        "alignment": random.choice((1, 8, 32, 64, 4096)),
        "magic": random.choice((b"GGUF", b"GGML", b"\0\0\0\0", b"PK\3\4")),
        "data": model.data[: random.randrange(len(model.data) + 1)],
    }
    setattr(model, what, values[what])


CHANGES = (
    *(_change_value, _change_value, _change_value, _change_names, _change_tensor, _change_tensor),
    *(_change_value, _change_tensor, _drop, _drop, _drop, _move_tensor),
    *(_repeat, _rename_value, _repeat, _change_counts, _change_frame),
)


def damaged(good, random):
    """Return the file, changed in one to three ways, and sometimes in a few bytes as well.

    A random source that only returns zeros makes few further changes.
    """
    model = deepcopy(good)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        random.choice(CHANGES)(model, random)
    data = bytearray(model.encoded())
    if random.randrange(6) == 5:
        header = max(1, len(data) - len(model.data))
        for _ in range(random.randrange(1, 4)):
            data[random.randrange(min(header, len(data)))] = random.getrandbits(8)
    if random.randrange(12) == 11:
        del data[random.randrange(len(data) + 1) :]
    return bytes(data)


def damaged_json(good, random):
    """Return the JSON text of a value with one changed place, or with broken syntax."""
    odd = [
        *(None, True, -1, 0, 1.5, 1e308, float("nan"), float("inf"), 10**400, "", "x", [], {}),
        *([[]], {"a": 1}, [1, "a"], "\ud800"),
    ]
    value = json.loads(json.dumps(good))
    place, parent = value, None
    while isinstance(place, (dict, list)) and place and random.randrange(4):
        key = random.choice(list(place) if isinstance(place, dict) else range(len(place)))
        parent, place = (place, key), place[key]
    if parent is None:
        value = random.choice(odd)
    elif random.randrange(3):
        parent[0][parent[1]] = random.choice(odd)
    else:
        del parent[0][parent[1]]
    result = json.dumps(value)
    what = random.randrange(10)
    if what == 9:
        return result[: random.randrange(len(result) + 1)]
    if what == 1:
        return "[" * random.choice((10, 100000)) + result
    if what == 2:
        at = random.randrange(len(result) + 1)
        return result[:at] + random.choice(("\0", "1" * 5000, "-", "}", '"')) + result[at:]
    return result
