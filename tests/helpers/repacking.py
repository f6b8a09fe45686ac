"""Copies of a GGUF with changed metadata or without some tensors, and flipped bits."""

from gguf_tools.file.layout import KEY_ALIGNMENT, KEY_CHECKSUMS
from gguf_tools.file.reader import GGUFFile
from gguf_tools.file.writer import GGUFWriter


def repack(source, target, *, drop=(), alignment=4096, rename=None, meta=None, **changes):
    """Copy a GGUF with tensors removed or renamed and metadata replaced.

    changes: metadata by the part of a key after the architecture's name.
    """
    with GGUFFile.open(source) as file:
        arch = file.metadata["general.architecture"]
        new = {**(meta or {}), **{f"{arch}.{name}": value for name, value in changes.items()}}
        writer = GGUFWriter(target, alignment)
        for key in file.metadata:
            if key not in {*new, KEY_ALIGNMENT, KEY_CHECKSUMS}:
                writer.meta_encoded(key, file.encoded_value(key))
        for key, value in new.items():
            writer.meta(key, value)
        names = {name: (rename or {}).get(name, name) for name in file.tensors if name not in drop}
        for name, new_name in names.items():
            info = file.tensors[name]
            writer.declare(new_name, info.shape, info.type)
        with writer:
            writer.begin()
            for name, new_name in names.items():
                writer.write_tensor(new_name, file.array(name))
    return target


def flip(path, at):
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def overwrite(path, tensor, data):
    """Replace the first bytes of a tensor's data in a file without checksums."""
    with GGUFFile.open(path) as file:
        offset = file.tensors[tensor].offset
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
    return offset
