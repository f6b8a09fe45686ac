"""The model that a server answers with, and the memory that the server needs beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from orchestrator.config import Config
from orchestrator.errors import ConfigError
from orchestrator.policy import policy_settings
from orchestrator.runtime.answering import Answering
from orchestrator.runtime.runtime import Runtime
from orchestrator.serve.admission import PROBS_BYTES, UNREAD_BYTES, bodies_bytes
from orchestrator.serve.bodies import Words
from orchestrator.serve.settings import ServeSettings
from orchestrator.settings import Settings

# What HTTP and the rest of the process take beside what a chat takes. Measured with eight clients:
# 12.3 MiB.
PROCESS_BYTES = 15 * 2**20
# A prompt is scored in parts of at most so many tokens. The memory for a grammar's look at each
# token of the vocabulary is free then, since nothing else decodes: the probabilities of one row are
# computed in it.
SCORED_TOKENS = 32
# How many of the likeliest tokens a score may come with: OpenAI's limit for completions. Each
# scored token takes its id, its offset, these, and their log-probabilities.
MOST_LIKELIEST = 5
SCORE_BYTES = 4 + 12 * (1 + MOST_LIKELIEST)
SCORED_MOST = 16384
# Sentences about requests that are remembered, so that each is in the log once.
MOST_NOTED = 256


def most_scored(config: Config) -> int:
    """Return how many tokens a request may have scored. config: the model's, for one
    conversation."""
    return max(SCORED_MOST, config.ctx or 0)


def answering(config: Config, settings: ServeSettings, words: Words, threads: str) -> Answering:
    """Return how a server's runtime answers, with the memory for HTTP, bodies and what is unread.

    threads: how the names of the runtime's threads begin. Raises as chat_template_text.
    """
    parallel = settings.parallel
    longest_bytes = settings.most_body_bytes(config.ctx)
    return Answering(
        parallel=parallel,
        front_bytes=PROCESS_BYTES
        + bodies_bytes(longest_bytes, parallel, words.body_factor)
        + UNREAD_BYTES
        + PROBS_BYTES * parallel
        + SCORE_BYTES * most_scored(config),
        scored=SCORED_TOKENS,
        grammars=True,
        name=settings.alias or "",
        chat_template=settings.chat_template_text(),
        threads=threads,
    )


class Served:
    """A loaded model, and what requests to it may have.

    runtime: computes. about: what is known of the model, as it was loaded. max_tokens: of an answer
    to a request without a limit. most_body_bytes: of a request. most_scored: tokens of a request's
    prompts that are scored.
    """

    def __init__(
        self,
        runtime: Runtime,
        settings: ServeSettings,
        words: Words,
        note: Callable[[str], None],
    ) -> None:
        """note: gets sentences for the log."""
        config = runtime.config
        self.runtime, self.about = runtime, runtime.about
        self.parallel, self.max_tokens = settings.parallel, config.max_tokens
        self.most_body_bytes = settings.most_body_bytes(config.ctx)
        self.body_factor = words.body_factor
        self.most_scored = most_scored(config)
        self._words, self._note = words, note
        self._noted: set[str] = set()

    def count_tokens(self, text: str) -> tuple[int, int]:
        """As Words.count_tokens."""
        return self._words.count_tokens(text, self.runtime.vocabulary)

    def note_once(self, sentence: str) -> None:
        """Write a sentence to the log, unless it is one of those that were written last."""
        if sentence not in self._noted:
            if len(self._noted) >= MOST_NOTED:
                self._noted.clear()
            self._noted.add(sentence)
            self._note(sentence)

    def settings_for(self, changes: Mapping[str, Any]) -> Settings | None:
        """Return the settings of the policy for one request; None if no expert is managed.

        changes: other values of live settings, for a request that runs alone. Raises ConfigError
        for a setting that cannot be changed.
        """
        usual = self.about.settings
        if not changes:
            return usual
        if usual is None:
            raise ConfigError("the plain path has no policy: leave moe_edge out")
        if self.parallel > 1:
            raise ConfigError("settings of one request are for --parallel 1: here steps are shared")
        known, own = policy_settings(), usual.declared()
        for name in changes:
            if name not in known or not known[name].live:
                raise ConfigError(f"'{name}' is no setting that a request may change")
            if name not in own:
                raise ConfigError(f"the policy {self.about.policy} has no setting '{name}'")
        return replace(usual, **changes)
