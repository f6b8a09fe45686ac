"""Needs of a runtime that answers requests: memory, and llama.cpp's server core."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.config import Config
from orchestrator.errors import NativeError
from orchestrator.native import ServerLibrary
from orchestrator.native.llama import Bindings
from orchestrator.plan.footprint import PROMPT_MARKS
from orchestrator.plan.records import Needs, PlanRequest

# Memory of the server core for each answer that decodes at the same time. Measured with eight
# clients: 0.13 MiB for each.
ANSWER_BYTES = 2**19
# A stream ends if it is this far ahead of its reader. At worst there are six copies of these bytes:
# two while the text grows, two after it is taken, one in Python and one in a socket.
AHEAD_BYTES = 2**19
AHEAD_COPIES = 6
# For each token of the vocabulary: an entry in the list of candidates of each answer, and one in
# that of the probabilities that a request asks for (get_token_probabilities).
CANDIDATE_BYTES = 12
# A grammar keeps, for each token of the vocabulary that it refuses, its code points and its place
# in the lists of those that are left (llama_grammar_apply_impl).
GRAMMAR_TOKEN_BYTES = 256

_LIBRARY = "libmoe-edge-server.so"
_PLAIN_TEMPLATE = "{{ messages[0].content }}"


@dataclass(frozen=True)
class Answering:
    """How a runtime answers. None of it belongs to the model.

    parallel: answers that decode at the same time; each has a context of `Config.ctx` tokens.
    front_bytes: memory of the program around the runtime, such as HTTP and bodies of requests.
    scored: tokens of a prompt whose logits an evaluator may want at once. grammars: whether
    requests may bring a grammar or a JSON schema. name: of the model, for clients. chat_template:
    used instead of the model's own. threads: how the names of the runtime's threads begin.
    reads_ahead: whether experts that are likely to be used are read into free slots while nothing
    is asked for.
    """

    parallel: int = 1
    front_bytes: int = 0
    scored: int = 0
    grammars: bool = False
    name: str = ""
    chat_template: str | None = None
    threads: str = ""
    reads_ahead: bool = True

    def request(self, config: Config) -> PlanRequest:
        """Return the request for a model's plan, with a context for all answers and the memory that
        they need.
        """
        each = ANSWER_BYTES + AHEAD_COPIES * AHEAD_BYTES
        of_vocabulary = CANDIDATE_BYTES * (self.parallel + 1)
        needs = Needs(
            sequences=self.parallel - 1,
            conversations=True,
            scored=self.scored,
            extra_bytes=self.front_bytes + each * self.parallel,
            extra_token_bytes=of_vocabulary + GRAMMAR_TOKEN_BYTES * self.grammars,
        )
        if config.ctx:
            config = config.with_changes(ctx=config.ctx * self.parallel)
        return PlanRequest(config, needs)


def kept_prompts(n_bytes: int, part: int, parallel: int) -> tuple[int, int]:
    """Divide n_bytes of memory for prompts that were read before.

    part: bytes of a checkpoint of one conversation, 0 for a model whose memory can be cut at any
    token. Returns (MiB for copies of conversations, checkpoints of each running conversation).
    """
    places = min(PROMPT_MARKS, n_bytes // 2 // (part * parallel)) if part else 0
    return (n_bytes - places * part * parallel) >> 20, places


def server_library(bindings: Bindings) -> ServerLibrary:
    """Return llama.cpp's server core, from the folder of the loaded libllama.

    Raises NativeError if it is missing or was made for another version of moe-edge.
    """
    path = Path(bindings.api.__file__).parent / "lib" / _LIBRARY
    if not path.is_file():
        raise NativeError(f"{path} is missing: run `make build`, or install moe-edge's wheel again")
    return ServerLibrary(path)


def fault_of_constraint(library: ServerLibrary, fields: Mapping[str, Any]) -> str:
    """Return why the core cannot use a grammar or a JSON schema, in a sentence; empty if it can.

    fields: `grammar` or `response_format`, as a request has them. No model is needed.
    """
    request = {"messages": [{"role": "user", "content": ""}], **fields}
    (found,) = library.try_template(_PLAIN_TEMPLATE, [{"request": request, "answers": [""]}])
    for each in (found, *found.get("answers", ())):
        if "error" in each:
            return str(each["error"])
    return ""
