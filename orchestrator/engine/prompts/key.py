"""What the state of a sequence depends on beside its tokens."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

from gguf_tools.experts import ExpertModel
from orchestrator.cache.profile import identity
from orchestrator.config import Config
from orchestrator.memory.plan import MemoryPlan
from orchestrator.policy import Policy

_FORMAT = 1


def state_key(
    config: Config, model: ExpertModel, plan: MemoryPlan, policy: Policy | None, flash: bool
) -> str:
    """The model's files, the precisions in which its experts are computed and who chooses among
    them, and how keys and values are laid out, as a text. Raises OSError.

    Where every expert is computed in one precision, no policy and no budget changes the state.
    flash: attention is flash, so that values are not transposed.
    """
    files = [(path.stat().st_size, path.stat().st_mtime_ns) for path in model.files]
    parts: dict[str, Any] = {
        "format": _FORMAT,
        "llama": version("llama-cpp-python"),
        "model": identity(model),
        "files": files,
        "kv": config.kv,
        "flash": flash,
        "tiers": plan.tier_names,
    }
    if policy is not None and (len(plan.tiers) > 1 or plan.skip):
        names = [name for name, each in type(policy).Settings.declared().items() if each.recorded]
        parts["policy"] = policy.name, plan.skip, config.renormalize, config.exact_tiers
        parts["settings"] = {name: str(getattr(policy.settings, name)) for name in sorted(names)}
    return json.dumps(parts, sort_keys=True)
