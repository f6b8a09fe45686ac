"""Run llama.cpp's checkpoint converter as a library.

The converter knows the tensor names, hyperparameters and tokenizers of every architecture. Instead
of letting it write a file, this module takes its metadata and its lazy tensors. The weights are
read later, when they are needed. The converter and its version of the `gguf` package are part of
the built llama.cpp.
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
from gguf_tools.convert.model_card import read_model_card
from gguf_tools.convert.pretokenizer import pre_tokenizer
from gguf_tools.convert.rope import check_rope
from gguf_tools.errors import CheckpointError, ConvertError
from gguf_tools.file.layout import EMBEDDINGS, FLOAT_TYPES, OUTPUT, GGMLType, ValueType
from gguf_tools.file.writer import encode_value

MISSING_LIBRARIES = "converting needs torch and transformers: run `pip install 'moe-edge[convert]'`"
_LIBRARIES = ("torch", "transformers", "safetensors", "sentencepiece", "tokenizers")
# The converter's modules. PyPI has other packages with these names, so the converter's modules are
# in sys.modules only while it runs.
_OURS = ("conversion", "gguf")
# The converter's loggers, and a logger whose warnings do not concern the conversion.
_LOGGERS = ("hf-to-gguf", "gguf", "metadata")
_QUIET = "transformers"
# Parts of warnings that do not concern the result: faults that this package checks itself, keys
# that a class sets again after its base class, templates for two texts, speed of other programs.
_HARMLESS = (
    "Unknown RoPE type",
    "Failed to load model config",
    "Trying to load config.json",
    "Duplicated key name",
    "Ignoring head_dim",
    "TemplateProcessing<pair>",
    "is not in MXFP4",
)
_MOST_NOTES = 5
_FILE_TYPE = {"F32": "ALL_F32", "F16": "MOSTLY_F16"}
# Class names in transformers, and their names in published checkpoints, which the converter knows.
_OTHER_NAMES = {"PhimoeForCausalLM": "PhiMoEForCausalLM"}
# Settings that a class implies, so that transformers does not write them to config.json.
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
# Architectures that llama.cpp only loads with a separate output matrix, even if it is tied to the
# embeddings.
_OWN_OUTPUT = frozenset(
    (
        *("bailingmoe", "bailingmoe2", "dots1", "gpt-oss", "minimax-m2", "olmoe", "phimoe"),
        "qwen2moe",
    )
)
_UNPROCESSED = re.compile(r"Unprocessed experts: \['([^']+)'")
_modules: dict[str, ModuleType] = {}


class LazyTensor(NamedTuple):
    """A tensor of llama.cpp's converter whose values have not been computed yet.

    shape: dimensions in ggml order, the row length first.
    type: the ggml type that the converter chose.
    values: the converter's lazy tensor, with the dimensions in reverse order. If the type is
        quantized, its elements are the encoded bytes.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    values: Any


@dataclass(slots=True)
class Description:
    """The result of running llama.cpp's converter on a checkpoint.

    metadata: encoded metadata values by key.
    tensors: the tensors in file order.
    notes: warnings for the user.
    """

    metadata: dict[str, bytes]
    tensors: list[LazyTensor]
    notes: list[str]


