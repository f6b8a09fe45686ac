"""The policies. A policy decides, and the native store moves the bytes.

To add a policy, write one file in this folder, and add the class to POLICIES in registry.py. No
policy imports another; shared arithmetic is in orchestrator/allocation. Other packages add policies
as registry.py describes.
"""

from orchestrator.policy.base import Policy
from orchestrator.policy.registry import (
    ALLOWED_LOSS,
    BASELINE,
    DEFAULT,
    PLAIN,
    PLAIN_REASON,
    POLICIES,
    known_policies,
    owners,
    policy_class,
    policy_settings,
    spends_loss,
)

__all__ = [
    "ALLOWED_LOSS",
    "BASELINE",
    "DEFAULT",
    "PLAIN",
    "PLAIN_REASON",
    "POLICIES",
    "Policy",
    "known_policies",
    "owners",
    "policy_class",
    "policy_settings",
    "spends_loss",
]
