"""Write the metadata of packed and exported files."""

from gguf_tools.experts import ExpertModel
from gguf_tools.file import layout
from gguf_tools.file.layout import GGMLType, ValueType
from gguf_tools.file.reader import one_line
from gguf_tools.file.writer import GGUFWriter
from gguf_tools.pack.report import PackReport
from gguf_tools.pack.targets import Matrix
from gguf_tools.quantize.methods import ExpertQuantizer, Rtn


def copy_metadata(model: ExpertModel, writer: GGUFWriter) -> None:
    """Copy a model's metadata to a file that is being written.

    Keys that describe how the source file stores the model are left out. These are the keys for
    tiers (precisions), parts of a split model, and alignment.
    """
    first = model.parts[0]
    for key in first.metadata:
        own = key.startswith((layout.KEY_PREFIX, "split.")) or key == layout.KEY_ALIGNMENT
        if not own:
            writer.meta_encoded(key, first.encoded_value(key))


def write_quantization(writer: GGUFWriter, best: GGMLType) -> None:
    """Set the metadata keys in which llama.cpp stores file type and quantization version.

    best: type of most matrices.
    """
    writer.meta(layout.KEY_FILE_TYPE, layout.FILE_TYPE[best], ValueType.UINT32)
    writer.meta(layout.KEY_QUANTIZATION_VERSION, layout.QUANTIZATION_VERSION, ValueType.UINT32)


def write_tiers(
    writer: GGUFWriter,
    report: PackReport,
    types: list[GGMLType],
    how: tuple[str, str],
) -> None:
    """Set the `moe_edge.*` metadata that describes the precisions (tiers) of a file's experts.

    types: the ggml types of the tiers, the best first.
    how: quantization method and calibration, as texts.
    """
    write_quantization(writer, types[0])
    writer.meta(layout.KEY_FORMAT_VERSION, layout.FORMAT_VERSION, ValueType.UINT32)
    writer.meta(layout.KEY_TIERS, [name for name, _, _ in report.tiers])
    bpw = [bits for _, bits, _ in report.tiers]
    writer.meta(layout.KEY_TIER_BPW, bpw, ValueType.ARRAY, ValueType.FLOAT32)
    method, calibration = how
    if any(each.type is GGMLType.Q2_0 for each in writer.tensors.values()):
        method += ", q2_0 by least squares"
    writer.meta(layout.KEY_QUANTIZATION, method)
    writer.meta(layout.KEY_CALIBRATION, calibration)
    if report.fallbacks:
        writer.meta(layout.KEY_FALLBACKS, report.fallbacks)


def method_and_calibration(
    model: ExpertModel, matrices: list[Matrix], quantizer: ExpertQuantizer | None
) -> tuple[str, str]:
    """Return two texts for a packed file's metadata: the quantization method and the calibration.

    Both describe how the lower precisions (tiers) are made:

    - A quantizer makes them: the texts are the quantizer's method and calibration.
    - All are copied from the source file: the texts are those in the source's metadata.
    - All are rounded to nearest, which is done without a quantizer: the texts are "rtn" and "none".
    - Some are copied, and the others are rounded to nearest: the method is, for example, "gptq and
      rtn". The calibration comes from the source's metadata.

    model: the source file. If its metadata lacks a method, or has "ggml", the method counts as
        "rtn".
    matrices: the matrices to be written. They tell which tiers are copied.
    quantizer: None if no quantizer is used.
    """
    by = quantizer or Rtn
    lower = [each.copy_from is None for matrix in matrices for each in matrix.targets[1:]]
    recorded = one_line(str(model.metadata.get(layout.KEY_QUANTIZATION, by.method))).split(",")[0]
    if quantizer is not None or all(lower) or recorded in (by.method, "ggml"):
        return by.method, by.calibration
    method = f"{recorded} and {by.method}" if any(lower) else recorded
    return method, one_line(str(model.metadata.get(layout.KEY_CALIBRATION, by.calibration)))
