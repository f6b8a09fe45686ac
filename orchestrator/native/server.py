"""Binds the functions of moe-edge-server.h: llama.cpp's server without HTTP, in its own library."""

from __future__ import annotations

import ctypes
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gguf_tools import interrupts
from orchestrator.errors import NativeError
from orchestrator.native.abi import fields_of

if TYPE_CHECKING:
    from orchestrator.native.llama import Bindings

ABI_VERSION = 11
_ERROR_BYTES = 512
_LIBRARY = "libmoe-edge-server.so"
_NO_SEED = 0xFFFFFFFF
_OWN_LIMIT = -1  # the limit of the model
# An upper limit of the marks of a sequence.
_MOST_MARKS = 64
# Length of the first buffer for a sequence's tokens. It grows if a sequence holds more.
_MANY_TOKENS = 16384
# Return values of moe_edge_request_run, if the answer ended early.
_FAILURES = {
    -1: "there was too little main memory for the answer: try a smaller --ram",
    -2: "the answer was ended because the client reads too slowly",
}


class CServerConfig(ctypes.Structure):
    """The configuration of llama.cpp's server core (C struct moe_edge_native_config)."""

    _fields_ = [
        *fields_of(ctypes.c_char_p, "model_name", "chat_template"),
        *fields_of(
            ctypes.c_int32,
            "n_parallel",
            "n_slot_context",
            "n_batch",
            "n_threads",
            "max_tokens",
            "cache_mib",
            "n_checkpoints",
        ),
        ("seed", ctypes.c_uint32),
        ("top_k", ctypes.c_int32),
        *fields_of(ctypes.c_float, "temp", "top_p", "min_p"),
        *fields_of(ctypes.c_int32, "verbosity", "most_ahead"),
        ("mmproj", ctypes.c_char_p),
        ("image_max_tokens", ctypes.c_int32),
    ]


class CImages(ctypes.Structure):
    """The memory and the number of tokens that images need (C struct moe_edge_images).

    Some image encoders cut a large image into tiles.

    - weights, scratch: bytes of the image encoder's weights and of its temporary buffers.
    - prepared: bytes of the largest image after it was scaled or cut into tiles.
    - min_pixels: smaller images are enlarged to this number of pixels; 0 if the sizes are fixed.
    - part_tokens: maximum number of tokens of a tile, or of an image that is not cut.
    - is_whole: 1 if all tokens of a tile or uncut image must be computed in one micro-batch.
    - n_embd: width of the embedding of an image token.
    """

    _fields_ = [
        *fields_of(ctypes.c_uint64, "weights", "scratch", "prepared", "min_pixels"),
        *fields_of(ctypes.c_int32, "part_tokens", "is_whole", "n_embd"),
    ]


class CMark(ctypes.Structure):
    """A position to which a saved sequence can be truncated (C struct moe_edge_server_mark)."""

    _fields_ = [
        *fields_of(ctypes.c_uint64, "offset", "n_bytes"),
        *fields_of(ctypes.c_int32, "n_tokens", "pos_min", "pos_max"),
    ]


_NOTE = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int32)
_RECALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64)
_DROP = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)


class CNotes(ctypes.Structure):
    """Callbacks with which the server saves and restores the caller's data of a sequence.

    The data is, for example, a policy's state. A note is a saved copy of it. C struct
    moe_edge_server_notes.

    - note: called at some token positions of a sequence. Saves the data, and returns the number of
      the note, or -1 if nothing was saved.
    - recall: called when a sequence is truncated to such a position. Restores the data from the
      note.
    - drop: called when a note is no longer needed. Deletes the note.
    - user: the first argument of each callback.
    """

    _fields_ = [
        ("note", _NOTE),
        ("recall", _RECALL),
        ("drop", _DROP),
        ("user", ctypes.c_void_p),
    ]


