"""llama.cpp's own converter of checkpoints, run as a library.

It knows names, hyperparameters and tokenizers of every architecture. What it would write is
taken from it as metadata and lazy tensors; not a byte of weights is read before they are used.
The converter and the ``gguf`` package of its version come with the built llama.cpp.
"""

import importlib
import json
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from gguf_tools import built
from gguf_tools.convert.checkpoint import Checkpoint
from gguf_tools.convert.pretokenizer import pre_tokenizer
from gguf_tools.errors import CheckpointError, ConvertError
from gguf_tools.file.layout import EMBEDDINGS, FLOAT_TYPES, OUTPUT, GGMLType, ValueType
from gguf_tools.file.writer import encode_value

MISSING_LIBRARIES = (
    "a conversion needs torch and transformers: run `pip install 'moe-edge[convert]'`"
)
_LIBRARIES = ("torch", "transformers", "safetensors", "sentencepiece", "tokenizers")
# Others on PyPI have the names of its modules, so sys.modules holds them only while they run.
_OURS = ("conversion", "gguf")
_LOGGERS = ("hf-to-gguf", "gguf", "transformers")
_FILE_TYPE = {"F32": "ALL_F32", "F16": "MOSTLY_F16"}
# Where checkpoints were published with a class of their makers, transformers' own has another name.
_OTHER_NAMES = {"PhimoeForCausalLM": "PhiMoEForCausalLM"}
# A class implies these settings, and transformers leaves them out of the configuration it writes.
_IMPLIED = {
    name: {"scoring_func": "sigmoid"}
    for name in (
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "Dots1ForCausalLM",
        "ExaoneMoeForCausalLM",
        "ExaoneMoEForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "MiniMaxM2ForCausalLM",
    )
} | {"AfmoeForCausalLM": {"route_norm": True}}
# Architectures that llama.cpp loads only with an output matrix of their own, tied or not.
_OWN_OUTPUT = frozenset(
    (
        *("bailingmoe", "bailingmoe2", "dots1", "gpt-oss", "minimax-m2", "olmoe", "phimoe"),
        "qwen2moe",
    )
)
_UNPROCESSED = re.compile(r"Unprocessed experts: \['([^']+)'")
_modules: dict[str, ModuleType] = {}


class LazyTensor(NamedTuple):
    """A tensor that is still to be computed.

    Its shape is in ggml order (row length first), its type is what upstream's rules give it.
    ``values`` [reversed shape] are bytes where that is not a float type.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    values: Any


@dataclass(slots=True)
class Description:
    """What upstream's converter would write: encoded metadata by key, and tensors in order."""

    metadata: dict[str, bytes]
    tensors: list[LazyTensor]


def archive() -> Path:
    """The archive of the converter; ConvertError where the installed llama_cpp is not ours."""
    with suppress(built.NotBuilt):
        path = built.package() / "upstream.zip"
        if path.is_file():
            return path
    raise ConvertError(f"the converter comes with our llama.cpp: {built.advice()}")


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """torch computes on the calling thread alone; ConvertError where there is no torch."""
    try:
        import torch
    except ImportError:
        raise ConvertError(MISSING_LIBRARIES) from None
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_converter(
    checkpoint: Checkpoint, *, title: str | None = None, trust_remote_code: bool = False
) -> Description:
    """Let upstream's converter read a checkpoint.

    title: general.name, if it shall not be what the folder says. trust_remote_code: run code that
    the checkpoint brings for its tokenizer. Raises ConvertError: an unknown architecture, a missing
    library, and whatever else upstream's code trips over, in one sentence.
    """
    with _loaded() as (conversion, base, gguf), _sentences(checkpoint, base):
        import torch

        config = base.ModelBase.load_hparams(checkpoint.folder, False)
        architecture = base.get_model_architecture(config, base.ModelType.TEXT)
        architecture = _OTHER_NAMES.get(architecture, architecture)
        implied = {**_IMPLIED.get(architecture, {}), **_dense_layers(config)}
        config = {**implied, **config, **_attention_layers(architecture, config)}
        try:
            model_class = conversion.get_model_class(architecture)
        except NotImplementedError:
            raise ConvertError(
                f"{checkpoint.folder / 'config.json'}: upstream's converter does not know the"
                f" architecture {architecture}"
            ) from None
        file_type = _FILE_TYPE.get(checkpoint.dtype, "MOSTLY_BF16")
        with ExitStack() as stack:
            for each in _changes(base, gguf, checkpoint.folder, trust_remote_code):
                stack.enter_context(each)
            stack.enter_context(torch.inference_mode())
            # The layers that draft tokens ahead are left out: no part of moe-edge runs them.
            model_class.no_mtp = model_class.supports_mtp_export
            model = model_class(
                checkpoint.folder,
                gguf.LlamaFileType[file_type],
                checkpoint.folder / "model.gguf",
                hparams=config,
                model_name=title,
            )
            model.prepare_tensors()
            model.prepare_metadata(vocab_only=False)
        writer = model.gguf_writer
        tensors = [_tensor(name, each) for name, each in writer.tensors[0].items()]
        return Description(
            {key: _encoded(each) for key, each in writer.kv_data[0].items()},
            _with_output(tensors, gguf.MODEL_ARCH_NAMES[model.model_arch]),
        )


def _with_output(tensors: list[LazyTensor], architecture: str) -> list[LazyTensor]:
    """The tensors, and a copy of the embeddings where they are the output matrix as well and
    llama.cpp does not know that."""
    named = {each.name: each for each in tensors}
    embeddings = named.get(EMBEDDINGS)
    if architecture not in _OWN_OUTPUT or OUTPUT in named or embeddings is None:
        return tensors
    return [*tensors, embeddings._replace(name=OUTPUT)]


