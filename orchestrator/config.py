"""The settings of a model and its answers: frozen, built once, and checked when they are built."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, replace
from pathlib import Path
from typing import Any

from gguf_tools.experts import DEFAULT_KV, KV_TYPES
from gguf_tools.process import compute_threads, usable_cores
from orchestrator.errors import ConfigError
from orchestrator.events import SKIP_TIER
from orchestrator.policy import POLICIES, Policy, known_policies, policy_settings
from orchestrator.settings import (
    ANSWER,
    MEMORY,
    MODEL,
    MORE,
    PRECISION,
    RATE,
    SIZE,
    Settings,
    inherit,
    setting,
)

MISSES = ("auto", "copy", "compute")
# llama.cpp allows 256 sequences. Number 0 is used by the runtime itself.
MOST_SEQUENCES = 255


def native_log_enabled() -> bool:
    """Return whether llama.cpp's log is printed to stderr.

    This is the case if the environment variable MOE_EDGE_LOG is set and not 0.
    """
    return os.environ.get("MOE_EDGE_LOG", "") not in ("", "0")


@dataclass(frozen=True)
class Sampling(Settings):
    """The settings that decide how the tokens of an answer are sampled.

    `Config` and the settings of single requests inherit the declarations of this class. None means
    llama.cpp's default. An answer ends before the first occurrence of a text in `stop`.
    """

    temp: float = setting(
        0.7,
        "Temperature; 0 is greedy.",
        metavar="T",
        within=(0.0, 100.0),
        group=ANSWER,
    )
    top_k: int = setting(
        40,
        "Sample from the N most likely tokens; 0 for all.",
        within=(0, 2**31 - 1),
        answer=True,
        group=MORE,
    )
    top_p: float = setting(
        0.95,
        "Nucleus sampling. Only the most likely tokens, with total probability P, are candidates.",
        metavar="P",
        within=(0.0, 1.0),
        group=ANSWER,
    )
    min_p: float = setting(
        0.0,
        "Drop tokens with less than P times the probability of the most likely one.",
        metavar="P",
        within=(0.0, 1.0),
        answer=True,
        group=MORE,
    )
    seed: int | None = setting(
        None,
        "Seed for sampling. The same command repeats its answer only if --ram, --ctx and --ubatch "
        "are also given, and all experts have one precision.",
        within=(0, 2**32 - 1),
        group=ANSWER,
    )
    stop: tuple[str, ...] = setting(
        (),
        "Text that ends the answer. It is not part of the answer. May be repeated.",
        metavar="TEXT",
        repeated=True,
        group=ANSWER,
    )

    typical_p: float | None = setting(
        None,
        "Probability mass of locally typical sampling; 1 turns it off.",
        metavar="P",
        within=(0.0, 1.0),
        shown="llama.cpp's",
        answer=True,
        group=MORE,
    )
    top_n_sigma: float | None = setting(
        None,
        "Keep tokens whose logits are at most N standard deviations below the highest logit.",
        metavar="N",
        within=(0.0, 100.0),
        shown="llama.cpp's",
        answer=True,
        group=MORE,
    )
    repeat_penalty: float | None = setting(
        None,
        "Penalty on repeated tokens; 1 turns it off.",
        metavar="X",
        within=(0.01, 10.0),
        shown="llama.cpp's",
        answer=True,
        group=MORE,
    )
    repeat_last_n: int | None = setting(
        None,
        "Number of latest tokens in which repeated tokens are penalized.",
        metavar="N",
        within=(0, 16777216),
        shown="llama.cpp's",
        answer=True,
        group=MORE,
    )
    presence_penalty: float | None = setting(
        None,
        "Penalty on tokens that occurred before, however often they occurred.",
        metavar="X",
        within=(-2.0, 2.0),
        shown="llama.cpp's",
        answer=True,
        group=MORE,
    )
    frequency_penalty: float | None = setting(
        None,
        "Penalty on tokens for each time that they occurred.",
        metavar="X",
        within=(-2.0, 2.0),
        shown="llama.cpp's",
        answer=True,
        group=MORE,
    )
    dry_multiplier: float | None = setting(
        None,
        "Penalty on repeated phrases (DRY); 0 turns it off.",
        metavar="X",
        within=(0.0, 100.0),
        shown="llama.cpp's",
        answer=True,
        group=MORE,
    )
    dry_base: float | None = setting(
        None,
        "Factor by which the DRY penalty grows with each further token of a repeated phrase.",
        metavar="X",
        within=(1.0, 100.0),
        shown="llama.cpp's",
        answer=True,
        group=MORE,
    )
    dry_allowed_length: int | None = setting(
        None,
        "Length of the longest repeated phrase without a DRY penalty, in tokens.",
        metavar="N",
        within=(0, 16777216),
        shown="llama.cpp's",
        answer=True,
        group=MORE,
    )
    dry_penalty_last_n: int | None = setting(
        None,
        "Number of latest tokens in which DRY searches repeated phrases.",
        metavar="N",
        within=(0, 16777216),
        shown="llama.cpp's",
        answer=True,
        group=MORE,
    )
    xtc_probability: float | None = setting(
        None,
        "Probability of dropping the most likely tokens (XTC); 0 turns it off.",
        metavar="P",
        within=(0.0, 1.0),
        shown="llama.cpp's",
        answer=True,
        group=MORE,
    )
    xtc_threshold: float | None = setting(
        None,
        "Probability above which XTC drops tokens.",
        metavar="P",
        within=(0.0, 1.0),
        shown="llama.cpp's",
        answer=True,
        group=MORE,
    )
    mirostat: int | None = setting(
        None,
        "Mirostat 1 or 2, which keeps the surprise of the tokens constant; 0 turns it off.",
        metavar="N",
        within=(0, 2),
        shown="llama.cpp's",
        answer=True,
        group=MORE,
    )
    mirostat_tau: float | None = setting(
        None,
        "Target surprise of Mirostat.",
        metavar="X",
        within=(0.0, 100.0),
        shown="llama.cpp's",
        answer=True,
        group=MORE,
    )
    mirostat_eta: float | None = setting(
        None,
        "Learning rate of Mirostat.",
        metavar="X",
        within=(0.0, 10.0),
        shown="llama.cpp's",
        answer=True,
        group=MORE,
    )
    dynatemp_range: float | None = setting(
        None,
        "Range of the dynamic temperature, which depends on each token's entropy.",
        metavar="X",
        within=(0.0, 100.0),
        shown="llama.cpp's",
        answer=True,
        group=MORE,
    )
    dynatemp_exponent: float | None = setting(
        None,
        "Exponent of the entropy in the dynamic temperature.",
        metavar="X",
        within=(0.0, 100.0),
        shown="llama.cpp's",
        answer=True,
        group=MORE,
    )

    def fields(self) -> dict[str, Any]:
        """Return these settings as fields of a request in the format of llama.cpp's server."""
        given = {name: getattr(self, name) for name in self.declared()}
        given["temperature"] = given.pop("temp")
        given["stop"] = list(self.stop)
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class Config(Settings):
    """All settings with which a model is run. Make a checked configuration with `Config.build`.

    Sizes are in bytes. of_policies: the settings of policies that the user gave, by name. Settings
    that the chosen policy does not have are ignored.
    """

    model: Path = setting(
        MISSING,
        "GGUF file, or hf:OWNER/NAME[/FILE]. It must be a Mixture-of-Experts model. hf: downloads "
        "it from the Hugging Face Hub.",
        shown="the demo",
        group=MODEL,
    )
    low: Path | None = setting(
        None,
        "Second GGUF of the same model in a lower precision.",
        group=PRECISION,
    )
    mmproj: Path | None = setting(
        None,
        "File of the model's image encoder (mmproj), for images in messages; none: text only.",
        shown="mmproj*.gguf in the model's folder",
        conversation=True,
        group=MORE,
    )
    image_max_tokens: int | None = setting(
        None,
        "Maximum number of tokens of an image, if the model can scale images. Fewer tokens take "
        "less memory and time, and show less detail.",
        within=(1, 65536),
        shown="the model's limit",
        conversation=True,
        group=MORE,
    )
    ram: int | None = setting(
        None,
        "Memory limit, such as 6GiB. It covers everything that the model needs. 6G means 6GiB, "
        "and 500MB means 500,000,000 bytes.",
        unit=SIZE,
        shown="free memory",
        group=MEMORY,
    )
    vram: int | None = setting(
        None,
        "Memory limit on the GPU.",
        unit=SIZE,
        shown="free GPU memory",
        group=MEMORY,
    )
    device: str = setting(
        "auto",
        "Compute on cpu, gpu or cuda1. cuda1 is the second GPU. auto uses a GPU if there is one.",
        group=MODEL,
    )
    misses: str | None = setting(
        None,
        "How an expert that is not in GPU memory is computed: copy (copied to the GPU first), "
        "compute (on the CPU), or auto (the faster way for each expert).",
        metavar="HOW",
        choices=MISSES,
        shown="auto",
        group=MORE,
    )
    expert_ram: int | None = setting(
        None,
        "Memory limit for the expert cache alone, for experiments.",
        unit=SIZE,
        group=MORE,
    )
    policy: str | None = setting(
        None,
        lambda: f"Policy that decides which experts stay in memory: {', '.join(known_policies())}.",
        shown="by fit",
        group=MORE,
    )
    high_tier: str | None = setting(
        None,
        "Precision of the most important experts, such as q4_k.",
        metavar="NAME",
        shown=(
            "the best precision in the file, or the best that fits in memory if the policy mixes "
            "precisions"
        ),
        group=MORE,
    )
    low_tier: str | None = setting(
        None,
        "Lower precision, such as q2_k. It is for less important experts. "
        f"{SKIP_TIER} means that these experts are not computed.",
        metavar="NAME",
        shown="by policy",
        group=PRECISION,
    )
    renormalize: bool = setting(
        False,
        f"With --low-tier {SKIP_TIER}: scale up the gate (router) weights of a token's experts "
        "that are not skipped.",
        group=MORE,
    )
    ctx: int | None = setting(
        None,
        "Context length in tokens.",
        within=(8, 2**24),
        shown="as memory allows",
        group=MODEL,
    )
    kv: str = setting(
        DEFAULT_KV,
        "Type of the KV cache: f16 or q8_0. q8_0 takes half of the memory and needs flash "
        "attention.",
        metavar="NAME",
        choices=tuple(KV_TYPES),
        group=MEMORY,
    )
    ubatch: int | None = setting(
        None,
        "Micro-batch: number of prompt tokens that are computed at once. Larger values read "
        "missing experts less often and need more scratch memory.",
        within=(1, 65536),
        shown="by memory",
        group=MORE,
    )
    threads: int | None = setting(
        None,
        "Number of compute threads. At most one per core is used.",
        within=(1, 1024),
        shown="the free cores",
        group=MODEL,
    )
    exact: bool = setting(
        False,
        "Compute exactly the same bits as llama.cpp. Experts are then computed in the high "
        "precision, without repacked weights, and with a fixed number of threads. Answers that a "
        "server decodes together may still differ.",
        group=PRECISION,
    )
    max_tokens: int | None = setting(
        None,
        "Maximum length in tokens. It applies to each answer.",
        within=(1, 2**24),
        shown="rest of context",
        group=ANSWER,
    )
    temp: float = inherit(Sampling, "temp")
    top_k: int = inherit(Sampling, "top_k")
    top_p: float = inherit(Sampling, "top_p")
    min_p: float = inherit(Sampling, "min_p")
    seed: int | None = inherit(Sampling, "seed")
    stop: tuple[str, ...] = inherit(Sampling, "stop")
    typical_p: float | None = inherit(Sampling, "typical_p")
    top_n_sigma: float | None = inherit(Sampling, "top_n_sigma")
    repeat_penalty: float | None = inherit(Sampling, "repeat_penalty")
    repeat_last_n: int | None = inherit(Sampling, "repeat_last_n")
    presence_penalty: float | None = inherit(Sampling, "presence_penalty")
    frequency_penalty: float | None = inherit(Sampling, "frequency_penalty")
    dry_multiplier: float | None = inherit(Sampling, "dry_multiplier")
    dry_base: float | None = inherit(Sampling, "dry_base")
    dry_allowed_length: int | None = inherit(Sampling, "dry_allowed_length")
    dry_penalty_last_n: int | None = inherit(Sampling, "dry_penalty_last_n")
    xtc_probability: float | None = inherit(Sampling, "xtc_probability")
    xtc_threshold: float | None = inherit(Sampling, "xtc_threshold")
    mirostat: int | None = inherit(Sampling, "mirostat")
    mirostat_tau: float | None = inherit(Sampling, "mirostat_tau")
    mirostat_eta: float | None = inherit(Sampling, "mirostat_eta")
    dynatemp_range: float | None = inherit(Sampling, "dynatemp_range")
    dynatemp_exponent: float | None = inherit(Sampling, "dynatemp_exponent")
    think: str | None = setting(
        None,
        "Turn the thinking of a reasoning model on or off.",
        choices=("on", "off"),
        shown="as the model decides",
        answer=True,
        group=MORE,
    )
    cache_ram: int | None = setting(
        None,
        "Memory for the KV cache of earlier prompts, as a part of --ram; 0 for none.",
        unit=RATE,
        metavar="SIZE",
        shown="by memory",
        conversation=True,
        group=MORE,
    )
    prompt_cache: Path | None = setting(
        None,
        "Folder in which conversations are saved. They are not computed again after a restart.",
        metavar="DIR",
        conversation=True,
        group=MEMORY,
    )
    prompt_cache_limit: int = setting(
        8 * 2**30,
        "Size limit of --prompt-cache. The least recently used prompts are deleted.",
        unit=SIZE,
        shown="8GiB",
        conversation=True,
        group=MORE,
    )
    keep_messages: bool = setting(
        True,
        "Save chats on a terminal, for --resume. The user cache keeps the last 20 chats, readable "
        "only by you. Single answers (-p, stdin) are not saved there.",
        answer=True,
        group=MORE,
    )
    system: str | None = setting(
        None,
        "System prompt.",
        metavar="TEXT",
        group=ANSWER,
    )
    importance: str = setting(
        "window",
        "How the importance of prompt tokens is computed. window: from the attention of the "
        "prompt's last tokens. exact: from the attention of all tokens, without flash attention. "
        "load: all tokens are equally important.",
        choices=("window", "exact", "load"),
        option=False,
    )
    importance_window: int = setting(
        32,
        "Number of tokens at the end of a prompt whose attention determines the importance of the "
        "prompt's tokens. Used only with importance=window.",
        within=(1, 65536),
        option=False,
    )
    direct_io: bool = setting(
        True, "Read experts with direct I/O, without the page cache.", option=False
    )
    use_extra_bufts: bool | None = setting(
        None,
        "Change the layout of weights outside the experts so that this CPU computes faster.",
        shown="yes with --policy plain; otherwise yes only if experts are repacked for this CPU",
        option=False,
    )
    layout: str = setting(
        "auto",
        "Layout of experts in memory. file: as in the file. cpu: repacked for this CPU (faster to "
        "compute, slower to read). auto: cpu if nearly all experts stay in memory.",
        choices=("auto", "file", "cpu"),
        group=MORE,
    )
    use_mmap: bool | None = setting(
        None,
        "With --policy plain: map the file into memory, so that weights may exceed memory.",
        shown="the file is mapped if it has one precision and --ram is not given",
        option=False,
    )
    remember: bool | None = setting(
        None,
        "Save usage statistics of a model in the user cache: how often each expert is used, and "
        "tuned settings of policies.",
        shown="yes for conversations",
        conversation=True,
        group=MORE,
    )
    # Settings of measurements and studies.
    force_managed: bool = setting(
        False,
        "Manage experts in memory with moe-edge's expert store, even if all of them fit in memory.",
        option=False,
    )
    logits_all: bool = setting(
        False, "Allocate logits for every token of a batch, for evaluation.", option=False
    )
    exact_tiers: bool = setting(
        False,
        "Compute each expert in the precision that the policy requests, even if memory has a "
        "better copy. For measuring quality.",
        option=False,
    )
    io_threads: int = setting(4, "Threads that read experts.", within=(1, 64), option=False)
    of_policies: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def build(cls, **settings: Any) -> Config:
        """Return a checked configuration from settings of this class and of policies.

        The setting `policy` may be a name, a class, or text "module:Class". A policy's setting with
        the value None counts as not given.

        Raises ConfigError for a wrong type, a value out of range or an unknown name. For an unknown
        name, the message suggests the nearest known name. Raises PolicyError for a policy class
        that cannot be used.
        """
        settings["policy"] = policy_name(settings.get("policy"))
        own, others = cls.declared(), policy_settings()
        known = {**own, **others}
        for key, value in settings.items():
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
                hint = f"; did you mean '{near[0]}'?" if near else f"; known: {', '.join(known)}"
                raise ConfigError(f"unknown setting '{key}'{hint}")
            if isinstance(value, str) and Path in known[key].kinds:
                settings[key] = Path(value)
        if settings.get("model") is None:
            raise ConfigError("the setting 'model' is missing: give a GGUF file or hf:OWNER/NAME")
        if settings.get("exact"):
            settings |= _exact(settings)
        given = {k: v for k, v in settings.items() if k in others and v is not None}
        for key, value in given.items():
            others[key].check(value)
        return cls(**{k: v for k, v in settings.items() if k in own}, of_policies=given)

    def with_changes(self, **settings: Any) -> Config:
        """Return a checked copy with some settings replaced."""
        unchanged = {name: getattr(self, name) for name in self.declared()}
        return Config.build(**(unchanged | dict(self.of_policies) | settings))

    def compared(self, **settings: Any) -> Config:
        """Return a checked copy with some settings replaced, for example with another policy.

        Settings that the policy of the copy does not have are dropped.
        """
        other = self.with_changes(**settings)
        if other.policy is None:
            return other
        has = POLICIES[other.policy].Settings.declared() if other.policy in POLICIES else ()
        return other.with_changes(**dict.fromkeys(k for k in other.of_policies if k not in has))

    def given(self, name: str) -> Any:
        """Return the value of a setting of this class or of a policy, by name.

        If the user did not give the setting, the result is the default for a setting of this class,
        and None for a setting of a policy.
        """
        return getattr(self, name) if name in self.declared() else self.of_policies.get(name)

    def plan_settings(self) -> dict[str, Any]:
        """Return the settings that can affect a memory plan, as a dict from names to values.

        A memory plan decides how memory is divided among the parts of a model. The settings of
        policies are included. The path of the model, and settings that only affect answers (such as
        the temperature), are left out.
        """
        apart = ("model", "mmproj", "prompt_cache_limit")
        kept = [name for name, each in self.declared().items() if not each.answer]
        own = {name: getattr(self, name) for name in kept if name not in apart}
        return own | dict(self.of_policies)

    @property
    def n_threads(self) -> int:
        """The number of compute threads: the setting `threads`, limited to the usable cores.

        If the setting was not given, it is the default number of threads for this machine.
        """
        return compute_threads(self.threads)

    @property
    def adapts_threads(self) -> bool:
        """Whether an answer may use fewer threads while other programs need the cores.

        This is not allowed if the user set `threads`, a seed or `exact`. The number of threads
        changes the order of sums in attention, so the answer would depend on the load of the
        machine.
        """
        return self.threads is None and self.seed is None and not self.exact

    @property
    def sampling(self) -> Sampling:
        """The sampling settings that apply to answers without their own sampling settings."""
        return Sampling(**{name: getattr(self, name) for name in Sampling.declared()})

    def asks_less(self, policy: type[Policy]) -> bool:
        """Return whether these settings let the policy compute experts below the best precision.

        Skipping experts counts as well. If the setting `exact` is set, the result is False.
        """
        if self.exact:
            return False
        if self.low_tier == SKIP_TIER:
            return True
        if policy.precisions.lossless is None:  # no setting makes this policy lossless
            return policy.precisions.most > 1
        settings = self.settings_of(policy)
        asked = [
            (getattr(settings, name), value) for name, value in policy.precisions.lossless.items()
        ]
        if any(given not in (None, value) for given, value in asked):
            return True
        # A setting without a value counts as lossless, unless the user named a lower precision.
        lower = self.low_tier is not None or self.low is not None
        return lower and any(given is None for given, _ in asked)

    def settings_of(self, policy: type[Policy]) -> Settings:
        """Return the settings of one policy: the given values, and its defaults for the others."""
        return policy.Settings.of(self.of_policies)


def policy_name(given: str | type[Policy] | None) -> str | None:
    """Return the name of a policy that is given by name, as text "module:Class", or as a class.

    None is returned unchanged. Raises SettingError for an unknown name. Raises PolicyError for a
    class that cannot be used as a policy.
    """
    if given is None:
        return None
    name = POLICIES.named(given) if isinstance(given, (str, type)) else given
    replace(Config.declared()["policy"], choices=known_policies()).check(name)
    return name


def _exact(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return further settings that the setting `exact` implies.

    Raises ConfigError if the user asks for another layout of weights. Also raises ConfigError for
    more threads than cores. Fewer threads would run then, which changes the order of sums.
    """
    threads, cores = settings.get("threads") or 1, usable_cores()
    if threads > cores:
        raise ConfigError(
            f"--threads {threads} cannot be used with --exact: this process may use {cores} "
            f"core{'s' * (cores != 1)}. Use --threads {cores}, or leave --exact out"
        )
    if settings.get("layout") == "cpu" or settings.get("use_extra_bufts"):
        raise ConfigError(
            "--exact keeps all weights as they are in the file, and --layout cpu changes them: "
            "leave one of the two options out"
        )
    return {"layout": "file", "use_extra_bufts": False}
