"""Between texts and tokens: a conversation as the model's template writes it, the logarithms of
probability behind the logits, and the texts that end an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from orchestrator.errors import MoeEdgeError

# ChatML, for models that carry no template of their own.
FALLBACK = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class ChatTemplate:
    """A Jinja chat template, sandboxed, as upstream's bindings run it."""

    def __init__(self, source: str | None, bos: str, eos: str) -> None:
        """Raises MoeEdgeError for a template that is not valid Jinja."""
        self.source = source or FALLBACK
        self._formatter: Any = None
        self._tokens = (bos, eos)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt up to the place where the assistant's answer starts."""
        from jinja2 import TemplateError
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        bos, eos = self._tokens
        try:
            if self._formatter is None:
                self._formatter = Jinja2ChatFormatter(self.source, eos_token=eos, bos_token=bos)
            return str(self._formatter(messages=[dict(each) for each in messages]).prompt)
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise MoeEdgeError(f"the model's chat template failed: {error}") from error


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities float64 [..., n_vocab] of logits of the same shape."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


class StopTexts:
    """Finds where a streamed text has to end. found: whether one of the stop texts came."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._held = ""
        self.found = False

    def feed(self, piece: str) -> str:
        """What may be shown once `piece` came: all but what could begin a stop text, or, where
        one came, all before it."""
        text = self._held + piece
        self._held = ""
        ends = [at for at in (text.find(each) for each in self._stop) if at >= 0]
        if ends:
            self.found = True
            return text[: min(ends)]
        most = max((len(each) for each in self._stop), default=1) - 1
        for length in range(min(most, len(text)), 0, -1):
            if any(each.startswith(text[-length:]) for each in self._stop):
                self._held = text[-length:]
                return text[:-length]
        return text

    def rest(self) -> str:
        """What was held back and began no stop text after all."""
        text, self._held = self._held, ""
        return text