def _dense_layers(config: dict[str, Any]) -> dict[str, int]:
    """How many layers come before the first with experts, under the key that the published
    checkpoints have for it. Where transformers wrote the configuration, it has a list of layers
    instead."""
    kinds = config.get("mlp_layer_types")
    if not isinstance(kinds, list) or "sparse" not in kinds:
        return {}
    return {"first_k_dense_replace": kinds.index("sparse")}


def _attention_layers(architecture: str, config: dict[str, Any]) -> dict[str, list[str]]:
    """The layers' kinds as published, where transformers reads them under names of its own and the
    converter knows the published ones alone."""
    kinds = config.get("layer_types")
    if architecture != "GraniteMoeHybridForCausalLM" or not isinstance(kinds, list):
        return {}
    return {"layer_types": [str(each).removeprefix("full_") for each in kinds]}


def _begins(folder: Path) -> bool:
    """Whether a checkpoint says that a token comes before each text."""
    path = folder / "tokenizer_config.json"
    return path.is_file() and json.loads(path.read_text("utf-8")).get("add_bos_token") is True


def _changes(
    base: Any, gguf: Any, folder: Path, trust_remote_code: bool
) -> Iterator[AbstractContextManager[None]]:
    """What is different here from the converter's own run."""
    from transformers import AutoTokenizer

    quantize = gguf.quants.quantize
    load = AutoTokenizer.from_pretrained
    known = base.TextModel.get_vocab_base_pre

    def keep(data: Any, kind: Any) -> Any:
        # Tiers are made from the checkpoint's own values, and dense tensors are rounded later.
        return data if GGMLType(int(kind)) in FLOAT_TYPES else quantize(data, kind)

    def load_tokenizer(*args: Any, **options: Any) -> Any:
        tokenizer = load(*args, **{**options, "trust_remote_code": trust_remote_code})
        # transformers 5 forgets this setting, which the converter asks for.
        if getattr(tokenizer, "add_bos_token", None) is False and _begins(folder):
            tokenizer._add_bos_token = True
        return tokenizer

    def pre(self: Any, tokenizer: Any) -> str:
        try:
            return str(known(self, tokenizer))
        except NotImplementedError:
            found = pre_tokenizer(Path(self.dir_model))
            if found is None:
                raise
            return found

    yield _replaced(gguf.quants, "quantize", keep)
    yield _replaced(AutoTokenizer, "from_pretrained", load_tokenizer)
    yield _replaced(base.TextModel, "get_vocab_base_pre", pre)


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    # It is read from __dict__, since a classmethod read as an attribute would come back bound.
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _tensor(name: str, info: Any) -> LazyTensor:
    return LazyTensor(name, tuple(reversed(info.shape)), GGMLType(int(info.dtype)), info.tensor)


def _encoded(each: Any) -> bytes:
    """A metadata value as upstream's writer would encode it."""
    kind = ValueType(int(each.type))
    if kind is not ValueType.ARRAY:
        return encode_value(_text(each.value), kind)
    values = [_text(value) for value in each.value]
    element = each.sub_type
    if element is None:
        first = values[0] if values else 0
        element = (
            ValueType.STRING
            if isinstance(first, str)
            else ValueType.BOOL
            if isinstance(first, bool)
            else ValueType.FLOAT32
            if isinstance(first, float)
            else ValueType.ARRAY
            if isinstance(first, (list, tuple))
            else ValueType.INT32
        )
    return encode_value(values, kind, ValueType(int(element)))


def _text(value: Any) -> Any:
    return bytes(value).decode("utf-8") if isinstance(value, (bytes, bytearray)) else value


@contextmanager
def _loaded() -> Iterator[tuple[Any, Any, Any]]:
    """The modules (conversion, conversion.base, gguf), in sys.modules while this lasts."""
    place = archive()
    others = _take_out()
    path = list(sys.path)
    sys.modules.update(_modules)
    sys.path[:0] = [str(place), str(place / "gguf-py")]
    try:
        try:
            conversion = importlib.import_module("conversion")
            base = importlib.import_module("conversion.base")
            gguf = importlib.import_module("gguf")
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] in _LIBRARIES:
                raise ConvertError(MISSING_LIBRARIES) from None
            raise
        yield conversion, base, gguf
    finally:
        sys.path[:] = path
        _modules.update(_take_out())
        sys.modules.update(others)


def _take_out() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.split(".")[0] in _OURS]
    return {name: sys.modules.pop(name) for name in names}


@contextmanager
def _sentences(checkpoint: Checkpoint, base: Any) -> Iterator[None]:
    """Turns what the converter and the libraries below it raise into one sentence."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.CRITICAL)
    where = str(checkpoint.folder)
    try:
        yield
    except (ConvertError, CheckpointError, MemoryError):
        raise
    except KeyError as error:
        raise ConvertError(
            f"{where}: upstream's converter misses {error} in {checkpoint.architecture}'s files"
        ) from error
    except Exception as error:
        raise ConvertError(f"{where}: {_explained(error)}") from error
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)


def _explained(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if match := _UNPROCESSED.match(text):
        return f"experts are missing: {match[1]} is there, but not all of its layer"
    if "pre-tokenizer was not recognized" in text:
        return "its tokenizer splits text by rules that llama.cpp does not know"
    if "trust_remote_code" in text:
        return "its tokenizer is code of its own: read it, then give --trust-remote-code"
    if isinstance(error, json.JSONDecodeError):
        return f"a file of it is not JSON: {text}"
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return f"upstream's converter says: {text[:300]}"
