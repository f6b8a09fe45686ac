"""The settings of `moe-edge serve`, in addition to those of the model."""

from __future__ import annotations

import difflib
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf_tools.file.texts import read_text
from orchestrator.config import MOST_SEQUENCES, Config
from orchestrator.errors import ConfigError
from orchestrator.policy import policy_settings
from orchestrator.settings import FROM_0, FROM_1, MORE, SIZE, Setting, Settings, setting

# The default limit of a request's body: bytes for each token of the context, and a minimum. Prose
# has four to five bytes per token. BODY_FACTOR is the memory for reading a body.
BODY_BYTES, LEAST_BODY_BYTES = 16, 2**17
# The default limit of the images in a request's body: the length of their base64 text.
IMAGE_BYTES = 16 << 20

# Values of --overflow.
DROP, REFUSE = "drop", "refuse"

_MOST_KEY_BYTES = 1 << 20
# The native server refuses longer templates.
_MOST_TEMPLATE_BYTES = 512 << 10

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class ServeSettings(Settings):
    """The options of `moe-edge serve` for its address, access, queue and limits."""

    host: str = setting(
        "127.0.0.1",
        "Address to listen on. An address that other machines can reach requires an API key.",
    )
    port: int = setting(8080, "Port to listen on; 0 for a free one.", within=(0, 65535))
    parallel: int = setting(
        1,
        "Number of answers that decode together. Each has a context of --ctx tokens.",
        within=(1, MOST_SEQUENCES),
    )
    queue: int = setting(
        16,
        "Number of requests that may wait for their turn. Further requests are refused with "
        "status 429. Clients take turns.",
        within=FROM_0,
        group=MORE,
    )
    alias: str | None = setting(
        None,
        "Name of the model for clients.",
        shown="the file's name",
        group=MORE,
    )
    api_key: str | None = setting(
        None,
        "API key that every request has to send. Other users of this machine can see it in the "
        "process list.",
        metavar="KEY",
        group=MORE,
    )
    api_key_file: Path | None = setting(
        None, "File of API keys, one per line. Every request has to send one of them."
    )
    allow_host: str | None = setting(
        None,
        "Further names of this server that a Host header may have, such as the name of a "
        "proxy; separated by commas.",
        metavar="NAMES",
        group=MORE,
    )
    trusted_proxy: str | None = setting(
        None,
        "Addresses of proxies, separated by commas, whose X-Forwarded-For header is trusted to "
        "identify clients without an API key.",
        metavar="ADDRESSES",
        group=MORE,
    )
    cors_origin: str | None = setting(
        None,
        "Origin of web pages that may use this server, such as https://chat.example.org; * for "
        "any.",
        metavar="ORIGIN",
        group=MORE,
    )
    chat_template: Path | None = setting(
        None,
        "Jinja chat template to use instead of the model's own.",
        group=MORE,
    )
    body_limit: int | None = setting(
        None,
        "Maximum size of a request.",
        unit=SIZE,
        shown="16 bytes per token of --ctx, at least 128KiB; with --mmproj 16MiB more",
        group=MORE,
    )
    allow_model_change: bool = setting(
        False,
        "Let clients, such as the web page, download models and load another model.",
        group=MORE,
    )
    overflow: str | None = setting(
        None,
        "Treatment of a conversation that outgrows the context: drop (its oldest exchanges leave "
        "the prompt) or refuse (status 400).",
        choices=(DROP, REFUSE),
        shown='the value of the request\'s "overflow" field; if it is missing, refuse, but drop '
        "in Ollama's API",
        group=MORE,
    )
    patience: int = setting(
        30,
        "Timeout in seconds for receiving the head of a request, and again for its body.",
        within=FROM_1,
        group=MORE,
    )
    timeout: int = setting(
        3600,
        "Timeout of a request in seconds; 0 for no limit.",
        within=FROM_0,
        group=MORE,
    )

    @property
    def is_local(self) -> bool:
        """Whether the server listens on an address that only this machine can reach."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def hosts(self) -> frozenset[str]:
        """The names of this server that the Host header of a request may have.

        The server checks the header only if no other machine can connect (`is_local`).
        """
        more = (name.strip() for name in (self.allow_host or "").lower().split(","))
        return frozenset({*LOCAL_NAMES, self.host.lower(), *filter(None, more)})

    def most_body_bytes(self, n_ctx: int | None) -> int:
        """Return the maximum length of a request's body in bytes.

        This is the value of --body-limit. Without this option, it is BODY_BYTES for each token of
        the context, and at least LEAST_BODY_BYTES. n_ctx is the context length (--ctx), or None if
        the option was not given.
        """
        return self.body_limit or max(LEAST_BODY_BYTES, BODY_BYTES * (n_ctx or 0))

    def most_with_images(self, n_ctx: int | None) -> tuple[int, int]:
        """Return (text limit, image limit) in bytes for a request to a model that takes images.

        Text is everything in the body except the images. The usual text limit is BODY_BYTES for
        each token of the context, and at least LEAST_BODY_BYTES.

        Without --body-limit, the result is (usual text limit, IMAGE_BYTES). With --body-limit, text
        may take its usual limit, but at most --body-limit. Images may take the rest of
        --body-limit. n_ctx is the context length (--ctx), or None if the option was not given.
        """
        usual = max(LEAST_BODY_BYTES, BODY_BYTES * (n_ctx or 0))
        if self.body_limit is None:
            return usual, IMAGE_BYTES
        return min(usual, self.body_limit), max(0, self.body_limit - usual)

    def chat_template_text(self) -> str | None:
        """Return the text in the file of --chat-template, or None if the option was not given.

        Raises TextFileError for a file that cannot be read or is not UTF-8, and ConfigError for an
        empty file.
        """
        if self.chat_template is None:
            return None
        text = read_text(self.chat_template, _MOST_TEMPLATE_BYTES)
        if not text.strip():
            raise ConfigError(f"--chat-template {self.chat_template}: the file is empty")
        return text

    def keys(self) -> frozenset[str]:
        """Return the API keys that clients may send, or an empty set if requests need no key.

        Raises ConfigError if other machines can reach the server and it has no key. Raises
        TextFileError for a key file that cannot be read or is not UTF-8.
        """
        keys = set() if self.api_key is None else {self.api_key.strip()}
        if "" in keys:
            raise ConfigError("--api-key: the key is empty: give a key, or leave the option out")
        if self.api_key_file is not None:
            lines = read_text(self.api_key_file, _MOST_KEY_BYTES).splitlines()
            keys |= {line.strip() for line in lines if line.strip()}
            if not keys:
                raise ConfigError(f"--api-key-file {self.api_key_file}: the file has no keys")
        if not keys and not self.is_local:
            raise ConfigError(
                f"--host {self.host} can be reached from other machines: give --api-key-file FILE, "
                f"or leave --host out"
            )
        return frozenset(keys)


# Settings of an answer that become the server's defaults for requests.
_DEFAULTS = ("max_tokens", "temp", "top_k", "top_p", "min_p", "seed")


def answer_settings() -> list[Setting]:
    """Return the settings that a request can override for its answer, such as temp.

    Their values are the server's defaults for answers.
    """
    own = Config.declared()
    conversation = [each for each in own.values() if each.conversation]
    return [own[name] for name in _DEFAULTS] + conversation


def server_settings() -> dict[str, Setting]:
    """Return all settings that are options of `moe-edge serve`, by name."""
    model = [one for one in Config.declared().values() if not (one.answer or one.conversation)]
    policies = policy_settings().values()
    shared = [*ServeSettings.declared().values(), *model, *policies, *answer_settings()]
    return {one.name: one for one in shared if one.option}


def options_of(args: Mapping[str, Any]) -> tuple[Config, ServeSettings]:
    """Parse options of `moe-edge serve` that do not come from a command line, such as Ray's.

    `args` maps names of options, such as `prompt-cache` or `prompt_cache`, to their values. Raises
    ConfigError for an unknown option or a wrong value.
    """
    known = server_settings()
    given: dict[str, Any] = {}
    for written, value in args.items():
        name = written.replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f": did you mean {near[0]}?" if near else ""
            raise ConfigError(f"`moe-edge serve` has no option --{written}{hint}")
        given[name] = known[name].parse(str(value))
    own = ServeSettings.declared()
    settings = ServeSettings.of({name: given.pop(name) for name in own if name in given})
    return Config.build(**{"remember": True, **given}), settings