class FileMark(NamedTuple):
    """A checkpoint of a saved sequence, which can be truncated to its first n_tokens tokens.

    A file holds the model's state after these tokens. offset, n_bytes: byte offset and size of the
    state in the file. pos_min, pos_max: the first and the last token position that the state
    covers; -1 if an older file does not record them.
    """

    offset: int
    n_bytes: int
    n_tokens: int
    pos_min: int = -1
    pos_max: int = -1


class Ending(NamedTuple):
    """The length of a sequence, and how its last answer ended.

    n_tokens: number of tokens in the sequence. stop: "end" after a token that ends answers, "word"
    after a stop word, "limit" at a token limit, or "none" if the answer was cancelled or has not
    ended. truncated: whether the answer ended because the context was full.
    """

    n_tokens: int
    stop: str
    truncated: bool


_STOPS = ("none", "end", "word", "limit")
_BEFORE_STEP = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
_BEFORE_PROMPT = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_int32, ctypes.POINTER(ctypes.c_int32), ctypes.c_int32
)
_POINTER, _TEXT, _SIZE = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
_TOKENS = ctypes.POINTER(ctypes.c_int32)
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "moe_edge_server_create": (
        _POINTER,
        [_POINTER, _POINTER, ctypes.POINTER(CServerConfig), _TEXT, _SIZE],
    ),
    "moe_edge_server_set_before_step": (None, [_POINTER, _POINTER, _POINTER]),
    "moe_edge_server_set_before_prompt": (None, [_POINTER, _BEFORE_PROMPT, _POINTER]),
    "moe_edge_server_keep_prompts": (ctypes.c_uint64, [_POINTER, ctypes.c_uint64]),
    "moe_edge_server_set_notes": (None, [_POINTER, ctypes.POINTER(CNotes)]),
    "moe_edge_server_run": (None, [_POINTER]),
    "moe_edge_server_has_part": (ctypes.c_int, [_POINTER]),
    "moe_edge_server_settle": (ctypes.c_int, [_POINTER]),
    "moe_edge_server_forget": (ctypes.c_int, [_POINTER, ctypes.c_int32]),
    "moe_edge_server_tokens": (ctypes.c_int64, [_POINTER, ctypes.c_int32, _TOKENS, _SIZE]),
    "moe_edge_server_match": (
        ctypes.c_int64,
        [_POINTER, ctypes.c_int32, _TOKENS, _SIZE, ctypes.POINTER(ctypes.c_int)],
    ),
    "moe_edge_server_save": (
        ctypes.c_int64,
        [_POINTER, ctypes.c_int32, _TEXT, _TOKENS, ctypes.POINTER(CMark), _TOKENS],
    ),
    "moe_edge_server_restore": (
        ctypes.c_int,
        [_POINTER, ctypes.c_int32, _TEXT, ctypes.POINTER(CMark), ctypes.c_int32],
    ),
    "moe_edge_server_ending": (
        ctypes.c_int,
        [_POINTER, ctypes.c_int32, ctypes.POINTER(ctypes.c_int)],
    ),
    "moe_edge_server_as_held": (
        _SIZE,
        [_POINTER, _TOKENS, _SIZE, _TOKENS, _SIZE, _TOKENS, _SIZE],
    ),
    "moe_edge_server_stop": (None, [_POINTER]),
    "moe_edge_server_free": (None, [_POINTER]),
    "moe_edge_server_route": (_TEXT, [ctypes.c_int]),
    "moe_edge_measure_images": (
        ctypes.c_int,
        [_TEXT, ctypes.c_int32, ctypes.c_int64, ctypes.POINTER(CImages), _TEXT, _SIZE],
    ),
    "moe_edge_server_try_template": (_TEXT, [_TEXT]),
    "moe_edge_request_create": (
        _POINTER,
        [_POINTER, _TEXT, _TEXT, _SIZE, ctypes.POINTER(ctypes.c_int32), _SIZE],
    ),
    "moe_edge_request_run": (ctypes.c_int, [_POINTER, ctypes.c_int]),
    "moe_edge_request_take": (
        ctypes.c_int,
        [
            _POINTER,
            ctypes.POINTER(_POINTER),
            ctypes.POINTER(_SIZE),
            ctypes.POINTER(ctypes.c_int),
        ],
    ),
    "moe_edge_request_note": (_TEXT, [_POINTER]),
    "moe_edge_request_token_times": (
        _SIZE,
        [_POINTER, ctypes.POINTER(ctypes.POINTER(ctypes.c_int64))],
    ),
    "moe_edge_request_cancel": (None, [_POINTER]),
    "moe_edge_request_free": (None, [_POINTER]),
}


