"""The policies by name. A policy decides; the native store moves the bytes."""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.errors import PolicyError
from orchestrator.policy.base import Counting, ModelShape, Policy, PolicySettings
from orchestrator.policy.dymoe import DyMoE
from orchestrator.policy.dynaexq import DynaExq
from orchestrator.policy.lru import LRU

POLICIES: dict[str, Callable[[ModelShape, PolicySettings], Policy]] = {
    LRU.name: LRU,
    DyMoE.name: DyMoE,
    DynaExq.name: DynaExq,
}


def make_policy(name: str, shape: ModelShape, settings: PolicySettings) -> Policy:
    """The named policy for a model. Raises PolicyError for an unknown name, or where the
    policy cannot work with the model's tiers."""
    try:
        policy = POLICIES[name]
    except KeyError:
        known = ", ".join(known_policies())
        raise PolicyError(f"unknown policy '{name}'; known: {known}") from None
    return policy(shape, settings)


def known_policies() -> tuple[str, ...]:
    """Every name that a user may give; "plain" is the upstream path without a store."""
    return (*POLICIES, "plain")


__all__ = [
    "POLICIES",
    "Counting",
    "ModelShape",
    "Policy",
    "PolicySettings",
    "known_policies",
    "make_policy",
]
