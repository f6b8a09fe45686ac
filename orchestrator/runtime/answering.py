"""Memory that a runtime needs to answer requests, and a check of grammars and schemas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.config import Config
from orchestrator.native import ServerLibrary
from orchestrator.plan.footprint import PROMPT_MARKS
from orchestrator.plan.records import Needs, PlanRequest
from orchestrator.runtime.encoder import Encoder, encoder_of

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
# A grammar keeps the code points of each token of the vocabulary that it refuses, and the position
# of the token in the lists of candidates (llama_grammar_apply_impl).
GRAMMAR_TOKEN_BYTES = 256

# Memory for reading the images of a request, in bytes for each character of their base64 text.
# Python and llama.cpp copy the text when they parse JSON, write it, and decode the images. The
# second number is for each byte of the files, because three bytes have four characters.
IMAGE_FACTOR = 8
IMAGE_FILE_FACTOR = -(-4 * IMAGE_FACTOR // 3)

_PLAIN_TEMPLATE = "{{ messages[0].content }}"


@dataclass(frozen=True)
class Answering:
    """Settings of a runtime that answers requests. They do not depend on the model.

    parallel: maximum number of answers that decode at the same time. Each has a context of
    `Config.ctx` tokens. front_bytes: memory that the rest of the program needs, for example for
    HTTP. scored: maximum number of prompt tokens whose logits are in memory at once while a prompt
    is scored. grammars: whether requests may contain a grammar or a JSON schema. name: name of the
    model for clients. chat_template: replaces the chat template of the model. threads: prefix of
    the names of the runtime's threads. reads_ahead: whether likely experts are read into free slots
    while no request runs. images: whether requests may contain images, if the model has an image
    encoder.
    """

    parallel: int = 1
    front_bytes: int = 0
    scored: int = 0
    grammars: bool = False
    name: str = ""
    chat_template: str | None = None
    threads: str = ""
    reads_ahead: bool = True
    images: bool = False

    def encoder(self, config: Config) -> Encoder | None:
        """Return the image encoder that is loaded with the model, or None.

        Raises ConfigError if the file of --mmproj is not an image encoder.
        """
        return encoder_of(config) if self.images else None

    def request(self, config: Config) -> PlanRequest:
        """Return a PlanRequest for a model that answers requests with these settings.

        The planner uses it to reserve memory for the answers. config: the settings of the model.
        Its context length `ctx` is for one answer. The planned context is `parallel` times as long.
        """
        each = ANSWER_BYTES + AHEAD_COPIES * AHEAD_BYTES
        of_vocabulary = CANDIDATE_BYTES * (self.parallel + 1)
        encoder, encoder_bytes, image_tokens = self.encoder(config), 0, 0
        if encoder is not None:
            each += encoder.limits.request_bytes
            # Servers reserve the memory of bodies themselves, in front_bytes.
            each += 0 if self.front_bytes else IMAGE_FILE_FACTOR * encoder.limits.file_bytes
            encoder_bytes, image_tokens = encoder.n_bytes, encoder.whole_tokens
        needs = Needs(
            sequences=self.parallel - 1,
            conversations=True,
            scored=self.scored,
            extra_bytes=self.front_bytes + encoder_bytes + each * self.parallel,
            extra_token_bytes=of_vocabulary + GRAMMAR_TOKEN_BYTES * self.grammars,
            image_tokens=image_tokens,
        )
        if config.ctx:
            config = config.with_changes(ctx=config.ctx * self.parallel)
        return PlanRequest(config, needs)


def kept_prompts(n_bytes: int, checkpoint_bytes: int, parallel: int) -> tuple[int, int]:
    """Divide memory between copies of earlier conversations and checkpoints of running ones.

    Returns (MiB for copies, number of checkpoints for each running conversation). n_bytes: the
    memory to divide. checkpoint_bytes: size of one checkpoint, or 0 if the model needs no
    checkpoints. parallel: number of running conversations.
    """
    each = checkpoint_bytes * parallel
    n_checkpoints = min(PROMPT_MARKS, n_bytes // 2 // each) if each else 0
    return (n_bytes - n_checkpoints * each) >> 20, n_checkpoints


def fault_of_constraint(library: ServerLibrary, fields: Mapping[str, Any]) -> str:
    """Return why llama.cpp cannot use a grammar or a JSON schema, or "" if it can.

    fields: contains the field `grammar` or `response_format` of a request. No model is needed.
    """
    request = {"messages": [{"role": "user", "content": ""}], **fields}
    (found,) = library.try_template(_PLAIN_TEMPLATE, [{"request": request, "answers": [""]}])
    for each in (found, *found.get("answers", ())):
        if "error" in each:
            return str(each["error"])
    return ""