def native_config(
    model_name: str,
    chat_template: str | None,
    max_tokens: int | None,
    seed: int | None,
    loud: bool,
    mmproj: Path | None = None,
    image_max_tokens: int | None = None,
    **others: float,
) -> CServerConfig:
    """Return a configuration of llama.cpp's server core.

    chat_template: replaces the template of the model. max_tokens: default length limit of answers.
    loud: whether llama.cpp writes its log. mmproj: file of the image encoder. image_max_tokens:
    limit of the tokens of an image. others: further fields of CServerConfig, by name.
    """
    return CServerConfig(
        model_name=model_name.encode(),
        chat_template=None if chat_template is None else chat_template.encode(),
        max_tokens=-1 if max_tokens is None else max_tokens,
        seed=_NO_SEED if seed is None else seed,
        verbosity=4 if loud else -1,
        mmproj=None if mmproj is None else os.fsencode(mmproj),
        image_max_tokens=image_max_tokens or _OWN_LIMIT,
        **others,
    )


def _array(tokens: Sequence[int]) -> ctypes.Array[ctypes.c_int32]:
    return (ctypes.c_int32 * len(tokens))(*tokens)


class ServerLibrary:
    """The shared library with llama.cpp's server core, and its functions.

    It is linked with llama.cpp's main library, libllama, which the caller must load first. Raises
    NativeError if the file at `path` is not such a library or has another ABI version.
    """

    def __init__(self, path: Path) -> None:
        try:
            self.lib = ctypes.CDLL(str(path))
            found = self.lib.moe_edge_server_abi_version()
        except (OSError, AttributeError) as error:
            raise NativeError(
                f"{path}: cannot load this library ({error}): run `make build`"
            ) from error
        if found != ABI_VERSION:
            raise NativeError(
                f"{path}: the library has ABI {found}, but {ABI_VERSION} is needed: "
                "run `make build`"
            )
        for name, (restype, argtypes) in _FUNCTIONS.items():
            function = getattr(self.lib, name)
            function.restype, function.argtypes = restype, argtypes

    def routes(self) -> tuple[str, ...]:
        """Return the HTTP paths that the server core can answer, such as "/tokenize"."""
        names = takewhile(bool, map(self.lib.moe_edge_server_route, count()))
        return tuple(name.decode() for name in names)

    def measure_images(self, path: Path, max_tokens: int | None, most_pixels: int) -> CImages:
        """Return the memory that an image encoder needs, and the largest number of tokens.

        The memory includes the encoder's weights and its buffers for one image of the largest size.
        The number of tokens is that of a tile, or of an image that is not cut into tiles. path:
        file of the image encoder. Its weights are not loaded. max_tokens: limit of the tokens of an
        image; None for the model's limit. most_pixels: the largest number of pixels of an image.
        Raises NativeError if llama.cpp cannot use the file.
        """
        found, message = CImages(), ctypes.create_string_buffer(_ERROR_BYTES)
        limits = max_tokens or _OWN_LIMIT, most_pixels
        status = self.lib.moe_edge_measure_images(
            os.fsencode(path), *limits, ctypes.byref(found), message, _ERROR_BYTES
        )
        if status != 0:
            raise NativeError(message.value.decode("utf-8", "replace").strip())
        return found

    def try_template(
        self, template: str, cases: Sequence[Mapping[str, Any]], bos: str = "", eos: str = ""
    ) -> list[dict[str, Any]]:
        """Apply a chat template to requests, and parse answers with it. No model is needed.

        cases: each item has a `request` for /v1/chat/completions, and optionally `answers`, a list
        of generated texts. The result has an item for each case, with the `prompt`, the `grammar`
        and the parsed `answers`, or with an `error`. bos, eos: texts of the BOS and EOS tokens.
        Raises NativeError for an invalid template.
        """
        question = {"template": template, "bos_token": bos, "eos_token": eos, "cases": cases}
        reply = json.loads(self.lib.moe_edge_server_try_template(json.dumps(question).encode()))
        if isinstance(reply, dict):
            raise NativeError(reply["error"])
        return list(reply)