def archive() -> Path:
    """Return the path of the zip archive that contains llama.cpp's converter.

    Raises ConvertError if the installed llama_cpp package is not the one that moe-edge built.
    """
    with suppress(built.NotBuilt):
        path = built.package() / "upstream.zip"
        if path.is_file():
            return path
    raise ConvertError(f"llama.cpp's converter is not installed: {built.advice()}")


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Let torch compute on the calling thread only, during the `with` block.

    Raises ConvertError if torch is not installed.
    """
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
    """Run llama.cpp's converter on a checkpoint and return metadata and tensors of the GGUF model.

    The values of the tensors are computed later, when they are read. Raises ConvertError for an
    unknown architecture, a missing library, a RoPE scaling that would be lost, and any other error
    of the converter.

    title: name of the model. Default: the name in the README or the folder name.
    trust_remote_code: run Python code that the checkpoint contains for its tokenizer.
    """
    with _loaded() as (conversion, base, gguf), _converter_errors(checkpoint) as warnings:
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
                f"{checkpoint.folder / 'config.json'}: llama.cpp's converter does not support the"
                f" architecture {architecture}"
            ) from None
        file_type = _FILE_TYPE.get(checkpoint.dtype, "MOSTLY_BF16")
        with ExitStack() as stack:
            card, note = read_model_card(checkpoint.folder)
            for each in _changes(base, gguf, checkpoint.folder, trust_remote_code, card):
                stack.enter_context(each)
            stack.enter_context(torch.inference_mode())
            # Leave out the multi-token prediction layers, which moe-edge does not use.
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
        written = [*writer.kv_data[0], *writer.tensors[0]]
        lost = check_rope(checkpoint.folder / "config.json", model.rope_parameters, written)
        return Description(
            {key: _encoded(each) for key, each in writer.kv_data[0].items()},
            _with_output(tensors, gguf.MODEL_ARCH_NAMES[model.model_arch]),
            [each for each in (note, lost) if each] + _notes(checkpoint.folder, warnings),
        )


def _with_output(tensors: list[LazyTensor], architecture: str) -> list[LazyTensor]:
    """Return a model's tensors, with an output matrix added if llama.cpp needs one.

    llama.cpp needs an output matrix for some architectures, even if a model uses its embeddings as
    the output matrix (tied embeddings). In this case, a copy of the embeddings is added.
    """
    named = {each.name: each for each in tensors}
    embeddings = named.get(EMBEDDINGS)
    if architecture not in _OWN_OUTPUT or OUTPUT in named or embeddings is None:
        return tensors
    return [*tensors, embeddings._replace(name=OUTPUT)]


def _dense_layers(config: dict[str, Any]) -> dict[str, int]:
    """Return the setting `first_k_dense_replace` as a dict, derived from the list of layer types.

    The setting is the number of dense layers before the first layer with experts. llama.cpp's
    converter reads this setting, but config.json files written by transformers only have the list.
    The result is an empty dict if the list is missing or names no layer with experts.
    """
    kinds = config.get("mlp_layer_types")
    if not isinstance(kinds, list) or "sparse" not in kinds:
        return {}
    return {"first_k_dense_replace": kinds.index("sparse")}


def _attention_layers(architecture: str, config: dict[str, Any]) -> dict[str, list[str]]:
    """Return the setting `layer_types` of Granite models with the names that the converter knows.

    config.json files written by transformers use other names. Return an empty dict for other
    models.
    """
    kinds = config.get("layer_types")
    if architecture != "GraniteMoeHybridForCausalLM" or not isinstance(kinds, list):
        return {}
    return {"layer_types": [str(each).removeprefix("full_") for each in kinds]}


def _adds_bos(folder: Path) -> bool:
    """Return whether the tokenizer's configuration adds a BOS token before each text."""
    path = folder / "tokenizer_config.json"
    return path.is_file() and json.loads(path.read_text("utf-8")).get("add_bos_token") is True


def _notes(folder: Path, warnings: list[str]) -> list[str]:
    """Return the warnings of llama.cpp's converter that concern the user, without duplicates.

    At most _MOST_NOTES warnings are returned, followed by the number of the others.
    """
    lines = dict.fromkeys(" ".join(each.split()) for each in warnings)
    relevant = [
        each
        for each in lines
        if each
        and not each.startswith("**")
        and not any(harmless in each for harmless in _HARMLESS)
    ]
    notes = [
        f"{folder}: warning of llama.cpp's converter: {each[:300]}"
        for each in relevant[:_MOST_NOTES]
    ]
    more = len(relevant) - _MOST_NOTES
    return (
        [*notes, f"{folder}: {more} more warnings of llama.cpp's converter are not shown"]
        if more > 0
        else notes
    )


def _chat_template(folder: Path) -> Any:
    """Return the chat templates that a checkpoint has in separate files.

    The result is one text, a list of named templates, or None if there is no such file. These
    templates override the one in tokenizer_config.json, as in transformers. Raises ConvertError if
    a file is not UTF-8.
    """
    main = folder / "chat_template.jinja"
    if not main.is_file():
        return None
    others = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    found = []
    for path in (main, *others):
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError:
            raise ConvertError(f"{path}: not UTF-8 text: save it as UTF-8") from None
        found.append({"name": "default" if path == main else path.stem, "template": text})
    return found if others else found[0]["template"]


