"""The policies. A policy decides, and the native store moves the bytes.

To add a policy, write one file in this folder, import it below, and add a line to POLICIES. No
policy imports another; shared arithmetic is in orchestrator/allocation. Other packages add policies
as orchestrator/policy/registry.py describes.
"""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.errors import PolicyError
from orchestrator.policy.base import Policy as Policy
from orchestrator.policy.context import ContextAware
from orchestrator.policy.dymoe import DyMoE
from orchestrator.policy.dynaexq import DynaExq
from orchestrator.policy.firm import FIRM
from orchestrator.policy.floor import Floor
from orchestrator.policy.lru import LRU
from orchestrator.policy.mixed import Mixed
from orchestrator.policy.registry import Policies, settings_of
from orchestrator.settings import Setting

# llama.cpp's own path without an expert store. Users select it like a policy.
PLAIN = "plain"
# Every policy by its name, with those that other packages and programs have added.
POLICIES = Policies(
    (
        LRU,
        DyMoE,
        DynaExq,
        FIRM,
        ContextAware,
        Floor,
        Mixed,
    ),
    reserved=[PLAIN],
)
PLAIN_REASON = "runs the best precision alone"
# The policy to compare with, and the default if every expert fits the slots.
BASELINE = LRU.name
# The default if not every expert fits.
DEFAULT = "dymoe" if "dymoe" in POLICIES.own else BASELINE
# The setting that chooses a plan if no policy is named: the allowed quality loss, as mean KL
# divergence from the best tier in nats per token.
ALLOWED_LOSS = "max_loss"


def policy_class(name: str) -> type[Policy]:
    """Return the policy class with this name.

    Raises PolicyError, which lists the known names, if no policy has this name.
    """
    try:
        return POLICIES[name]
    except KeyError:
        known = ", ".join(known_policies())
        raise PolicyError(f"unknown policy '{name}'; known: {known}") from None


def known_policies() -> tuple[str, ...]:
    """Return every policy name that a user may type."""
    return (*POLICIES, PLAIN)


def policy_settings() -> Mapping[str, Setting]:
    """Return the declarations of the settings of all policies, by setting name.

    If several policies have the same setting, they share one declaration.
    """
    return settings_of(POLICIES.values())


def owners(name: str) -> tuple[str, ...]:
    """Return the names of the policies that have the setting called `name`."""
    return tuple(each.name for each in POLICIES.values() if name in each.Settings.declared())


def spends_loss(name: str) -> bool:
    """Return whether a policy limits the quality loss, that is, has the setting max_loss."""
    return ALLOWED_LOSS in POLICIES[name].Settings.declared()
