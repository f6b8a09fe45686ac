"""What a runtime needs for answers, beside the model: memory, and llama.cpp's server core."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gguf_tools.children import child
from orchestrator.config import Config
from orchestrator.errors import NativeError
from orchestrator.memory.footprint import PROMPT_MARKS
from orchestrator.native import ServerLibrary
from orchestrator.native.llama import Bindings

# What the server core takes for each answer that decodes at the same time. Measured with eight
# clients: 0.13 MiB for each.
ANSWER_BYTES = 2**19
# A stream ends if it is this far ahead of whoever reads it. At worst this is in memory six times:
# twice while it grows, twice where it was taken from, and for Python and a socket.
AHEAD_BYTES = 2**19
AHEAD_COPIES = 6
# For each token of the vocabulary: an entry in the list of candidates of each answer, and one in
# that of the probabilities that a request asks for (get_token_probabilities).
CANDIDATE_BYTES = 12
# A grammar keeps, for each token of the vocabulary that it refuses, its code points and its place
# in the lists of those that are left (llama_grammar_apply_impl).
GRAMMAR_TOKEN_BYTES = 256

_LOOK_S = 0.1
PREBUILT = "libmoe-edge-server.so"  # a wheel has it beside libllama
TOOL = Path(__file__).resolve().parents[2] / "patches" / "tool.py"


class Stopped(Exception):
    """The program was told to end while it loaded a model or computed."""


@dataclass(frozen=True)
class Answering:
    """How a runtime answers. None of it belongs to the model.

    parallel: answers that decode at the same time; each has a context of `Config.ctx` tokens.
    front_bytes: memory of the program around the runtime, such as HTTP and bodies of requests.
    scored: tokens of a prompt whose logits an evaluator may want at once. grammars: whether
    requests may bring a grammar or a JSON schema. name: of the model, for clients. chat_template:
    used instead of the model's own. threads: how the names of the runtime's threads begin.
    is_stopping: whether to give up while the model is opened.
    """

    parallel: int = 1
    front_bytes: int = 0
    scored: int = 0
    grammars: bool = False
    name: str = ""
    chat_template: str | None = None
    threads: str = ""
    is_stopping: Callable[[], bool] = lambda: False

    def config(self, config: Config) -> Config:
        """Return a model's config with the memory and the sequences that the answers need."""
        each = ANSWER_BYTES + AHEAD_COPIES * AHEAD_BYTES
        of_vocabulary = CANDIDATE_BYTES * (self.parallel + 1)
        return config.with_changes(
            ctx=config.ctx and config.ctx * self.parallel,
            sequences=self.parallel - 1,
            scored=self.scored,
            beside=self.front_bytes + each * self.parallel,
            beside_token=of_vocabulary + GRAMMAR_TOKEN_BYTES * self.grammars,
            conversations=True,
        )


def kept_prompts(n_bytes: int, part: int, parallel: int) -> tuple[int, int]:
    """Divide n_bytes of memory for prompts that were read before.

    part: bytes of a checkpoint of one conversation, 0 for a model whose memory can be cut at any
    token. Returns (MiB for copies of conversations, checkpoints of each running conversation).
    """
    places = min(PROMPT_MARKS, n_bytes // 2 // (part * parallel)) if part else 0
    return (n_bytes - places * part * parallel) >> 20, places


def server_library(
    bindings: Bindings, is_stopping: Callable[[], bool] = lambda: False
) -> ServerLibrary:
    """Return llama.cpp's server core for the loaded llama.cpp.

    `make build` compiles it and a wheel contains it; in a checkout in which it is missing it is
    compiled now, with its progress on stderr. Raises NativeError if it cannot be had, and Stopped
    if is_stopping() becomes true while it is compiled.
    """
    package = Path(bindings.api.__file__).parent
    prebuilt = package / "lib" / PREBUILT
    if prebuilt.is_file():
        return ServerLibrary(prebuilt)
    if not TOOL.is_file():
        raise NativeError(
            f"llama.cpp's server core is missing, and {TOOL}, which compiles it, is not there: "
            f"install the wheel of moe-edge again, or use a checkout"
        )
    command = [sys.executable, str(TOOL), "server", str(package)]
    # The compilers of an interrupted build would go on for minutes.
    with child(command, with_its_own=True, stdout=subprocess.PIPE) as process:
        said = None
        while said is None:
            with suppress(subprocess.TimeoutExpired):
                said, _ = process.communicate(timeout=_LOOK_S)
            if is_stopping():
                raise Stopped
    if process.returncode != 0:
        raise NativeError("llama.cpp's server core cannot be compiled: the lines above say why")
    return ServerLibrary(Path(said.strip().splitlines()[-1]))
