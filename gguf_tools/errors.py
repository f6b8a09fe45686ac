"""What can be wrong with a model file, with a name for each malformation.

Every message starts with the file, then the key or tensor, then the byte offset where
one is known, so that a person can look at the very place.
"""


class MoeEdgeError(Exception):
    """The base of all our errors. Its text is shown to the user as it is."""


class GGUFError(MoeEdgeError):
    """A model file cannot be read, written or used."""


class TextFileError(MoeEdgeError):
    """A text that a user gave cannot be read: no regular file, too long, or not UTF-8."""


class FileAccessError(GGUFError):
    """The file is missing, unreadable, or not a regular file."""


class MagicError(GGUFError):
    """The file does not start with ``GGUF``."""


class VersionError(GGUFError):
    """A GGUF version (or byte order) that this reader does not know."""


class TruncatedError(GGUFError):
    """The file ends inside the header, the metadata or the tensor list."""


class CountError(GGUFError):
    """A count or length that the file cannot possibly hold."""


class TextError(GGUFError):
    """A string that is not valid UTF-8, or an empty or overlong name."""


class MetadataError(GGUFError):
    """A metadata value of an unknown type or with an impossible value."""


class NestingError(MetadataError):
    """Metadata arrays inside arrays beyond the depth limit."""


class DuplicateError(GGUFError):
    """A metadata key or tensor name that occurs twice."""


class MissingKeyError(GGUFError):
    """A metadata key that every model needs is absent."""


class TensorShapeError(GGUFError):
    """Dimensions that are absent, zero, too many, too large, or not what the model says."""


class TensorTypeError(GGUFError):
    """A ggml type that this version does not know, or cannot use here."""


class ExpertIndexError(GGUFError):
    """A table that chooses an expert which the model does not have."""


class TensorOffsetError(GGUFError):
    """Tensor data that is misaligned."""


class TensorBoundsError(TensorOffsetError):
    """Tensor data that reaches past the end of the file."""


class TensorOverlapError(TensorOffsetError):
    """Two tensors that share bytes."""


class MissingTensorError(GGUFError):
    """An expert matrix that its layer needs is absent."""


class MissingTierError(GGUFError):
    """A tier that is announced or asked for is absent."""


class SplitError(GGUFError):
    """The parts of a split model do not belong together."""


class NotMoEError(GGUFError):
    """A model without expert tensors."""


class MismatchError(GGUFError):
    """Two files that should be one model in two precisions are not."""


class DamagedError(GGUFError):
    """Bytes whose checksum is not the one that the file says."""


class ChangedError(GGUFError):
    """A file was written to while a model was running from it."""


class DiskSpaceError(GGUFError):
    """The target file system has too little space."""


class WriteError(GGUFError):
    """The target file cannot be written, or was declared inconsistently."""


class QuantizeError(GGUFError):
    """ggml cannot be reached, or cannot quantize these values to this type."""


class CheckpointError(MoeEdgeError):
    """A checkpoint folder is incomplete or damaged."""


class ConvertError(MoeEdgeError):
    """Upstream's converter is missing, or cannot convert a checkpoint."""


class HubError(MoeEdgeError):
    """A model cannot be had from the Hugging Face Hub."""


class HubUnreachableError(HubError):
    """The Hub does not answer; what is in the cache may still do."""
