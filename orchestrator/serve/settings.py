"""The settings of `moe-edge serve`, beside those of the model."""

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

# How long a request may be for each token of the context, and in any case. Prose has four to five
# bytes a token; what one takes that is worked with is in the plan, too (BODY_FACTOR).
BODY_BYTES, LEAST_BODY_BYTES = 16, 2**17

_MOST_KEY_BYTES = 1 << 20
# The native server refuses longer ones.
_MOST_TEMPLATE_BYTES = 512 << 10

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class ServeSettings(Settings):
    """Who may ask, and how much at once."""

    host: str = setting(
        "127.0.0.1", "Address to listen on. Any but this machine's own needs a key."
    )
    port: int = setting(8080, "Port to listen on; 0 takes a free one.", within=(0, 65535))
    parallel: int = setting(
        1,
        "Answers that decode together. The context of each is --ctx.",
        within=(1, MOST_SEQUENCES),
    )
    queue: int = setting(
        16,
        "Requests that wait for their turn; more are refused with 429. Clients take turns.",
        within=FROM_0,
        group=MORE,
    )
    alias: str | None = setting(
        None,
        "The model's name for clients.",
        shown="the file's name",
        group=MORE,
    )
    api_key: str | None = setting(
        None,
        "A key that every request has to bring; others of this machine see it in its process list.",
        metavar="KEY",
        group=MORE,
    )
    api_key_file: Path | None = setting(
        None, "A file of keys, one a line. A request has to bring one of them."
    )
    allow_host: str | None = setting(
        None,
        "Another name of this server that a Host header may have, as behind a proxy; several with "
        "commas between.",
        metavar="NAMES",
        group=MORE,
    )
    trusted_proxy: str | None = setting(
        None,
        "Address of a proxy whose X-Forwarded-For header names the client; several with commas "
        "between. Clients without a key take turns by their address.",
        metavar="ADDRESSES",
        group=MORE,
    )
    cors_origin: str | None = setting(
        None,
        "A web page's origin that may ask, as https://chat.example.org, or * for any.",
        metavar="ORIGIN",
        group=MORE,
    )
    chat_template: Path | None = setting(
        None,
        "A Jinja chat template in the place of the model's own.",
        group=MORE,
    )
    body_limit: int | None = setting(
        None,
        "The longest request.",
        unit=SIZE,
        shown="128KiB, or 16 bytes for each token of --ctx",
        group=MORE,
    )
    patience: int = setting(
        30,
        "Seconds within which a request has to be here, its head and its body each.",
        within=FROM_1,
        group=MORE,
    )
    timeout: int = setting(
        3600,
        "Seconds after which a request is given up; 0 for never.",
        within=FROM_0,
        group=MORE,
    )

    @property
    def is_local(self) -> bool:
        """Whether this machine alone can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def hosts(self) -> frozenset[str]:
        """Names that a Host header may have where the server is local."""
        more = (name.strip() for name in (self.allow_host or "").lower().split(","))
        return frozenset({*LOCAL_NAMES, self.host.lower(), *filter(None, more)})

    def most_body_bytes(self, n_ctx: int | None) -> int:
        """How long a request may be. n_ctx: the context that was asked for, None where none was."""
        return self.body_limit or max(LEAST_BODY_BYTES, BODY_BYTES * (n_ctx or 0))

    def chat_template_text(self) -> str | None:
        """Return the text of --chat-template; None if it was not given.

        Raises TextFileError for a file that cannot be read or is not UTF-8, and ConfigError for an
        empty one.
        """
        if self.chat_template is None:
            return None
        text = read_text(self.chat_template, _MOST_TEMPLATE_BYTES)
        if not text.strip():
            raise ConfigError(f"--chat-template {self.chat_template}: the file is empty")
        return text

    def keys(self) -> frozenset[str]:
        """Return the keys that a request may bring; empty if requests need none.

        Raises ConfigError if the server can be reached from other machines and has no key, and
        TextFileError for a key file that cannot be read or is not UTF-8.
        """
        keys = set() if self.api_key is None else {self.api_key.strip()}
        if "" in keys:
            raise ConfigError(
                "--api-key: the key is empty: give another one, or leave the option out"
            )
        if self.api_key_file is not None:
            lines = read_text(self.api_key_file, _MOST_KEY_BYTES).splitlines()
            keys |= {line.strip() for line in lines if line.strip()}
            if not keys:
                raise ConfigError(f"--api-key-file {self.api_key_file}: it has no key in it")
        if not keys and not self.is_local:
            raise ConfigError(
                f"--host {self.host} can be reached from other machines: give --api-key-file FILE, "
                f"or leave --host out"
            )
        return frozenset(keys)


# Settings of an answer that the server core takes as defaults for requests.
_DEFAULTS = ("max_tokens", "temp", "top_k", "top_p", "min_p", "seed")


def answer_settings() -> list[Setting]:
    """Return the settings of a chat that a server has, besides those of the model: defaults for
    requests that do not set them, and those of conversations."""
    own = Config.declared()
    conversation = [each for each in own.values() if each.conversation]
    return [own[name] for name in _DEFAULTS] + conversation


def server_settings() -> dict[str, Setting]:
    """All that `moe-edge serve` has an option for, by name."""
    model = [one for one in Config.declared().values() if not (one.answer or one.conversation)]
    policies = policy_settings().values()
    shared = [*ServeSettings.declared().values(), *model, *policies, *answer_settings()]
    return {one.name: one for one in shared if one.option}


def options_of(args: Mapping[str, Any]) -> tuple[Config, ServeSettings]:
    """What a server's options ask for that come from no command line. args: values by name, as
    `prompt-cache` or `prompt_cache` for --prompt-cache. Raises ConfigError."""
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
