"""Good model files, and functions that damage them, for tests of `verify`."""

from gguf_tools.file.reader import GGUFFile
from gguf_tools.verify import verify

NAN_HALF, INF_HALF = 0x7E00, 0xFC00


def write_bytes(path, data):
    path.write_bytes(data)
    return path


def poke(path, offset, data):
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def place(path, name):
    with GGUFFile.open(path) as file:
        return file.tensors[name]


def texts(path, ggml, **options):
    return [each.text for each in verify(path, ggml=ggml, threads=1, **options).problems]


UP = "blk.1.ffn_up_exps.weight"
LOW = UP + ".moe_edge.q2_k"
