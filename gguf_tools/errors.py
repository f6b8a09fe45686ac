"""Exceptions of this package, with one class for each kind of malformed model file.

Every message names the file, then the metadata key or tensor, then the byte offset if it is known,
so that a user can inspect the damaged bytes.
"""


class MoeEdgeError(Exception):
    """Base class of all moe-edge errors. Commands print its text unchanged."""


class GGUFError(MoeEdgeError):
    """A model file cannot be read, written or used."""


class TextFileError(MoeEdgeError):
    """A text file given by the user is not a regular file, is too long, or is not UTF-8."""


class FileAccessError(GGUFError):
    """The file is missing, unreadable, or not a regular file."""


class MagicError(GGUFError):
    """The file does not start with ``GGUF``."""


class VersionError(GGUFError):
    """The GGUF version or byte order is not supported."""


class TruncatedError(GGUFError):
    """The file ends inside the header, the metadata or the tensor list."""


class CountError(GGUFError):
    """A count or length exceeds what a file of this size can hold."""


class TextError(GGUFError):
    """A string is not valid UTF-8, or a name of a tensor or metadata key is not allowed.

    Such a name must not be empty or too long, and must not have control characters.
    """


class MetadataError(GGUFError):
    """A metadata value has an unknown type or an impossible value."""


class NestingError(MetadataError):
    """Metadata arrays are nested deeper than the limit."""


class DuplicateError(GGUFError):
    """A metadata key or tensor name occurs twice."""


class MissingKeyError(GGUFError):
    """A required metadata key is missing."""


class TensorShapeError(GGUFError):
    """A tensor's dimensions are missing, zero, too many, too large, or contradict the metadata."""


class TensorTypeError(GGUFError):
    """A tensor has a ggml type that is unknown or not supported for this tensor."""


class ExpertIndexError(GGUFError):
    """A table that routes tokens to experts refers to an expert that the model does not have."""


class TensorOffsetError(GGUFError):
    """A tensor's data is misaligned, extends past the end of the file, or overlaps other data."""


class TensorBoundsError(TensorOffsetError):
    """A tensor's data extends past the end of the file."""


class TensorOverlapError(TensorOffsetError):
    """The data of two tensors overlaps."""


class MissingTensorError(GGUFError):
    """A layer of the model lacks one of its expert matrices."""


class MissingTierError(GGUFError):
    """A precision (tier) that the metadata lists, or that the caller requested, is missing."""


class SplitError(GGUFError):
    """The files of a model that is split into several files do not belong together."""


class NotMoEError(GGUFError):
    """The model has no expert tensors."""


class MismatchError(GGUFError):
    """Two files do not contain the same model in different precisions."""


class DamagedError(GGUFError):
    """Data of a model file does not match the checksum that is stored in the file."""


class ChangedError(GGUFError):
    """A model file was modified while the model was running."""


class DiskSpaceError(GGUFError):
    """The file system of the file to write has too little free space."""


class WriteError(GGUFError):
    """The output file cannot be written, or its declared contents are inconsistent."""


class QuantizeError(GGUFError):
    """The ggml library cannot be loaded, or cannot quantize the given values to the type."""


class CheckpointError(MoeEdgeError):
    """A folder with a Hugging Face checkpoint is incomplete or damaged."""


class ConvertError(MoeEdgeError):
    """llama.cpp's converter is missing, or cannot convert the checkpoint."""


class HubError(MoeEdgeError):
    """A model cannot be downloaded from the Hugging Face Hub."""


class SeveralModelsError(HubError):
    """A repository of the Hugging Face Hub has several models, and the user named none of them."""


class HubUnreachableError(HubError):
    """The Hugging Face Hub does not answer. Files in the local cache can still be used."""