def _changes(
    base: Any, gguf: Any, folder: Path, trust_remote_code: bool, card: dict[str, Any]
) -> Iterator[AbstractContextManager[None]]:
    """Yield context managers, each of which replaces one function of llama.cpp's converter.

    card: the fields of the front matter of the checkpoint's README.
    """
    from transformers import AutoTokenizer

    quantize = gguf.quants.quantize
    load = AutoTokenizer.from_pretrained
    known = base.TextModel.get_vocab_base_pre
    special = gguf.SpecialVocab._load
    template = _chat_template(folder)

    def keep(data: Any, kind: Any) -> Any:
        # Do not round floats: the tiers need the checkpoint's values, and CheckpointFile rounds
        # dense tensors.
        return data if GGMLType(int(kind)) in FLOAT_TYPES else quantize(data, kind)

    def load_tokenizer(*args: Any, **options: Any) -> Any:
        tokenizer = load(*args, **{**options, "trust_remote_code": trust_remote_code})
        # transformers 5 loses this setting, which the converter needs.
        if getattr(tokenizer, "add_bos_token", None) is False and _adds_bos(folder):
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

    def load_special(self: Any, path: Path) -> None:
        special(self, path)
        if template is not None:
            self.chat_template = template

    yield _replaced(gguf.quants, "quantize", keep)
    yield _replaced(gguf.SpecialVocab, "_load", load_special)
    yield _replaced(gguf.Metadata, "load_model_card", staticmethod(lambda *_: card))
    yield _replaced(AutoTokenizer, "from_pretrained", load_tokenizer)
    yield _replaced(base.TextModel, "get_vocab_base_pre", pre)


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    # vars() instead of getattr(), which would return a bound method for a classmethod.
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _tensor(name: str, info: Any) -> LazyTensor:
    return LazyTensor(name, tuple(reversed(info.shape)), GGMLType(int(info.dtype)), info.tensor)


def _encoded(each: Any) -> bytes:
    """Return the encoded bytes of a metadata value, the same as llama.cpp's writer produces."""
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
    """Import llama.cpp's converter, and yield its modules conversion, conversion.base and gguf.

    At the end of the block, the modules are removed from sys.modules.
    """
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


class _Kept(logging.Handler):
    """A log handler that collects the messages of warnings in the list `texts`."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def _kept_warnings() -> Iterator[list[str]]:
    """Collect warnings of llama.cpp's converter in the `with` block, without printing them.

    Yields the list to which each warning is added.
    """
    handler = _Kept()
    loggers = [logging.getLogger(name) for name in (*_LOGGERS, _QUIET)]
    before = [(each.level, each.propagate, each.handlers) for each in loggers]
    for each in loggers:
        each.setLevel(logging.CRITICAL if each.name == _QUIET else logging.WARNING)
        each.propagate, each.handlers = False, [handler]
    try:
        yield handler.texts
    finally:
        for each, (level, propagate, handlers) in zip(loggers, before, strict=True):
            each.setLevel(level)
            each.propagate, each.handlers = propagate, handlers


@contextmanager
def _converter_errors(checkpoint: Checkpoint) -> Iterator[list[str]]:
    """Convert the converter's exceptions in the `with` block to ConvertError with one sentence.

    Yields the list of the converter's warnings so far.
    """
    folder = str(checkpoint.folder)
    try:
        with _kept_warnings() as warnings:
            yield warnings
    except (ConvertError, CheckpointError, MemoryError):
        raise
    except KeyError as error:
        raise ConvertError(
            f"{folder}: llama.cpp's converter did not find {error} in the files of"
            f" {checkpoint.architecture}"
        ) from error
    except Exception as error:
        raise ConvertError(f"{folder}: {_explained(error)}") from error


def _explained(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if match := _UNPROCESSED.match(text):
        return f"experts are missing: the layer of {match[1]} is incomplete"
    if "pre-tokenizer was not recognized" in text:
        return "llama.cpp does not support the tokenizer's pre-tokenizer"
    if "trust_remote_code" in text:
        return (
            "the tokenizer is Python code in the checkpoint: review it, then use"
            " --trust-remote-code to run it"
        )
    if isinstance(error, json.JSONDecodeError):
        return f"a file is not JSON: {text}"
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return f"llama.cpp's converter failed: {text[:300]}"