def server_library(bindings: Bindings) -> ServerLibrary:
    """Load llama.cpp's server core, a library next to the loaded libllama.

    Raises NativeError if the library is missing or was built for another version of moe-edge.
    """
    path = Path(bindings.api.__file__).parent / "lib" / _LIBRARY
    if not path.is_file():
        raise NativeError(f"{path} is missing: run `make build`, or install moe-edge's wheel again")
    return ServerLibrary(path)


class NativeServer:
    """llama.cpp's server core, which answers requests with a loaded model and context.

    One thread calls `run` and computes all steps. Call `close` before the context and the model are
    closed. error: the exception of a Python callback that failed, or None.
    """

    def __init__(
        self, library: ServerLibrary, model: int, context: int, config: CServerConfig
    ) -> None:
        """Make a server. Raises NativeError with llama.cpp's reason if that fails.

        model, context: addresses of the llama_model and the llama_context.
        """
        self.lib = library.lib
        message = ctypes.create_string_buffer(_ERROR_BYTES)
        self._handle: int | None = self.lib.moe_edge_server_create(
            model, context, ctypes.byref(config), message, _ERROR_BYTES
        )
        if not self._handle:
            raise NativeError(message.value.decode("utf-8", "replace"))
        self._trampolines: list[Any] = []
        self.error: BaseException | None = None
        self.note: Callable[[str], None] = lambda _sentence: None  # gets messages for the log

    @property
    def needs_checkpoints(self) -> bool:
        """Whether the model can truncate a sequence only at checkpoints.

        A checkpoint is a saved state of the model at one position of the sequence. Models with
        recurrent layers or a sliding window need checkpoints. All other models can truncate a
        sequence at every position.
        """
        return bool(self.lib.moe_edge_server_has_part(self.handle))

    def set_before_step(self, function: Callable[[bool], None]) -> None:
        """Set a function that is called before each step. Call this before `run`.

        The argument of the function is True if the step has no prompt tokens. The function runs on
        the thread of `run`. If it raises, the step fails, and the exception is in `error` until the
        next step.
        """

        @interrupts.called_from_c
        def before(_user: int | None, is_answer: int) -> int:
            self.error = None
            try:
                function(bool(is_answer))
            except BaseException as error:  # noqa: BLE001 - exceptions cannot pass through C
                self.error = error
                return 1
            return 0

        self._trampolines.append(_BEFORE_STEP(before))
        self.lib.moe_edge_server_set_before_step(self.handle, self._trampolines[-1], None)

    def set_before_prompt(self, function: Callable[[int, list[int]], None]) -> None:
        """Set a function that is called before a request's prompt is read. Call this before `run`.

        The function is called for each sequence of the request, with the tokens of its prompt. The
        list is empty if the tokens are not known. The function runs on the request's thread, and
        must not raise.
        """

        @interrupts.called_from_c
        def before(_user: int | None, sequence: int, tokens: Any, n_tokens: int) -> None:
            function(sequence, tokens[:n_tokens])

        self._trampolines.append(_BEFORE_PROMPT(before))
        self.lib.moe_edge_server_set_before_prompt(self.handle, self._trampolines[-1], None)

    def keep_notes(
        self,
        save: Callable[[int], bytes | None],
        restore: Callable[[int, bytes], None],
    ) -> None:
        """Set functions that save and restore data of each sequence, such as the state of a policy.

        - save: returns the current data of a sequence as bytes, or None. The server calls it at
          some token positions, such as the start of an answer.
        - restore: gets a sequence and the bytes that `save` returned at a token position. The
          server calls it when it truncates the sequence to this position.

        Call this before `run`. Both functions run on the thread of `run`. Their exceptions are
        stored in `error`.
        """
        notes: dict[int, bytes] = {}
        numbers = count()

        @interrupts.called_from_c
        def note(_user: int | None, sequence: int) -> int:
            try:
                state = save(sequence)
            except Exception as error:  # noqa: BLE001 - exceptions cannot pass through C
                self.error = error
                return -1
            if state is None:
                return -1
            number = next(numbers)
            notes[number] = state
            return number

        @interrupts.called_from_c
        def recall(_user: int | None, sequence: int, number: int) -> None:
            try:
                restore(sequence, notes[number])
            except Exception as error:  # noqa: BLE001 - exceptions cannot pass through C
                self.error = error

        @interrupts.called_from_c
        def drop(_user: int | None, number: int) -> None:
            notes.pop(number, None)

        made = CNotes(_NOTE(note), _RECALL(recall), _DROP(drop), None)
        self._trampolines.append(made)
        self.lib.moe_edge_server_set_notes(self.handle, ctypes.byref(made))

    @property
    def handle(self) -> int:
        """The address of the C object. Raises NativeError after `close`."""
        if self._handle is None:
            raise NativeError("the server is closed")
        return self._handle

    def run(self) -> None:
        """Answer requests until `stop` is called. All steps are computed on the calling thread."""
        self.lib.moe_edge_server_run(self.handle)

    def keep_prompts(self, n_bytes: int) -> int:
        """Limit the size of the prompt cache to n_bytes, and return its size after that, in bytes.

        The prompt cache holds copies of earlier conversations. If they exceed the limit, the least
        recently used copies are dropped. Call this between two steps, on the thread that executes
        the method `run`.
        """
        return int(self.lib.moe_edge_server_keep_prompts(self.handle, n_bytes))

    # The following methods act on a sequence between two steps of `run`, after its last request has
    # finished decoding. After `run` has returned and all requests are closed, they act at once. Do
    # not call them on the thread that is in `run`.

    def settle(self) -> None:
        """Block until all finished and cancelled requests have stopped computing."""
        self.lib.moe_edge_server_settle(self.handle)

    def forget(self, sequence: int) -> bool:
        """Remove all tokens from a sequence. Returns False if the server is shutting down.

        The thread of `run` does this between two steps. If no request is decoding on any sequence,
        this thread is idle after the call. The caller may then use the llama_context directly,
        until it submits the next request.
        """
        return int(self.lib.moe_edge_server_forget(self.handle, sequence)) == 0

    def tokens(self, sequence: int) -> list[int]:
        """Return the tokens that a sequence holds; empty during shutdown."""
        found = (ctypes.c_int32 * _MANY_TOKENS)()
        while (n := self._tokens_into(sequence, found)) > len(found):
            found = (ctypes.c_int32 * n)()
        return found[: max(0, n)]

    def _tokens_into(self, sequence: int, found: ctypes.Array[ctypes.c_int32]) -> int:
        return int(self.lib.moe_edge_server_tokens(self.handle, sequence, found, len(found)))

    def match(self, sequence: int, prompt: Sequence[int]) -> tuple[int, bool]:
        """Return (number of reusable prompt tokens, whether another conversation is dropped).

        Reusable tokens need not be computed, because the sequence or a copy of an earlier
        conversation in memory holds them. The second value is True if computing the prompt in this
        sequence would drop tokens of another conversation.
        """
        is_another = ctypes.c_int()
        spared = self.lib.moe_edge_server_match(
            self.handle, sequence, _array(prompt), len(prompt), ctypes.byref(is_another)
        )
        return max(0, int(spared)), bool(is_another.value)

    def reusable(self, sequence: int, prompt: Sequence[int]) -> int:
        """Return how many tokens of a prompt need not be computed.

        The sequence, or a copy of an earlier conversation in memory, already holds them.
        """
        return self.match(sequence, prompt)[0]

    def as_held(self, prompt: Sequence[int], held: Sequence[int]) -> list[int]:
        """Return `prompt` with the tokens of `held` in the part where both have the same text.

        held: the tokens of a sequence. A text can have several tokenizations, and the KV cells of
        the sequence can only be reused for equal tokens.

        Control tokens divide both texts into pieces. Up to the first piece with another text, the
        tokens of `held` replace those of `prompt`. If the last piece of `held` is only the
        beginning of a piece of `prompt`, the rest of that piece is tokenized again. All later
        tokens of `prompt`, and the text as a whole, stay the same.

        Safe on any thread.
        """
        given, known = _array(prompt), _array(held)
        made = (ctypes.c_int32 * (len(prompt) + len(held)))()
        while True:
            n = self.lib.moe_edge_server_as_held(
                self.handle, given, len(given), known, len(known), made, len(made)
            )
            if n <= len(made):
                return made[:n]
            made = (ctypes.c_int32 * n)()

    def save(self, sequence: int, path: Path) -> tuple[int, int, list[FileMark]]:
        """Save a sequence to a file: its tokens, its state and its checkpoints.

        A checkpoint is a position to which the sequence can be truncated later, with the model's
        state at this position. The result has three items:

        - the bytes that the tokens and the state take in the file, without the checkpoints. This is
          0 if saving failed.
        - the number of tokens.
        - a list with the place of each checkpoint in the file, as a FileMark.
        """
        n_tokens, n_marks = ctypes.c_int32(), ctypes.c_int32(_MOST_MARKS)
        marks = (CMark * _MOST_MARKS)()
        done = self.lib.moe_edge_server_save(
            self.handle,
            sequence,
            os.fsencode(path),
            ctypes.byref(n_tokens),
            marks,
            ctypes.byref(n_marks),
        )
        found = [
            FileMark(each.offset, each.n_bytes, each.n_tokens, each.pos_min, each.pos_max)
            for each in marks[: n_marks.value]
        ]
        return max(0, int(done)), n_tokens.value, found

    def restore(self, sequence: int, path: Path, marks: Sequence[FileMark] = ()) -> bool:
        """Replace the contents of a sequence with those of a file.

        Returns False on failure; the sequence is then empty. marks: the checkpoints in the file. A
        checkpoint is a position to which the sequence can be truncated, with the model's state at
        this position. If there are more checkpoints than the server can keep, only the latest are
        restored.
        """
        given = (CMark * len(marks))(*(CMark(*each) for each in marks))
        done = self.lib.moe_edge_server_restore(
            self.handle, sequence, os.fsencode(path), given, len(marks)
        )
        return int(done) == 0

    def look(self, sequence: int) -> Ending:
        """Return the number of tokens in a sequence, and how its last answer ended.

        The result is an Ending, which says whether a stop word or a limit ended the answer.
        """
        at_context = ctypes.c_int()
        stop = self.lib.moe_edge_server_ending(self.handle, sequence, ctypes.byref(at_context))
        n = self._tokens_into(sequence, (ctypes.c_int32 * 0)())
        return Ending(max(0, n), _STOPS[stop], bool(at_context.value))

    def stop(self) -> None:
        """Cancel the running step and all requests, and make `run` return. Safe on any thread."""
        if self._handle is not None:
            self.lib.moe_edge_server_stop(self._handle)

    def request(self, route: str, body: bytes, sequences: Sequence[int] = ()) -> NativeRequest:
        """Return a new request, which does not run yet.

        route, body: path and body of the HTTP request. sequences: numbers of the sequences that the
        request uses; if it is empty, llama.cpp chooses them. Raises NativeError for an unknown
        route, and if memory is short.
        """
        given = (ctypes.c_int32 * len(sequences))(*sequences)
        handle = self.lib.moe_edge_request_create(
            self.handle, route.encode(), body, len(body), given, len(sequences)
        )
        if not handle:
            raise NativeError(
                f"the request to {route} cannot be started: either moe-edge does not support this "
                "path of llama.cpp's server, or main memory is full. Use another path, or end "
                "other programs to free memory"
            )
        return NativeRequest(self.lib, handle, self.note)

    def close(self) -> None:
        """Free the server, after `run` has returned and all requests are closed.

        Safe to call twice.
        """
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self.lib.moe_edge_server_free(handle)


