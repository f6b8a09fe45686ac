"""Messages into the text that a model was trained to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
