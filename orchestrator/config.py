"""The settings of one engine: frozen, built once, checked where they come in."""

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
    FROM_0,
    MEMORY,
    MODEL,
    MORE,
    PRECISION,
    RATE,
    SIZE,
    Settings,
    again,
    setting,
)

MISSES = ("auto", "copy", "compute")
# llama.cpp takes 256 sequences, one of them the conversation.
MOST_SEQUENCES = 255


def native_log_enabled() -> bool:
    """Whether llama.cpp's own log goes to stderr (MOE_EDGE_LOG set and not 0)."""
    return os.environ.get("MOE_EDGE_LOG", "") not in ("", "0")


@dataclass(frozen=True)
class Sampling(Settings):
    """How the tokens of an answer are drawn: the only declaration of these settings, from which
    Config and front ends with settings for each request take theirs.

    temp 0 takes the most likely token. seed None draws differently each time. An answer ends before
    the first of the texts in stop. For a setting that is None llama.cpp's default is used.
    """

    temp: float = setting(
        0.7,
        "Temperature; 0 takes the likeliest.",
        metavar="T",
        within=(0.0, 100.0),
        group=ANSWER,
    )
    top_k: int = setting(
        40,
        "Draw from the N likeliest tokens; 0 for all.",
        within=(0, 2**31 - 1),
        answer=True,
        group=MORE,
    )
    top_p: float = setting(
        0.95,
        "Nucleus sampling.",
        metavar="P",
        within=(0.0, 1.0),
        group=ANSWER,
    )
    min_p: float = setting(
        0.0,
        "Leave out tokens of less than P times the likeliest one's probability.",
        metavar="P",
        within=(0.0, 1.0),
        answer=True,
        group=MORE,
    )
    seed: int | None = setting(
        None,
        "Seed of the sampling. With it the number of compute threads stays the same, and the same "
        "command gives the same answer if experts have one precision and --ram, --ctx and --ubatch "
        "are given: other values of these change the rounding, and so may the answer. With several "
        "precisions, an answer also depends on which experts are in memory.",
        within=(0, 2**32 - 1),
        group=ANSWER,
    )
    stop: tuple[str, ...] = setting(
        (),
        "A text that ends the answer. The answer leaves it out, and several may be given.",
        metavar="TEXT",
        repeated=True,
        group=ANSWER,
    )

    typical_p: float | None = setting(
        None,
        "Locally typical sampling; 1 for none.",
        metavar="P",
        within=(0.0, 1.0),
        shown="llama.cpp's",
        answer=True,
        group=MORE,
    )
    top_n_sigma: float | None = setting(
        None,
        "Keep tokens within N standard deviations of the likeliest.",
        metavar="N",
        within=(0.0, 100.0),
        shown="llama.cpp's",
        answer=True,
        group=MORE,
    )
    repeat_penalty: float | None = setting(
        None,
        "Make tokens that came before less likely; 1 for no change.",
        metavar="X",
        within=(0.01, 10.0),
        shown="llama.cpp's",
        answer=True,
        group=MORE,
    )
    repeat_last_n: int | None = setting(
        None,
        "How many of the last tokens count as repeated.",
        metavar="N",
        within=(0, 16777216),
        shown="llama.cpp's",
        answer=True,
        group=MORE,
    )
    presence_penalty: float | None = setting(
        None,
        "Make tokens that came before less likely, once.",
        metavar="X",
        within=(-2.0, 2.0),
        shown="llama.cpp's",
        answer=True,
        group=MORE,
    )
    frequency_penalty: float | None = setting(
        None,
        "Make tokens less likely, for each time that they came before.",
        metavar="X",
        within=(-2.0, 2.0),
        shown="llama.cpp's",
        answer=True,
        group=MORE,
    )
    dry_multiplier: float | None = setting(
        None,
        "Make the repetition of whole phrases less likely (DRY); 0 for no change.",
        metavar="X",
        within=(0.0, 100.0),
        shown="llama.cpp's",
        answer=True,
        group=MORE,
    )
    dry_base: float | None = setting(
        None,
        "How fast that grows with the phrase.",
        metavar="X",
        within=(1.0, 100.0),
        shown="llama.cpp's",
        answer=True,
        group=MORE,
    )
    dry_allowed_length: int | None = setting(
        None,
        "Tokens of a phrase that may be repeated.",
        metavar="N",
        within=(0, 16777216),
        shown="llama.cpp's",
        answer=True,
        group=MORE,
    )
    dry_penalty_last_n: int | None = setting(
        None,
        "How many of the last tokens DRY looks at.",
        metavar="N",
        within=(0, 16777216),
        shown="llama.cpp's",
        answer=True,
        group=MORE,
    )
    xtc_probability: float | None = setting(
        None,
        "How often to leave out the likeliest tokens (XTC); 0 for never.",
        metavar="P",
        within=(0.0, 1.0),
        shown="llama.cpp's",
        answer=True,
        group=MORE,
    )
    xtc_threshold: float | None = setting(
        None,
        "Leave out tokens that are likelier than this.",
        metavar="P",
        within=(0.0, 1.0),
        shown="llama.cpp's",
        answer=True,
        group=MORE,
    )
    mirostat: int | None = setting(
        None,
        "Mirostat 1 or 2, which keeps the surprise constant; 0 for none.",
        metavar="N",
        within=(0, 2),
        shown="llama.cpp's",
        answer=True,
        group=MORE,
    )
    mirostat_tau: float | None = setting(
        None,
        "The surprise that it keeps.",
        metavar="X",
        within=(0.0, 100.0),
        shown="llama.cpp's",
        answer=True,
        group=MORE,
    )
    mirostat_eta: float | None = setting(
        None,
        "How fast it adapts.",
        metavar="X",
        within=(0.0, 10.0),
        shown="llama.cpp's",
        answer=True,
        group=MORE,
    )
    dynatemp_range: float | None = setting(
        None,
        "Let the temperature differ by this much with each token's entropy.",
        metavar="X",
        within=(0.0, 100.0),
        shown="llama.cpp's",
        answer=True,
        group=MORE,
    )
    dynatemp_exponent: float | None = setting(
        None,
        "How the entropy changes it.",
        metavar="X",
        within=(0.0, 100.0),
        shown="llama.cpp's",
        answer=True,
        group=MORE,
    )

    def fields(self) -> dict[str, Any]:
        """Return these settings as the fields of a request to llama.cpp's server."""
        given = {name: getattr(self, name) for name in self.declared()}
        given["temperature"] = given.pop("temp")
        given["stop"] = list(self.stop)
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class Config(Settings):
    """One engine's settings; sizes in bytes. Make it with Config.build.

    of_policies: settings of policies that were given, by name, whichever policy will run.
    """

    model: Path = setting(
        MISSING,
        "A GGUF, or hf:OWNER/NAME[/FILE]. It is of a Mixture-of-Experts model; hf: fetches one "
        "from the Hugging Face Hub.",
        shown="the demo",
        group=MODEL,
    )
    low: Path | None = setting(
        None,
        "The same model in a lower precision, as a second GGUF.",
        group=PRECISION,
    )
    ram: int | None = setting(
        None,
        "Cap on everything the model takes, as 6GiB (6G means the same) or 500MB.",
        unit=SIZE,
        shown="free memory",
        group=MEMORY,
    )
    vram: int | None = setting(
        None,
        "The same of a GPU's memory.",
        unit=SIZE,
        shown="what is free",
        group=MEMORY,
    )
    device: str = setting(
        "auto",
        "What computes: cpu, gpu or cuda1. cuda1 is the second GPU, and auto takes a GPU where "
        "there is one.",
        group=MODEL,
    )
    misses: str | None = setting(
        None,
        "How experts that the GPU lacks are served: copy (copied to the GPU), compute (computed "
        "on the CPU), or auto (the faster way for each expert).",
        metavar="HOW",
        choices=MISSES,
        shown="auto",
        group=MORE,
    )
    expert_ram: int | None = setting(
        None,
        "Cap on the expert slots alone, for experiments.",
        unit=SIZE,
        group=MORE,
    )
    policy: str | None = setting(
        None,
        f"The policy that decides what stays in memory: {', '.join(known_policies())}.",
        shown="by fit",
        group=MORE,
    )
    high_tier: str | None = setting(
        None,
        "Precision of the experts that matter most, as q4_k.",
        metavar="NAME",
        shown="the best, or by fit where the policy mixes them",
        group=MORE,
    )
    low_tier: str | None = setting(
        None,
        "Lower precision to use, as q2_k. It is for experts that matter less; with "
        f"{SKIP_TIER} these are left out.",
        metavar="NAME",
        shown="by policy",
        group=PRECISION,
    )
    renormalize: bool = setting(
        False,
        f"With --low-tier {SKIP_TIER}: the weights of the other experts make up for the skipped.",
        group=MORE,
    )
    ctx: int | None = setting(
        None,
        "Context in tokens.",
        within=(8, 2**24),
        shown="by memory and the model",
        group=MODEL,
    )
    kv: str = setting(
        DEFAULT_KV,
        "Precision of the context, f16 or q8_0. It is that of its keys and values; q8_0 takes half "
        "of the memory, and needs flash attention.",
        metavar="NAME",
        choices=tuple(KV_TYPES),
        group=MEMORY,
    )
    ubatch: int | None = setting(
        None,
        "Tokens of a prompt that are computed at once: with more of them, experts that are not in "
        "memory are read less often, and scratch takes more.",
        within=(1, 65536),
        shown="by memory",
        group=MORE,
    )
    threads: int | None = setting(
        None,
        "Compute threads. There is at most one for each core.",
        within=(1, 1024),
        shown="the cores that are free",
        group=MODEL,
    )
    exact: bool = setting(
        False,
        "Compute llama.cpp's own bits. Every expert is in the high precision, all weights are as "
        "in the file, and there are as many threads all the time. Answers that a server decodes "
        "together may differ from answers alone, because their sums have another order.",
        group=PRECISION,
    )
    max_tokens: int | None = setting(
        None,
        "Longest answer in tokens.",
        within=(1, 2**24),
        shown="what has room",
        group=ANSWER,
    )
    temp: float = again(Sampling, "temp")
    top_k: int = again(Sampling, "top_k")
    top_p: float = again(Sampling, "top_p")
    min_p: float = again(Sampling, "min_p")
    seed: int | None = again(Sampling, "seed")
    stop: tuple[str, ...] = again(Sampling, "stop")
    typical_p: float | None = again(Sampling, "typical_p")
    top_n_sigma: float | None = again(Sampling, "top_n_sigma")
    repeat_penalty: float | None = again(Sampling, "repeat_penalty")
    repeat_last_n: int | None = again(Sampling, "repeat_last_n")
    presence_penalty: float | None = again(Sampling, "presence_penalty")
    frequency_penalty: float | None = again(Sampling, "frequency_penalty")
    dry_multiplier: float | None = again(Sampling, "dry_multiplier")
    dry_base: float | None = again(Sampling, "dry_base")
    dry_allowed_length: int | None = again(Sampling, "dry_allowed_length")
    dry_penalty_last_n: int | None = again(Sampling, "dry_penalty_last_n")
    xtc_probability: float | None = again(Sampling, "xtc_probability")
    xtc_threshold: float | None = again(Sampling, "xtc_threshold")
    mirostat: int | None = again(Sampling, "mirostat")
    mirostat_tau: float | None = again(Sampling, "mirostat_tau")
    mirostat_eta: float | None = again(Sampling, "mirostat_eta")
    dynatemp_range: float | None = again(Sampling, "dynatemp_range")
    dynatemp_exponent: float | None = again(Sampling, "dynatemp_exponent")
    think: str | None = setting(
        None,
        "Let a model that can think before it answers do so, or not.",
        choices=("on", "off"),
        shown="the model's way",
        answer=True,
        group=MORE,
    )
    cache_ram: int | None = setting(
        None,
        "Memory for prompts that were read before, within --ram; 0 for none.",
        unit=RATE,
        metavar="SIZE",
        shown="by memory",
        conversation=True,
        group=MORE,
    )
    prompt_cache: Path | None = setting(
        None,
        "Keeps conversations, over restarts. What was read of them is not read again.",
        metavar="DIR",
        conversation=True,
        group=MEMORY,
    )
    prompt_cache_limit: int = setting(
        8 * 2**30,
        "What that folder may take; the least recently used prompts go.",
        unit=SIZE,
        shown="8GiB",
        conversation=True,
        group=MORE,
    )
    keep_messages: bool = setting(
        True,
        "Keep the messages of a chat on a terminal, for --resume. They are in the user cache, and "
        "only their owner can read them; the last 20 chats stay. A single answer (-p, stdin) is "
        "never kept there.",
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
        "Where a prompt's token scores come from: the attention of its last queries (window), of "
        "all of them (exact, without flash attention), or every token alike (load).",
        choices=("window", "exact", "load"),
        option=False,
    )
    importance_window: int = setting(32, "Queries of that window.", within=(1, 65536), option=False)
    exact_tiers: bool = setting(
        False,
        "A low request computes in low even where a high copy is in memory, to measure quality.",
        option=False,
    )
    io_threads: int = setting(4, "Threads that read experts.", within=(1, 64), option=False)
    direct_io: bool = setting(True, "Reads go around the page cache.", option=False)
    use_extra_bufts: bool | None = setting(
        None,
        "Dense weights are repacked for this CPU.",
        shown="where experts lie in this CPU's own layout, and on the plain path",
        option=False,
    )
    layout: str = setting(
        "auto",
        "How experts lie in memory: as in the file (file), or in this CPU's own layout where it "
        "has one (cpu), which computes faster and costs time at each read. auto: cpu where nearly "
        "all of them stay in memory.",
        choices=("auto", "file", "cpu"),
        group=MORE,
    )
    use_mmap: bool | None = setting(
        None,
        "The plain path maps the weights, which need not fit the memory then.",
        shown="where the file has one precision and --ram is not given",
        option=False,
    )
    force_managed: bool = setting(
        False, "Experts live in the store even where everything fits.", option=False
    )
    logits_all: bool = setting(
        False, "Room for the logits of every token of a batch, for evaluation.", option=False
    )
    scored: int = setting(
        0,
        "Tokens of a prompt that is scored in parts whose logits are there at once, at most.",
        within=FROM_0,
        option=False,
    )
    sequences: int = setting(
        0,
        "How many sequences may decode together beside the conversation; they share the context.",
        within=(0, MOST_SEQUENCES),
        option=False,
    )
    beside: int = setting(
        0,
        "Bytes that the process takes for itself, beside the model and what a chat takes.",
        within=FROM_0,
        unit=SIZE,
        option=False,
    )
    beside_token: int = setting(
        0, "The same for each token of the vocabulary.", within=FROM_0, unit=SIZE, option=False
    )
    conversations: bool = setting(
        False,
        "Memory is set aside for prompts that were read before, and slots of experts give way to a "
        "context and to scratch as far as these are used.",
        option=False,
    )
    remember: bool | None = setting(
        None,
        "Keep what runs learn of a model in the user cache: how often each expert is used, and the "
        "settings that policies tuned.",
        shown="yes where conversations are held",
        conversation=True,
        group=MORE,
    )
    of_policies: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def build(cls, **settings: Any) -> Config:
        """The checked configuration, from its own settings and those of policies. None for a
        policy's setting counts as not given.

        Raises ConfigError for an unknown key (with the nearest known name), a value of the wrong
        type, or one out of range.
        """
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
            raise ConfigError("the setting 'model' is missing")
        check_policy(settings.get("policy"))
        if settings.get("exact"):
            settings |= _exact(settings)
        given = {k: v for k, v in settings.items() if k in others and v is not None}
        for key, value in given.items():
            others[key].check(value)
        return cls(**{k: v for k, v in settings.items() if k in own}, of_policies=given)

    def with_changes(self, **settings: Any) -> Config:
        """A checked copy with some settings replaced."""
        unchanged = {name: getattr(self, name) for name in self.declared()}
        return Config.build(**(unchanged | dict(self.of_policies) | settings))

    def compared(self, **settings: Any) -> Config:
        """As with_changes, for a comparison: without settings that its policy does not have."""
        other = self.with_changes(**settings)
        if other.policy is None:
            return other
        has = POLICIES[other.policy].Settings.declared() if other.policy in POLICIES else ()
        return other.with_changes(**dict.fromkeys(k for k in other.of_policies if k not in has))

    def given(self, name: str) -> Any:
        """A setting's value, or None where nothing was asked for."""
        return getattr(self, name) if name in self.declared() else self.of_policies.get(name)

    def of_run(self) -> dict[str, Any]:
        """The settings by which what runs may differ: those of an answer and the model are none."""
        apart = ("model", "prompt_cache_limit")
        kept = [name for name, each in self.declared().items() if not each.answer]
        own = {name: getattr(self, name) for name in kept if name not in apart}
        return own | dict(self.of_policies)

    @property
    def n_threads(self) -> int:
        """Number of compute threads, at most one for each core that this process may use."""
        return compute_threads(self.threads)

    @property
    def adapts_threads(self) -> bool:
        """Whether an answer may use fewer threads while other programs take cores. Attention sums
        in another order with another number of threads, so that the answer to a given seed would
        depend on the load."""
        return self.threads is None and self.seed is None and not self.exact

    @property
    def sampling(self) -> Sampling:
        """How an answer's tokens are chosen where nothing else is asked for."""
        return Sampling(**{name: getattr(self, name) for name in Sampling.declared()})

    def asks_less(self, policy: type[Policy]) -> bool:
        """Whether anything may be computed below the best tier in use, with this policy. A file
        with several tiers asks for nothing by itself. A low tier and a second file do, unless the
        policy's settings say that it computes all in the best tier; skipping does in any case."""
        if self.exact:
            return False
        if self.low_tier == SKIP_TIER:
            return True
        if policy.precisions.lossless is None:
            return policy.precisions.most > 1
        settings = self.settings_of(policy)
        asked = [
            (getattr(settings, name), value) for name, value in policy.precisions.lossless.items()
        ]
        if any(given not in (None, value) for given, value in asked):
            return True
        lower = self.low_tier is not None or self.low is not None
        return lower and any(given is None for given, _ in asked)

    def settings_of(self, policy: type[Policy]) -> Settings:
        """The settings of one policy: those given, the rest as it declares them."""
        return policy.Settings.of(self.of_policies)


def check_policy(name: str | None) -> None:
    """Raises SettingError for a name that no policy has; None is none."""
    if name is not None:
        replace(Config.declared()["policy"], choices=known_policies()).check(name)


def _exact(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layout that `exact` stands for. Raises ConfigError if another layout is asked for,
    or more threads than there are cores: the number would be lowered, and with it the order of
    sums would change."""
    threads, cores = settings.get("threads") or 1, usable_cores()
    if threads > cores:
        raise ConfigError(
            f"--threads {threads} cannot be used with --exact: this process may use {cores} "
            f"core{'s' * (cores != 1)}. Use --threads {cores}, or leave --exact out"
        )
    if settings.get("layout") == "cpu" or settings.get("use_extra_bufts"):
        raise ConfigError(
            "--exact keeps all weights as they are in the file, and --layout cpu does not: leave "
            "one of the two out"
        )
    return {"layout": "file", "use_extra_bufts": False}
