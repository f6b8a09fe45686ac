"""The registry of policies: ours, those of installed packages, and those that a program defines.

A package offers a policy with an entry point of the group `moe_edge.policies`, whose value is
`module:Class`. The entry points are read on the first use of the registry.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, MutableMapping
from importlib import import_module
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError, PolicyError
from orchestrator.policy.base import Policy
from orchestrator.settings import Setting

GROUP = "moe_edge.policies"
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
# Names that a setting of a foreign policy may not have, because moe-edge has a setting or an option
# of this name. tests/unit/library/test_plugins.py compares them.
RESERVED = frozenset(
    (
        "alias all_tiers allow_host api_key api_key_file as_before as_json bandwidth body_limit "
        "cache_ram calib caps chat_template choices compute_ms conversations cors_origin ctx "
        "device direct_io draft dry_allowed_length dry_base dry_multiplier dry_penalty_last_n "
        "dynatemp_exponent dynatemp_range exact exact_tiers expert_ram extra_bytes "
        "extra_token_bytes file force force_managed format frequency_penalty grammar high_tier "
        "host hot importance importance_window io_threads json keep_messages kl kl_from kv "
        "latency_us layers layout link logits_all low low_tier max_tokens min_p mirostat "
        "mirostat_eta mirostat_tau misses model named near_data no_verify out parallel patience "
        "picture policy port prefill presence_penalty prompt prompt_cache prompt_cache_limit "
        "prompt_tokens queue quick ram remember renormalize repeat_last_n repeat_penalty resume "
        "reuse routing rows runs schema scored seed sequences shape stop study system temp text "
        "think threads timeout together tokens top_k top_n_sigma top_p trusted_proxy typical_p "
        "ubatch uniform use_extra_bufts use_mmap verify vocab vram wait window xtc_probability "
        "xtc_threshold"
    ).split()
)


class Policies(MutableMapping[str, type[Policy]]):
    """Policy classes by the names that users type.

    faults: a sentence about each installed policy that cannot be used.
    """

    def __init__(self, own: Iterable[type[Policy]], reserved: Collection[str]) -> None:
        """own: our policies. reserved: further names that no policy may have."""
        self.own = {each.name: each for each in own}
        self.faults: list[str] = []
        self._known = dict(self.own)
        self._reserved = frozenset(reserved)
        self._installed: set[str] = set()
        self._is_searched = False

    def _all(self) -> dict[str, type[Policy]]:
        """Return the known policies. The first call looks for installed ones."""
        if not self._is_searched:
            self._is_searched = True  # a policy that is imported now may use the registry
            self._search()
        return self._known

    def _search(self) -> None:
        if not _is_offered():
            return
        from importlib.metadata import entry_points

        for point in entry_points(group=GROUP):
            package = point.dist.name if point.dist is not None else point.value
            try:
                self._installed.add(self.add(point.load()))
            except PolicyError as error:
                self.faults.append(f"{error} (from the package {package}). It is left out.")
            except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a package raises
                self.faults.append(
                    f"the policy {point.name} of the package {package} cannot be imported "
                    f"({type(error).__name__}: {error}). It is left out."
                )

    def __getitem__(self, name: str) -> type[Policy]:
        return self._all()[name]

    def __setitem__(self, name: str, policy: type[Policy]) -> None:
        self._all()[name] = policy

    def __delitem__(self, name: str) -> None:
        del self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def add(self, policy: Any) -> str:
        """Add a policy class and return its name. A class that is defined again, as in a notebook,
        replaces its predecessor.

        Raises PolicyError for anything that is not a policy, and for a name or a setting that is
        taken.
        """
        fault = self._fault(policy)
        if fault is not None:
            raise PolicyError(fault)
        self._all()[policy.name] = policy
        return str(policy.name)

    def _fault(self, policy: Any) -> str | None:
        """Return why a class cannot be added, or None."""
        if not (isinstance(policy, type) and issubclass(policy, Policy)):
            return f"{policy!r} is not a policy: derive a class from orchestrator.policy.Policy"
        where = reference(policy)
        if not isinstance(getattr(policy, "name", None), str):
            return f"the policy {where} declares no `about`"
        name = policy.name
        if not _NAME.fullmatch(name):
            return f"the policy {where} has the name {name!r}: use a-z, 0-9, - and _"
        known = self._all()
        taken = known.get(name)
        if name in self._reserved or (taken is not None and reference(taken) != where):
            owner = "moe-edge" if taken is None or name in self.own else reference(taken)
            return f"the policy {where} has the name {name}, which {owner} uses: choose another one"
        others = [each for other, each in known.items() if other != name]
        for setting, declared in policy.Settings.declared().items():
            if setting in RESERVED:
                return f"the policy {where} has the setting {setting}, which moe-edge uses itself"
            for other in others:
                if other.Settings.declared().get(setting, declared) != declared:
                    return (
                        f"the policy {where} declares the setting {setting} in another way than "
                        f"the policy {other.name}"
                    )
        return None

    def named(self, given: str | type[Policy]) -> str:
        """Return the name of a policy that is given by its name, as `module:Class`, or as a class.
        The latter two are added. Raises PolicyError.
        """
        if not isinstance(given, str):
            return self.add(given)
        module, colon, kind = given.partition(":")
        if not colon:
            return given
        folder = os.getcwd()
        if folder not in sys.path:
            sys.path.append(folder)
        try:
            found = import_module(module)
            for part in kind.split("."):
                found = getattr(found, part)
        except Exception as error:
            raise PolicyError(
                f"the policy {given} cannot be imported: {type(error).__name__}: {error}"
            ) from error
        return self.add(found)

    def for_processes(self, name: str) -> str:
        """Return how another process finds a policy: its name, or `module:Class`.

        Raises ConfigError for a class that another process cannot import.
        """
        policy = self._all().get(name)
        if policy is None or name in self.own or name in self._installed:
            return name
        if policy.__module__ == "__main__" or "<locals>" in policy.__qualname__:
            raise ConfigError(
                f"the policy {name} is defined in {policy.__module__}, from which another process "
                "cannot import it: put the class into a module of its own"
            )
        return reference(policy)

    @property
    def installed(self) -> tuple[str, ...]:
        """The names of the policies of installed packages."""
        return tuple(name for name in self._all() if name in self._installed)


def reference(policy: type[Policy]) -> str:
    """Return `module:Class`."""
    return f"{policy.__module__}:{policy.__qualname__}"


def settings_of(policies: Iterable[type[Policy]]) -> dict[str, Setting]:
    """Return every setting of the policies, by name. Policies that have the same setting share its
    declaration; raises TypeError if they do not.
    """
    found: dict[str, Setting] = {}
    for policy in policies:
        for name, declared in policy.Settings.declared().items():
            if found.setdefault(name, declared) != declared:
                raise TypeError(f"two policies declare the setting {name} differently")
    return found


def _is_offered() -> bool:
    """Whether an installed package may offer a policy.

    importlib.metadata would answer this too, but its import takes longer than all of this.
    """
    group = GROUP.encode()
    for folder in map(Path, sys.path):
        for pattern in ("*.dist-info/entry_points.txt", "*.egg-info/entry_points.txt"):
            try:
                if any(group in path.read_bytes() for path in folder.glob(pattern)):
                    return True
            except OSError:
                continue
    return False
