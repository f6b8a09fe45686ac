"""The registry of policies: ours, those of installed packages, and those that a program defines.

A package offers a policy with an entry point of the group `moe_edge.policies`, whose value is
`module:Class`. The entry points are read on the first use of the registry.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from importlib import import_module
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError, PolicyError
from orchestrator.policy.base import Policy
from orchestrator.policy.context import ContextAware
from orchestrator.policy.dymoe import DyMoE
from orchestrator.policy.dynaexq import DynaExq
from orchestrator.policy.firm import FIRM
from orchestrator.policy.floor import Floor
from orchestrator.policy.lru import LRU
from orchestrator.policy.mixed import Mixed
from orchestrator.settings import Setting

GROUP = "moe_edge.policies"
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
# Names that a setting of a foreign policy may not have, because moe-edge has a setting or an option
# of this name. tests/unit/library/test_plugins.py compares them.
RESERVED = frozenset(
    (
        "alias all_tiers allow_host allow_model_change api_key api_key_file as_before as_json "
        "bandwidth body_limit cache_ram caps chat_template choices compute_ms cors_origin ctx "
        "device direct_io dry_allowed_length dry_base dry_multiplier dry_penalty_last_n "
        "dynatemp_exponent dynatemp_range exact exact_tiers expert_ram file force force_managed "
        "frequency_penalty grammar high_tier host image image_max_tokens importance "
        "importance_window io_threads keep_messages kl kl_from kv latency_us layers layout link "
        "logits_all low low_tier max_tokens min_p mirostat mirostat_eta mirostat_tau misses mmproj "
        "model named no_verify out overflow parallel patience picture policy port prefill "
        "presence_penalty prompt prompt_cache prompt_cache_limit prompt_tokens queue quick ram "
        "remember renormalize repeat_last_n repeat_penalty resume reuse routing rows runs schema "
        "seed shape stop system temp text think threads timeout together tokens top_k top_n_sigma "
        "top_p trusted_proxy typical_p ubatch use_extra_bufts use_mmap vocab vram wait window "
        "xtc_probability xtc_threshold"
    ).split()
)


class Policies(MutableMapping[str, type[Policy]]):
    """A mapping from policy names to policy classes, including those of installed packages.

    The first access looks for policies of installed packages. faults: one sentence for each policy
    of an installed package that cannot be used.
    """

    def __init__(self, own: Iterable[type[Policy]], reserved: Collection[str]) -> None:
        """Make a registry with the policies of this package.

        own: these policies. reserved: further names that no policy may have.
        """
        self.own = {each.name: each for each in own}
        self.faults: list[str] = []
        self._known = dict(self.own)
        self._reserved = frozenset(reserved)
        self._installed: set[str] = set()
        self._is_searched = False

    def _all(self) -> dict[str, type[Policy]]:
        """Return all policies by name.

        The first call imports the policies of installed packages.
        """
        if not self._is_searched:
            self._is_searched = True  # a policy that is imported now may use the registry
            self._search()
        return self._known

    def _search(self) -> None:
        for package, folder in _offering_packages().items():
            from importlib.metadata import Distribution

            try:
                points = Distribution.at(folder).entry_points.select(group=GROUP)
            except Exception as error:  # noqa: BLE001 - whatever reading a damaged file raises
                self.faults.append(
                    f"the entry points of the package {package} cannot be read "
                    f"({_described(error)}). The policies of this package are left out."
                )
                continue
            for point in points:
                try:
                    self._installed.add(self.add(point.load()))
                except PolicyError as error:
                    self.faults.append(
                        f"{error} (from the package {package}). This policy is left out."
                    )
                except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a package raises
                    self.faults.append(
                        f"the policy {point.name} of the package {package} cannot be imported "
                        f"({_described(error)}). This policy is left out."
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
        """Add a policy class to the registry and return its name.

        If a class with the same module and class name was added before, the new class replaces it.
        So a notebook can define a policy again.

        Raises PolicyError for an object that is not a policy class, and for a name that is already
        in use. Also raises PolicyError for a setting of the policy if moe-edge has a setting with
        the same name, or if another policy declares this setting differently.
        """
        fault = self._fault(policy)
        if fault is not None:
            raise PolicyError(fault)
        self._all()[policy.name] = policy
        return str(policy.name)

    def _fault(self, policy: Any) -> str | None:
        """Return the reason why an object cannot be added as a policy, or None if it can."""
        if not (isinstance(policy, type) and issubclass(policy, Policy)):
            return f"{policy!r} is not a policy: derive a class from orchestrator.policy.Policy"
        class_path = reference(policy)
        if not isinstance(getattr(policy, "name", None), str):
            return (
                f"the policy {class_path} declares no `about`: set this class attribute to an "
                "About object"
            )
        name = policy.name
        if not _NAME.fullmatch(name):
            return f"the policy {class_path} has the name {name!r}: use a-z, 0-9, - and _"
        known = self._all()
        taken = known.get(name)
        if name in self._reserved or (taken is not None and reference(taken) != class_path):
            owner = "moe-edge" if taken is None or name in self.own else reference(taken)
            return (
                f"the policy {class_path} has the name {name}, which {owner} uses: choose another "
                "name"
            )
        others = [each for other, each in known.items() if other != name]
        for setting, declared in policy.Settings.declared().items():
            if setting in RESERVED:
                return (
                    f"the policy {class_path} has the setting {setting}, which moe-edge uses "
                    "itself: choose another name"
                )
            for other in others:
                if other.Settings.declared().get(setting, declared) != declared:
                    return (
                        f"the policy {class_path} declares the setting {setting} with another "
                        f"default, range or help than the policy {other.name}: rename the setting, "
                        "or use the same declaration"
                    )
        return None

    def named(self, given: str | type[Policy]) -> str:
        """Return the name of a policy, and add the policy to the registry if a class is given.

        given: the name of a policy, a text `module:Class`, or a policy class. A name is returned
        unchanged. For `module:Class`, the class is imported. Raises PolicyError if the class cannot
        be imported or added.
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
                f"the policy {given} cannot be imported: {_described(error)}"
            ) from error
        return self.add(found)

    def for_processes(self, name: str) -> str:
        """Return a text with which another process finds a policy.

        The text is the policy's name, or `module:Class` for a policy that this program added.
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
    """Return the text `module:Class` that identifies a policy class."""
    return f"{policy.__module__}:{policy.__qualname__}"


def _described(error: BaseException) -> str:
    """Return the type and the message of an exception in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _offering_packages() -> dict[str, Path]:
    """Return the installed packages that declare entry points for policies.

    The result maps the name of each package to its metadata folder. The function searches the text
    of the metadata files, because importing importlib.metadata takes longer.
    """
    found: dict[str, Path] = {}
    group = GROUP.encode()
    for folder in map(Path, sys.path):
        for pattern in ("*.dist-info/entry_points.txt", "*.egg-info/entry_points.txt"):
            for path in folder.glob(pattern):
                try:
                    is_offering = group in path.read_bytes()
                except OSError:
                    continue
                if is_offering:
                    found.setdefault(re.split(r"-|\.egg-info", path.parent.name)[0], path.parent)
    return found


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

    If several policies have the same setting, they share one declaration. Raises TypeError if two
    policies declare a setting differently.
    """
    found: dict[str, Setting] = {}
    for policy in POLICIES.values():
        for name, declared in policy.Settings.declared().items():
            if found.setdefault(name, declared) != declared:
                raise TypeError(f"two policies declare the setting {name} differently")
    return found


def owners(name: str) -> tuple[str, ...]:
    """Return the names of the policies that have the setting called `name`."""
    return tuple(each.name for each in POLICIES.values() if name in each.Settings.declared())


def spends_loss(name: str) -> bool:
    """Return whether a policy limits the quality loss, that is, has the setting max_loss."""
    return ALLOWED_LOSS in POLICIES[name].Settings.declared()
