"""Between texts and tokens: a conversation as the model's template writes it, the logarithms of
probability behind the logits, and the texts that end an answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
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
    """A Jinja chat template, in the sandbox and with the extensions that transformers has."""

    def __init__(self, source: str | None, bos: str, eos: str) -> None:
        """Raises MoeEdgeError for a template that is not valid Jinja."""
        self.source = source or FALLBACK
        self._template: Any = None
        self._values = {"bos_token": bos, "eos_token": eos}

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt up to the place where the assistant's answer starts."""
        from jinja2 import TemplateError

        try:
            if self._template is None:
                self._template = _compiled(self.source)
            said = [dict(each) for each in messages]
            return str(
                self._template.render(messages=said, add_generation_prompt=True, **self._values)
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise MoeEdgeError(f"the model's chat template failed: {error}") from error


def _compiled(source: str) -> Any:
    """A jinja2.Template with what the templates of models expect to be there."""
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what a model is trained on, and changes no text."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

        def parse(self, parser: Any) -> Any:
            parser.stream.skip(1)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(reason: str) -> None:
        raise ValueError(reason)

    def as_json(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = as_json
    environment.globals |= {
        **{"functions": None, "function_call": None, "tools": None, "tool_choice": None},
        **{"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)},
    }
    return environment.from_string(source)


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
