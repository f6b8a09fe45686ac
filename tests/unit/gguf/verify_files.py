"""Sound model files, and ways to damage them, for the tests of ``verify``."""

import numpy as np

from gguf_tools.file.layout import KEY_CHECKSUMS
from gguf_tools.file.reader import GGUFFile
from gguf_tools.file.writer import GGUFWriter
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


def repack(source, target, *, drop=(), alignment=4096, rename=None, types=None, meta=None):
    """A copy with tensors left out or renamed and metadata replaced; offsets fit again."""
    with GGUFFile.open(source) as file:
        writer = GGUFWriter(target, alignment)
        for key in file.metadata:
            if key not in ("general.alignment", KEY_CHECKSUMS):
                writer.meta_encoded(key, file.encoded_value(key))
        for key, value in (meta or {}).items():
            writer.meta(key, value)
        kept = [info for info in file.tensors.values() if info.name not in drop]
        names = {info.name: (rename or {}).get(info.name, info.name) for info in kept}
        for info in kept:
            ggml_type = (types or {}).get(info.name, info.type)
            writer.declare(names[info.name], info.shape, ggml_type)
        with writer:
            writer.begin()
            for info in kept:
                data = file.array(info.name)
                nbytes = writer.tensors[names[info.name]].nbytes
                if nbytes != data.nbytes:
                    data = np.zeros(nbytes, np.uint8)
                writer.write_tensor(names[info.name], data)
    return target


UP = "blk.1.ffn_up_exps.weight"
LOW = UP + ".moe_edge.q2_k"