class NativeRequest:
    """A request to llama.cpp's server core, and its answer.

    One thread calls `run`. A second thread may call `take` to get the answer meanwhile. status: the
    HTTP status. is_stream: whether the answer is a stream of events. Both values are valid after
    `take` has returned text.
    """

    def __init__(self, lib: Any, handle: int, note: Callable[[str], None]) -> None:
        self._lib, self._note = lib, note
        self._handle: int | None = handle
        self._closing = threading.Lock()
        self._rest = b""
        self._token_times: list[int] = []
        self.status = 0
        self.is_stream = False

    def run(self, ready: int = -1) -> None:
        """Compute the whole answer, then close the request.

        Another thread calls `take` meanwhile to get the text. ready: the write end of a pipe, or
        -1. The other thread can wait at the read end until it should call `take`. This method
        writes a byte to `ready` in two cases:

        - The last call of `take` returned no text, and now there is text.
        - The answer has ended.

        Raises NativeError if memory is short, or if the other thread takes the text too slowly.
        """
        try:
            failed = self._lib.moe_edge_request_run(self._handle, ready)
            with self._closing:
                self._rest = self._take()
                self._token_times = self._take_times()
            sentence = self._lib.moe_edge_request_note(self._handle)
            if sentence is not None:
                self._note(sentence.decode("utf-8", "replace"))
            if failed:
                raise NativeError(_FAILURES[failed])
        finally:
            self.close()
            if ready >= 0:
                with suppress(BlockingIOError):  # the pipe is full, so the reader wakes up anyway
                    os.write(ready, b"\0")

    def take(self) -> tuple[bytes, bool]:
        """Return (text since the last call, whether the answer is complete).

        The text of a stream consists of whole events. Any other answer comes as one piece.
        """
        with self._closing:
            if self._handle is not None:
                return self._take(), False
            rest, self._rest = self._rest, b""
            return rest, True

    @property
    def n_left(self) -> int:
        """Number of bytes of the complete answer that `take` has not returned yet.

        The value is 0 while the answer is still being computed.
        """
        return len(self._rest)

    def _take(self) -> bytes:
        data, size, is_stream = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_int()
        self.status = self._lib.moe_edge_request_take(
            self._handle, ctypes.byref(data), ctypes.byref(size), ctypes.byref(is_stream)
        )
        self.is_stream = bool(is_stream.value)
        return ctypes.string_at(data.value or 0, size.value) if size.value else b""

    def token_times(self) -> list[int]:
        """Return the time of each token of the first answer, in microseconds after `run` began.

        The time of the first token is the end of the prompt's last step. Call this after `run`.
        """
        return self._token_times

    def _take_times(self) -> list[int]:
        found = ctypes.POINTER(ctypes.c_int64)()
        n = self._lib.moe_edge_request_token_times(self._handle, ctypes.byref(found))
        return found[:n]

    def whole(self) -> tuple[int, bytes]:
        """Run the request, and return (HTTP status, complete answer)."""
        self.run()
        text, _ = self.take()
        return self.status, text

    def cancel(self) -> None:
        """Make the request end soon. Does nothing after `close`. Safe on any thread."""
        with self._closing:
            if self._handle is not None:
                self._lib.moe_edge_request_cancel(self._handle)

    def close(self) -> None:
        """Free the request. Do not call this while `run` is running. Safe to call twice."""
        with self._closing:
            handle, self._handle = self._handle, None
        if handle is not None:
            self._lib.moe_edge_request_free(handle)
