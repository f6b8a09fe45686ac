"""Copies of a GGUF that say something else of themselves."""

from gguf_tools.file.reader import GGUFFile
from gguf_tools.file.writer import GGUFWriter


def copied(source, target, arch=None, **changes):
    """The same tensors; arch: the name of another architecture; changes: of its metadata, by the
    part of a key behind the architecture's name."""
    with GGUFFile.open(source) as file, GGUFWriter(target, file.alignment) as writer:
        old = file.metadata["general.architecture"]
        new = arch or old
        for key in file.metadata:
            name = key.removeprefix(f"{old}.")
            kept = f"{new}.{name}" if name != key else key
            if key == "general.architecture":
                writer.meta(key, new)
            elif name in changes:
                writer.meta(kept, changes[name])
            else:
                writer.meta_encoded(kept, file.encoded_value(key))
        for info in file.tensors.values():
            writer.declare(info.name, info.shape, info.type)
        writer.begin()
        for info in file.tensors.values():
            writer.write_tensor(info.name, file.array(info.name))
    return target
