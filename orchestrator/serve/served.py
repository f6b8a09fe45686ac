"""The model that a server has loaded, its limits for requests, and the server's own memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from orchestrator.config import Config
from orchestrator.errors import ConfigError
from orchestrator.policy import policy_settings
from orchestrator.runtime.answering import Answering
from orchestrator.runtime.encoder import encoder_of
from orchestrator.runtime.image_files import ImageLimits
from orchestrator.runtime.overflow import PromptLengths
from orchestrator.runtime.runtime import Runtime
from orchestrator.serve.admission import PROBS_BYTES, UNREAD_BYTES, bodies_bytes
from orchestrator.serve.bodies import Words
from orchestrator.serve.settings import ServeSettings
from orchestrator.settings import Settings

# Memory of the HTTP server in addition to that of a chat. Measured with eight clients: 12.3 MiB.
PROCESS_BYTES = 15 * 2**20
# A prompt is scored in parts of at most this many tokens. No grammar runs meanwhile, so the
# probabilities of a row are computed in the memory that is reserved for checking the vocabulary
# against a grammar.
SCORED_TOKENS = 32
# The most alternatives for each scored token, OpenAI's limit for completions. A scored token takes
# its id, its offset, and an id and a log-probability for itself and each alternative.
MOST_LIKELIEST = 5
SCORE_BYTES = 4 + 12 * (1 + MOST_LIKELIEST)
SCORED_MOST = 16384
# How many log messages about requests are remembered, so that each is logged once.
MOST_NOTED = 256


def most_scored(config: Config) -> int:
    """Return the maximum number of prompt tokens whose log-probabilities one request may ask for.

    The number is the context length of one sequence (`config.ctx`) or SCORED_MOST, whichever is
    larger. It may exceed the context, because a request can have several prompts.
    """
    return max(SCORED_MOST, config.ctx or 0)


def answering(config: Config, settings: ServeSettings, words: Words, threads: str) -> Answering:
    """Return the settings (Answering) with which the server's Runtime answers requests.

    They combine options of `moe-edge serve` with the memory to reserve for the server itself.
    `words` estimates the memory for tokenizing a request's body. `threads` is the prefix of the
    names of the runtime's threads. Raises ConfigError or TextFileError if the file of
    --chat-template or --mmproj cannot be used.
    """
    encoder = encoder_of(config)
    return Answering(
        parallel=settings.parallel,
        front_bytes=front_bytes(
            config, settings, words, encoder.limits if encoder is not None else None
        ),
        scored=SCORED_TOKENS,
        grammars=True,
        images=True,
        name=settings.alias or "",
        chat_template=settings.chat_template_text(),
        threads=threads,
    )


def front_bytes(
    config: Config, settings: ServeSettings, words: Words, images: ImageLimits | None
) -> int:
    """Return the memory that the server needs in addition to the loaded model, in bytes.

    It is for HTTP, the bodies of requests, token probabilities, unread answers, and the images of
    one request that is being checked before it may run. `words` estimates the memory for tokenizing
    a body. `images` are the limits of the model for images, or None if the model takes no images.
    """
    parallel = settings.parallel
    longest_bytes, image_bytes = body_limits(config, settings, images)
    return (
        PROCESS_BYTES
        + bodies_bytes(longest_bytes, parallel, words.body_factor, image_bytes)
        + UNREAD_BYTES
        + PROBS_BYTES * parallel
        + SCORE_BYTES * most_scored(config)
        + (images.request_bytes if images is not None else 0)
    )


def body_limits(
    config: Config, settings: ServeSettings, images: ImageLimits | None
) -> tuple[int, int]:
    """Return (largest body of a request without its images, largest size of its images), in bytes.

    `images` are the limits of the model for images, or None if the model takes no images.
    """
    if images is None:
        return settings.most_body_bytes(config.ctx), 0
    return settings.most_with_images(config.ctx)


class Served:
    """The loaded model of a server, and the limits for requests to it.

    `runtime` computes the answers, and `about` describes the model. `max_tokens` is the maximum
    length of an answer if the request sets no limit. `most_body_bytes` is the longest allowed body
    without its images, and `most_image_bytes` the largest allowed length of its images. `images`
    are the limits for images, or None if the model takes none. `most_scored` limits the prompt
    tokens whose log-probabilities a request may ask for. `lengths` remembers the numbers of tokens
    of recent prompts.
    """

    def __init__(
        self,
        runtime: Runtime,
        settings: ServeSettings,
        words: Words,
        note: Callable[[str], None],
        trusted_bytes: int = 0,
    ) -> None:
        """Determine the limits for requests to a loaded model.

        `note` gets messages for the log. `trusted_bytes` is 0 in a server. A program that sends
        only its own requests sets it to the length of its longest request, which replaces the
        limits for clients.
        """
        config = runtime.config
        self.runtime, self.about = runtime, runtime.about
        self.parallel, self.max_tokens = settings.parallel, config.max_tokens
        self.images = runtime.images
        limits = body_limits(config, settings, self.images)
        self.most_body_bytes, self.most_image_bytes = (
            (trusted_bytes, 0) if trusted_bytes else limits
        )
        if self.images is not None and not trusted_bytes:
            most = 3 * self.most_image_bytes // 4  # base64 has four characters for three bytes
            self.images = replace(self.images, file_bytes=min(self.images.file_bytes, most))
        self.body_factor = words.body_factor
        self.most_scored = most_scored(config)
        self.lengths = PromptLengths()
        self._words, self._note = words, note
        self._noted: set[str] = set()

    def count_tokens(self, text: str) -> tuple[int, int]:
        """Return (approximate number of tokens, length of the longest word) of a text.

        The memory for tokenizing is estimated from these numbers. For a tokenizer that does not
        split texts into words, the result is (0, 0), and the memory is estimated only from the
        length of the text.
        """
        return self._words.count_tokens(text, self.runtime.vocabulary)

    def note_once(self, sentence: str) -> None:
        """Log a message, unless it was logged recently."""
        if sentence not in self._noted:
            if len(self._noted) >= MOST_NOTED:
                self._noted.clear()
            self._noted.add(sentence)
            self._note(sentence)

    def settings_for(self, changes: Mapping[str, Any]) -> Settings | None:
        """Return the policy settings for one request, or None with `--policy plain`.

        `changes` are the settings that this request replaces. Raises ConfigError for a setting that
        a request may not change. A server that computes several requests together allows no
        changes.
        """
        usual = self.about.settings
        if not changes:
            return usual
        if usual is None:
            raise ConfigError(
                "moe_edge: --policy plain has no settings: leave the field moe_edge out"
            )
        if self.parallel > 1:
            raise ConfigError(
                "moe_edge: a request cannot change policy settings if the server computes several "
                "requests together: start the server with --parallel 1"
            )
        known, own = policy_settings(), usual.declared()
        for name in changes:
            if name not in known or not known[name].live:
                raise ConfigError(f"moe_edge: '{name}' is not a setting that a request may change")
            if name not in own:
                raise ConfigError(
                    f"moe_edge: the policy {self.about.policy} has no setting '{name}'"
                )
        return replace(usual, **changes)
