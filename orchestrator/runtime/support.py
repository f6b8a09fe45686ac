"""Finds out how a model can run: with managed experts, on llama.cpp's own path, or not at all.

llama.cpp loads the header without data and makes a context. Its graphs show whether only our
executor reads the experts. llama.cpp may abort its process over a header that it does not expect,
so a child process does this.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import re
import signal
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import EMBEDDINGS
from orchestrator.errors import MoeEdgeError, NativeError
from orchestrator.native.llama import ABORT_REASON, ABORTED

MANAGED, PLAIN, NOT = "managed", "plain", "not"
_N_CTX = 256
_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Support:
    """Whether and how a model can run.

    runs: MANAGED if an expert store can hold the model's experts, PLAIN if only llama.cpp's own
    path works, or NOT if the model cannot run. reason: why `runs` is not MANAGED; empty for
    MANAGED.
    """

    runs: str
    reason: str

    @property
    def sentence(self) -> str:
        """A sentence for the user that says how the model can run, with the reason."""
        if self.runs == MANAGED:
            return "llama.cpp loads the model, and moe-edge can manage its experts"
        if self.runs == PLAIN:
            return (
                f"llama.cpp loads the model, but moe-edge cannot manage its experts: {self.reason}"
            )
        return f"the model cannot run: {self.reason}"


class ChildAborted(Exception):
    """Raised by `ask_child` if llama.cpp aborted the child process.

    The message of the exception is the reason that llama.cpp printed.
    """


def ask_child(question: Callable[..., Any], *args: Any) -> Any:
    """Call question(*args) in a child process, and return the result.

    The child process protects the caller, because llama.cpp aborts its process for some files.
    Raises ChildAborted if llama.cpp aborts or crashes the child process. Returns None if `question`
    raises an exception or takes too long, or if the child process is killed.
    """
    # A fork has its modules loaded already: a new process would take most of a second to start.
    # This process does not load the library: if it found a GPU, the fork could not use it.
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    with reader, tempfile.TemporaryFile() as said:
        child = context.Process(
            target=_answer, args=(question, args, writer, said.fileno()), daemon=True
        )
        child.start()
        writer.close()
        try:
            child.join(_TIMEOUT_S)
        finally:
            child.kill()
            child.join()
        status = child.exitcode or 0
        if status == 0:
            return reader.recv()
        if (status > 0 and status != ABORTED) or status == -signal.SIGKILL:
            return None
        said.seek(0)
        text = said.read().decode("utf-8", "replace").strip()
    aborted = re.search(ABORT_REASON, text)
    reason = aborted[1] if aborted else (text.splitlines() or ["no message"])[-1]
    raise ChildAborted(reason[:200])


def _answer(
    question: Callable[..., Any], args: tuple[Any, ...], answer: Connection, stderr: int
) -> None:
    """Call a function and send its result. This runs in the child process.

    stderr: file descriptor that receives the messages of llama.cpp.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    faulthandler.disable()
    os.dup2(stderr, 2)
    answer.send(question(*args))


def support_of(path: Path, vocabulary: bool = True) -> Support | None:
    """Return whether and how moe-edge can run the model in a file, found out in a child process.

    Return None if this is unknown, for example because moe-edge's build of llama.cpp is not
    installed.

    vocabulary: whether the check also loads the vocabulary. The check is faster without the
    vocabulary.
    """
    try:
        found: Support | None = ask_child(_found, path, vocabulary)
        return found
    except ChildAborted as error:
        return Support(NOT, f"llama.cpp aborts when it reads the header of the file ({error})")


def _without_vocabulary(model: ExpertModel) -> dict[str, int | str]:
    """Return metadata that makes llama.cpp skip the model's vocabulary, and states its size."""
    for part in model.parts:
        if EMBEDDINGS in part.tensors:
            n_tokens = part.tensors[EMBEDDINGS].shape[-1]
            size = f"{model.hparams.arch}.vocab_size"
            return {"tokenizer.ggml.model": "none", size: n_tokens}
    return {}


def _found(path: Path, vocabulary: bool) -> Support | None:
    from orchestrator.native.llama import Bindings

    try:
        Bindings.load().library()
    except NativeError:
        return None
    for runs, managed in ((NOT, False), (PLAIN, True)):
        try:
            with nullcontext() if vocabulary else ExpertModel.open(path) as model:
                try_load(path, managed, model)
        except MoeEdgeError as error:
            return Support(runs, str(error).removeprefix(f"{path}: "))
    return Support(MANAGED, "")


def try_load(path: Path, managed: bool, known: ExpertModel | None = None) -> None:
    """Check that llama.cpp can load a model and make a context. The weights are not read.

    managed: also check that an expert store can manage the experts. known: the layout of the file,
    if it was already read. The check is faster with it, because it then skips the vocabulary.
    Raises NativeError with the reason if the check fails.
    """
    from orchestrator.native.llama import Bindings, LlamaContext, Model

    bindings = Bindings.load()
    model = Model(
        bindings,
        path,
        managed=managed,
        use_extra_bufts=False,
        use_mmap=False,
        no_data=True,
        overrides=_without_vocabulary(known) if known else {},
    )
    try:
        LlamaContext(
            bindings,
            model,
            n_ctx=_N_CTX,
            n_ubatch=_N_CTX // 8,
            threads=1,
            outputs=1,
            flash_attention=True,
        ).close()
    finally:
        model.close()
