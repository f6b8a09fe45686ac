"""The policies by name. A policy decides; the native store moves the bytes.

A policy is one file here, its import below, and its line in POLICIES. No policy imports another:
what several of them compute with is in orchestrator/allocation.
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
from orchestrator.settings import Setting

POLICIES: dict[str, type[Policy]] = {
    each.name: each
    for each in (
        LRU,
        DyMoE,
        DynaExq,
        FIRM,
        ContextAware,
        Floor,
        Mixed,
    )
}

# The upstream path without a store, which a user asks for like a policy.
PLAIN = "plain"
PLAIN_REASON = "runs the best precision alone"
# What others are compared with, and what decides where everything fits the slots.
BASELINE = LRU.name
# What decides where not everything fits.
DEFAULT = "dymoe" if "dymoe" in POLICIES else BASELINE
# The setting that chooses a plan where no policy is named: what an answer may lose, mean KL from
# the best tier in nats a token.
ALLOWED_LOSS = "max_loss"


def policy_class(name: str) -> type[Policy]:
    """The named policy. Raises PolicyError listing those that there are."""
    try:
        return POLICIES[name]
    except KeyError:
        known = ", ".join(known_policies())
        raise PolicyError(f"unknown policy '{name}'; known: {known}") from None


def known_policies() -> tuple[str, ...]:
    """Every name that a user may give."""
    return (*POLICIES, PLAIN)


def policy_settings() -> Mapping[str, Setting]:
    """Every setting of every policy, by name. Those that several policies have are one: they
    share its declaration."""
    found: dict[str, Setting] = {}
    for policy in POLICIES.values():
        for name, declared in policy.Settings.declared().items():
            if found.setdefault(name, declared) != declared:
                raise TypeError(f"two policies declare the setting {name} in two ways")
    return found


def owners(name: str) -> tuple[str, ...]:
    """Names of the policies that have a setting."""
    return tuple(each.name for each in POLICIES.values() if name in each.Settings.declared())


def spends_loss(name: str) -> bool:
    """Whether a policy spends a loss that the user allows: those with the setting for it do."""
    return ALLOWED_LOSS in POLICIES[name].Settings.declared()
