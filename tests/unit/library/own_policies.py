"""The text of a module with a policy."""

POLICY = """
from dataclasses import dataclass

from orchestrator.policy.base import About
from orchestrator.policy.lru import LRU
from orchestrator.settings import Settings, setting

{before}

@dataclass(frozen=True)
class Own(Settings):
    {setting}: int = setting(2, "A setting of a package.", within=(1, 9), live=True)


class {kind}(LRU):
    about = About(name={name!r}, summary="A policy of a package.", Settings=Own,
                  reason="is tiny", precisions=LRU.precisions, wants=LRU.about.wants)
"""


def policy(kind="Tiny", name="tiny", setting="tininess", before=""):
    """The text of a module with a policy, which is lru with a name and a setting of its own."""
    return POLICY.format(kind=kind, name=name, setting=setting, before=before)
