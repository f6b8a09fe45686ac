"""Which plan a loss chose before: the same command runs the same tomorrow."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from gguf_tools.experts import ExpertModel
from gguf_tools.process import processor_name
from orchestrator.cache.files import read_object, write_whole
from orchestrator.cache.profile import cached_path
from orchestrator.config import Config
from orchestrator.policy import ALLOWED_LOSS

_FORMAT = "moe-edge plans 1"
_LARGEST_BYTES = 1 << 20
# So many commands of a model are kept, the latest ones.
_MOST = 64


class TakenPlans:
    """The settings of the plan that was taken under a config's options for this model on this
    processor, in the user cache. What cannot be read or written there is done without."""

    def __init__(self, config: Config, model: ExpertModel) -> None:
        """All settings count by which a plan may differ, and so all but those of an answer."""
        counting = [
            name
            for name, each in Config.declared().items()
            if not each.answer and name not in ("model", "prompt_cache_limit")
        ]
        asked = {name: getattr(config, name) for name in counting} | dict(config.of_policies)
        key = json.dumps([processor_name(), asked], default=str, sort_keys=True)
        self._key = hashlib.sha256(key.encode()).hexdigest()[:24]
        self._path = cached_path(model, "plans")

    def _read(self) -> dict[str, Any]:
        data: dict[str, Any] | None = None
        with suppress(OSError):
            data = read_object(self._path, _LARGEST_BYTES)
        known = data.get("taken") if data and data.get("format") == _FORMAT else None
        return known if isinstance(known, dict) else {}

    def recall(self) -> Mapping[str, Any] | None:
        """The settings, without the loss that they spend; None where nothing was taken."""
        found = self._read().get(self._key)
        return found if isinstance(found, dict) else None

    def keep(self, settings: Mapping[str, Any]) -> None:
        """Keeps what was taken now."""
        known = self._read()
        known.pop(self._key, None)
        known[self._key] = {k: v for k, v in settings.items() if k != ALLOWED_LOSS}
        latest = dict([*known.items()][-_MOST:])
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, json.dumps({"format": _FORMAT, "taken": latest}))
