"""Split a GGUF as llama.cpp's gguf-split does."""

from gguf_tools.file.layout import DEFAULT_ALIGNMENT, KEY_ALIGNMENT, ValueType
from gguf_tools.file.reader import GGUFFile
from gguf_tools.file.writer import GGUFWriter


def part_path(folder, name, index, n_parts):
    return folder / f"{name}-{index + 1:05d}-of-{n_parts:05d}.gguf"


def split(path, folder, n_parts, *, name="m", bare_first=False):
    """Write the parts of `path` into `folder`. Return their paths, the first part first.

    The first part has all metadata of the model. The other parts have another alignment.
    bare_first: no tensors in the first part (gguf-split --no-tensor-first-split).
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [part_path(folder, name, index, n_parts) for index in range(n_parts)]
    with GGUFFile.open(path) as source:
        tensors = list(source.tensors.values())
        with_data = n_parts - bare_first
        step = -(-len(tensors) // with_data)
        runs = [tensors[i * step : (i + 1) * step] for i in range(with_data)]
        for index, (target, run) in enumerate(zip(paths, [[]] * bare_first + runs, strict=True)):
            writer = GGUFWriter(target, DEFAULT_ALIGNMENT if index else source.alignment)
            if index == 0:
                for key in source.metadata:
                    if key != KEY_ALIGNMENT:
                        writer.meta_encoded(key, source.encoded_value(key))
            writer.meta("split.no", index, ValueType.UINT16)
            writer.meta("split.count", n_parts, ValueType.UINT16)
            writer.meta("split.tensors.count", len(tensors), ValueType.INT32)
            for info in run:
                writer.declare(info.name, info.shape, info.type)
            with writer:
                writer.begin()
                for info in run:
                    writer.write_tensor(info.name, source.array(info.name))
    return paths
