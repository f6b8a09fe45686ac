"""The memory plan of a model: the policy and its tiers, and the memory that its slots get.

It also chooses the context length and the micro-batch size if the user did not set them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from gguf_tools.experts import KV_TYPES, ExpertModel
from gguf_tools.file.layout import BLOCK, EMBEDDINGS, pad
from gguf_tools.units import format_least, format_size
from orchestrator.allocation.slots import FileTier, ModelShape, Rules
from orchestrator.config import Config
from orchestrator.errors import ConfigError, PolicyError
from orchestrator.events import SKIP_TIER
from orchestrator.plan import footprint
from orchestrator.plan.footprint import LEAST_CONTEXT, SIZES
from orchestrator.plan.records import (
    CELL_STEP,
    Counted,
    Device,
    Line,
    Machine,
    Plan,
    PlanRequest,
    Refusal,
    SharedMemory,
    Size,
    longest_context,
)
from orchestrator.policy import BASELINE, DEFAULT, PLAIN, Policy, policy_class
from orchestrator.policy.base import UNKNOWN, History, Placement, TierOffer, place
from orchestrator.settings import Settings, flag_of

# The share of the memory left after the dense weights that the KV cache may take. The expert cache
# hits about as often with the other fifteen sixteenths, and a step reads only the filled part of
# the KV cache.
SHARE = 1 / 16

# How often an answer reads an expert without a slot, per token of its prompt and relative to the
# mean use of an expert. An answer has an eighth of its prompt's length: the medians of
# conversations in Splitwise (ISCA 2024, Figure 3) are 129 and 1,020 tokens. Experts without a slot
# are the least used ones; half the mean is a safe estimate (docs/experiments/engine.md,
# "What a long prompt does to the cache").
ABSENT_USE = 1 / 8 / 2


# Returns the slot sizes of a model reduced to some of its tiers, in the memory that holds its
# experts.
ShapeOf = Callable[[tuple[FileTier, ...]], ModelShape]

# A memory size that no machine reaches, and the maximum number of corrections of the lower bound in
# the search for the smallest limit.
_NO_END = 1 << 62
_MOST_TRIES = 8


@dataclass(frozen=True, slots=True)
class _TooSmall(Refusal):
    """A refusal because the memory limit is too small for the expert slots that the policy needs.

    needed_bytes is only a lower bound of the smallest limit that works. may_divide: whether
    planning should be tried again with fixed sizes of the slots and the KV cache.
    """

    policy: type[Policy]
    may_divide: bool = True


def plan(
    request: PlanRequest, model: ExpertModel, machine: Machine, history: History = UNKNOWN
) -> Plan | Refusal:
    """Return the memory plan of a model for this machine, or a Refusal if the model does not fit.

    If the whole model fits and no option rules this out, the plan holds all of it in memory.
    Otherwise an expert store reads experts from disk, with the policy that `choose` returns. Lower
    precisions are only used if an option asks for them.

    history: records of earlier runs, from which policies predict. Raises PolicyError or ConfigError
    if the policy, its precisions (tiers) or the KV cache type do not suit the model.
    """
    _check_kv(request.config, model)
    _check_images(request)
    layout = _Layout(request, model, machine, history)
    found = layout.laid_out()
    return layout.refusal(found) if isinstance(found, _TooSmall) else found


def least(
    request: PlanRequest, model: ExpertModel, machine: Machine, history: History = UNKNOWN
) -> Plan | Refusal:
    """Return the plan of a model under the smallest memory limit that works.

    The limit is --vram if the machine has a GPU, otherwise --ram. The result is a refusal if no
    limit that works was found.
    """
    return _Layout(request, model, machine, history).least()


def plan_memory(request: PlanRequest, model: ExpertModel, machine: Machine) -> Plan:
    """Return the memory plan of a model, without using records of earlier runs.

    Raises BudgetError if the model does not fit. The error names the smallest limit that works.
    """
    return planned(plan(request, model, machine))


def planned(found: Plan | Refusal) -> Plan:
    """Return the given plan, or raise BudgetError if a refusal was given instead."""
    if isinstance(found, Refusal):
        raise found.error
    return found


def scratch_bytes(model: ExpertModel, config: Config) -> int:
    """Return the bytes that a model takes in addition to its weights and its KV cache.

    They consist of llama.cpp's temporary buffers, process memory, and copies of the routers that
    the default policy uses to predict experts.
    """
    request = PlanRequest(config.compared(policy=DEFAULT))
    return _Layout(request, model, Machine(0), UNKNOWN).room().scratch_bytes


def own_context(request: PlanRequest, model: ExpertModel) -> int:
    """Return the longest context that the sequences of a request can use together, in tokens.

    It is the training context of the model, times the number of sequences. The result is 0 if the
    file does not state the training context.
    """
    return model.hparams.context_length * (1 + request.needs.sequences)


def default_context(request: PlanRequest, model: ExpertModel) -> int:
    """Return the requested context length in tokens, or LEAST_CONTEXT if none was requested.

    The result is at most the model's training context times the number of sequences.
    """
    asked = request.config.ctx or LEAST_CONTEXT
    return min(asked, own_context(request, model) or asked)


def smallest_default_batch(request: PlanRequest) -> int:
    """Return the smallest micro-batch size that planning may choose without --ubatch, in tokens.

    Usually it is the smallest of SIZES. Some models must compute all tokens of an image in one
    micro-batch. The result is then at least the number of tokens of the largest image.
    """
    return max(SIZES[0], request.needs.image_tokens)


def smallest_batch(request: PlanRequest) -> int:
    """Return the smallest micro-batch size that a plan may use, in tokens.

    If the user set --ubatch, this is the result. Otherwise it is the result of
    `smallest_default_batch`: the smallest of SIZES, or more if an image has more tokens.
    """
    return request.config.ubatch or smallest_default_batch(request)


def micro_batches(request: PlanRequest, most: int) -> list[int]:
    """Return the possible micro-batch sizes for a context of `most` tokens, smallest first.

    The sizes are at most --ubatch if the user set it.
    """
    least, largest = smallest_batch(request), min(request.config.ubatch or most, most)
    images = request.needs.image_tokens
    return sorted({least, *(n for n in SIZES if images <= n <= largest)})


def context_ends(n_tokens: int, most: int) -> tuple[int, int]:
    """Return the (shortest, longest) context length for estimates of memory, in tokens.

    llama.cpp counts the memory for these two lengths. They are the ends of a line: for lengths
    between them, the memory is interpolated linearly.

    The shortest context has n_tokens tokens, one micro-batch. The longest has `most` tokens, but at
    least CELL_STEP more than the shortest. Both are rounded up to a multiple of CELL_STEP.
    """
    short = pad(n_tokens, CELL_STEP)
    return short, max(pad(most, CELL_STEP), short + CELL_STEP)


def sizes_to_count(request: PlanRequest, model: ExpertModel) -> tuple[list[Size], list[Size]]:
    """Return the pairs (context length, micro-batch size) for which llama.cpp must count memory.

    Both numbers are in tokens. The caller then lets llama.cpp count the bytes of its KV cache and
    its temporary buffers for each pair. The result is a tuple of two lists of pairs:

    - The first list is enough to decide whether the whole model fits in memory.
    - The second list is needed to plan a model that does not fit. It includes the first list.
    """
    config, usual = request.config, default_context(request, model)
    most = usual if config.ctx else max(usual, own_context(request, model))
    at_once = min(smallest_batch(request), usual)
    every = {
        n_tokens: {*context_ends(n_tokens, most), *([usual] if usual >= n_tokens else ())}
        for n_tokens in (at_once, min(SIZES[0], at_once), *micro_batches(request, most))
    }
    sizes = [(n_ctx, n_tokens) for n_tokens, of in every.items() for n_ctx in of]
    return [each for each in sizes if each[1] == at_once], sizes


class Choice(NamedTuple):
    """A chosen policy and the precisions (tiers) of the file that it uses.

    tiers: indices of the file's tiers, best first. skip: the policy may also skip experts.
    """

    policy: type[Policy]
    tiers: tuple[FileTier, ...]
    skip: bool


def rules_of(config: Config, choice: Choice) -> Rules:
    """Return the rules that a policy must obey, from the user's settings and `choice`.

    - skip: whether experts may be skipped. This is `choice.skip`.
    - renormalize: whether the weights of a token's other experts are scaled up if some are skipped.
    - exact: whether decisions must not depend on which experts are in memory.
    """
    return Rules(choice.skip, config.renormalize, config.exact_tiers)


def settings_of(config: Config, choice: Choice) -> Settings:
    """Return the settings of the chosen policy.

    With --exact, the settings make the policy lossless. Raises ConfigError if --exact contradicts a
    setting that the user gave.
    """
    settings = config.settings_of(choice.policy)
    if not config.exact:
        return settings
    needed = choice.policy.precisions.lossless or {}
    for name, value in needed.items():
        given, flag = config.of_policies.get(name, value), flag_of(name)
        if given != value:
            raise ConfigError(
                f"--exact computes every expert in the high precision, and {flag} {given} allows "
                f"lower ones: leave one of the two out"
            )
    return replace(settings, **needed)


def permits_plain(config: Config, model: ExpertModel) -> bool:
    """Return whether the user's options permit `plain`, which holds the whole model in memory.

    The result is False if an option needs an expert store, such as --expert-ram. Whether the model
    fits in memory is not checked. Raises ConfigError if such an option was given together with
    --policy plain.
    """
    best = config.high_tier is None or model.tier_index(config.high_tier) == 0
    if config.policy == PLAIN:
        if not best or config.force_managed or config.expert_ram:
            raise ConfigError(
                "--policy plain holds the whole model in memory, in the best precision of the "
                "file: leave out --high-tier and --expert-ram, or choose another policy"
            )
        return True
    less = config.asks_less(policy_class(DEFAULT))
    managed = config.force_managed or config.expert_ram is not None or less
    return config.policy is None and best and not managed


def choose(config: Config, model: ExpertModel, shape_of: ShapeOf, budget: int) -> Choice:
    """Return the policy and the precisions (tiers) for a model that runs with an expert store.

    The user's options are kept. Without the option --policy, the policy is one of these:

    - BASELINE (an LRU cache) if every expert fits into the slots, and the user gave neither a lower
      precision nor a setting of a policy.
    - DEFAULT in all other cases.

    Lower tiers are used only if an option asks for lower precisions.

    budget: bytes for expert slots. shape_of: a function that returns the slot sizes for the tiers
    in its argument. Raises PolicyError if options contradict each other.
    """
    names = [tier.name for tier in model.tiers]
    policy = None if config.policy is None else policy_class(config.policy)
    mixes = policy is not None and policy.precisions.lossless is None and policy.precisions.most > 1
    if config.exact and policy is not None and mixes:
        raise PolicyError(
            f"--exact computes every expert in the high precision, and the policy {policy.name} "
            f"keeps some in lower ones: choose another --policy, or leave --exact out"
        )
    asking = policy or policy_class(DEFAULT)
    lower = asking.precisions.most > 1 and config.asks_less(asking)
    # The low tier that the user named; None for any.
    named = None
    if lower and config.low_tier not in (None, SKIP_TIER):
        named = FileTier(model.tier_index(config.low_tier or ""))
    offer = TierOffer(names, shape_of, budget, named)
    if config.high_tier is not None:
        high = FileTier(model.tier_index(config.high_tier))
    else:
        high = (policy or Policy).precisions.high(offer)
    named = (policy or Policy).precisions.low(offer, high) if lower else None
    low = named
    if lower and named is None and high + 1 < len(names):
        low = FileTier(high + 1)
    if low is not None and low <= high:
        raise PolicyError(
            f"the low tier {names[low]} is not below the high tier {names[high]}; the file "
            f"holds {', '.join(names)}, best first"
        )
    if policy is None:
        tunes = config.low is not None or config.low_tier is not None or config.of_policies
        policy = policy_class(BASELINE if offer.fits_whole(high) and not tunes else DEFAULT)
    asked = config.low_tier == SKIP_TIER and policy.precisions.most > 1
    skip = (policy.precisions.skips or asked) and not config.exact
    if low is None or asked or (policy.precisions.skips and named is None):
        return Choice(policy, (high,), skip)
    return Choice(policy, tiers_between(policy, high, named, len(names)), skip)


def tiers_between(
    policy: type[Policy], high: FileTier, low: FileTier | None, n: int
) -> tuple[FileTier, ...]:
    """Return the precisions (tiers) of a model file that a policy uses, as indices, best first.

    They are the tiers from `high` to `low`. If `low` is None, they end with the last tier of the
    file.

    If the policy supports fewer tiers, the lower ones are left out, but `low` is kept. For example,
    with high = 0 and low = 3, a policy for three tiers uses 0, 1 and 3. A policy for one tier uses
    only `high`.

    n: the number of tiers in the file.
    """
    if policy.precisions.most == 1:
        return (high,)
    end = n if low is None else low + 1
    tiers = tuple(FileTier(at) for at in range(high, end))[: policy.precisions.most]
    return tiers if low is None else (*tiers[:-1], low)


@dataclass(frozen=True)
class _Layout:
    """Plans the memory of one model, with the arguments of `plan`.

    Its methods first make a draft: a plan with all sizes except those of the expert slots, the
    memory for experts. They then complete the draft with slots.
    """

    request: PlanRequest
    model: ExpertModel
    machine: Machine
    history: History

    @property
    def config(self) -> Config:
        return self.request.config

    def laid_out(self) -> Plan | Refusal:
        """Return the memory plan, or a Refusal with the reason why the model does not fit.

        The Refusal's `needed_bytes` is a lower bound of the memory limit with which it would fit.
        """
        default = self.room(managed=not permits_plain(self.config, self.model))
        found = self.shared(default)
        if found is None:
            return self.divided(default)
        if isinstance(found, _TooSmall) and found.may_divide:
            # A policy that keeps every expert in memory cannot share the memory of its slots.
            other = self.divided(default)
            return found if isinstance(other, Refusal) else other
        return found

    def least(self, needed_bytes: int = 1) -> Plan | Refusal:
        """Return the plan for the smallest memory limit (--vram or --ram) that works.

        needed_bytes: a lower bound of this limit, from which the search starts. If the search does
        not find the limit in a few tries, the result is a Refusal with the reason.
        """
        capped = "vram" if self.machine.device else "ram"
        device = self.machine.device
        without_end = Machine(_NO_END, device and replace(device, memory_bytes=_NO_END))
        for _ in range(_MOST_TRIES):
            config = self.config.with_changes(**{capped: needed_bytes})
            request = replace(self.request, config=config)
            found = replace(self, request=request, machine=without_end).laid_out()
            if isinstance(found, Plan):
                break
            # Each refusal gives the right bound for the context for which it was computed.
            needed_bytes = max(found.needed_bytes, needed_bytes + 1)
        return found

    @property
    def _own_context(self) -> int:
        return own_context(self.request, self.model)

    @property
    def _asked(self) -> int | None:
        """The user's cap (--vram or --ram) on the memory that holds the experts, or None."""
        return self.config.vram if self.machine.device else self.config.ram

    def room(self, n_ctx: int = 0, n_tokens: int = 0, managed: bool = True) -> Plan:
        """Return a draft of the plan: the sizes of everything except expert slots.

        n_ctx: context length in tokens. n_tokens: micro-batch size in tokens. For each of them, 0
        stands for the user's value, or the default if there is none. managed: the model runs with
        an expert store, which reads experts into slots.
        """
        request, model, device = self.request, self.model, self.machine.device
        config = request.config
        n_ctx = n_ctx or default_context(request, model)
        n_tokens = min(n_tokens or smallest_batch(request), n_ctx)
        found = request.counted.at(n_ctx, n_tokens)
        kv, graph = found or (model.kv_bytes(n_ctx, config.kv), None)
        compute = footprint.compute_bytes(model, request, n_ctx, n_tokens, graph)
        compute, extra = compute + request.more_scratch, 0
        if managed and policy_class(config.policy or DEFAULT).wants.asked_in:
            # Copies of the routers in half precision, for predictions of the next layers.
            routers = (model.n_layers - 1) * model.n_expert
            extra = 2 * routers * model.hparams.embedding_length
        if device is None:
            extra += footprint.process_bytes(model, request)
            kv += footprint.copying_bytes(model, config, n_ctx)
        else:
            flash = device.flash and config.importance != "exact"
            # Without a cap, ggml's pool frees cached buffers when the device is full.
            keeps_buffers = config.vram is not None and not managed
            compute += footprint.kernel_bytes(model, config, n_ctx, n_tokens, flash, keeps_buffers)
        return Plan(
            managed=managed,
            n_ctx=n_ctx,
            n_ubatch=n_tokens,
            ram_bytes=_cap(self.machine, config.ram),
            cap_bytes=_cap(device or self.machine, self._asked),
            dense_bytes=model.dense_bytes - (model.lookup_bytes if managed else 0),
            kv_bytes=kv,
            scratch_bytes=compute + extra,
            compute_bytes=compute,
            device=device,
            tiers=(FileTier(0),),
            tier_names=(model.tiers[0].name,),
            expert_bytes=model.tier_bytes[0],
        )

    def shared(self, default: Plan) -> Plan | Refusal | None:
        """Return a plan in which expert slots and KV cache share memory while the model runs.

        When the context grows, the KV cache grows and the slots shrink. There are two other
        results:

        - None if slots and KV cache cannot share memory, for example on a GPU.
        - A Refusal, with the reason, if the memory is too small for the policy or for the requested
          context length.

        default: a plan with a KV cache of fixed size, still without slots. It has the context
        length that the user requested, or the minimum if the user requested none. The size of the
        prompt cache is computed from the sizes in this plan.
        """
        config = self.config
        once = config.policy == PLAIN or config.expert_ram or self.machine.device
        if once or not self.request.needs.conversations or default.fits_whole:
            return None
        least = min(smallest_default_batch(self.request), default.n_ubatch)
        draft = self.room(max(CELL_STEP, least), least)
        plan = self.try_in((draft, self._prompt_bytes(default)), (draft, config.cache_ram or 0))
        if isinstance(plan, Refusal):
            return plan
        placement, prompts = plan.placement, plan.prompt_bytes
        if placement is None or placement.policy.about.wants.all_resident:
            return None
        own = 0 if footprint.part_bytes(self.model, config) else prompts
        if own:  # a copy of a sequence has no more than its KV cells
            plan = self.plan_in(draft, 0)
            if isinstance(plan, Refusal):
                return plan
        most = default.n_ctx if config.ctx else self._own_context or default.n_ctx
        shared = self._sharing(plan, most, own)
        longest = shared.longest(most)
        n_ctx = most // (1 + self.request.needs.sequences) if config.ctx else 1
        if longest < n_ctx:
            needed = draft.cap_bytes + shared.least_slots - shared.slots(n_ctx, 1)
            if not config.ctx:  # not even the shortest context fits
                text = f"the policy {placement.name} needs at least {needed} bytes of memory"
                return _TooSmall(text, needed, self._option, placement.policy, may_divide=False)
            limit = self._given(draft).rstrip(",")
            return Refusal(
                f"--ctx {n_ctx} is too long for {limit}: the maximum with the policy "
                f"{placement.name} is {longest} tokens",
                needed,
                "--ctx",
            )
        n_ubatch = max(shared.scratch)
        return replace(plan, n_ctx=longest, n_ubatch=n_ubatch, prompt_bytes=prompts, shared=shared)

    def divided(self, default: Plan) -> Plan | Refusal:
        """Return a plan in which expert slots and KV cache have fixed sizes, unlike in `shared`.

        If the memory is too small, the result is a Refusal with the reason.

        default: the plan to complete. Its context length is the requested one, or the minimum. Its
        micro-batch size is the requested one, or the smallest.

        This method adds expert slots, unless the whole model is held in memory. It may also add a
        prompt cache, and replace the context length and the micro-batch size by larger ones. Values
        that the user set are kept.
        """
        # A longer context and a prompt cache are used if they cost little memory. The micro-batch
        # size is the one with which a prompt and its answer read the fewest bytes, or the smallest
        # if every expert is in memory.
        config, model, asked = self.config, self.model, self.config.cache_ram or 0
        draft = default if config.ctx else self._longer(default)
        plan = self.try_in((draft, self._prompt_bytes(draft)), (draft, asked), (default, asked))
        if isinstance(plan, Refusal) or config.ubatch or config.expert_ram or not plan.absent_bytes:
            return plan
        n, again = SIZES[-1], SIZES[-1] * ABSENT_USE * model.n_expert_used / model.n_expert
        n_tokens = self._sharing(plan, plan.n_ctx).micro_batch(plan.n_ctx - n, n, again)
        if n_tokens == plan.n_ubatch:
            return plan
        other = self.plan_in(self.room(plan.n_ctx, n_tokens), plan.prompt_bytes)
        return plan if isinstance(other, Refusal) else other

    def _sharing(self, plan: Plan, most: int, prompts: int = 0) -> SharedMemory:
        """Return the SharedMemory of a plan: how slots, KV cache and scratch can share its memory.

        most: the longest context in tokens. prompts: the maximum bytes of the prompt cache in this
        memory.
        """
        config, placement = self.config, plan.placement
        assert placement is not None
        fewest = place(
            placement.policy, placement.shape, placement.settings, placement.rules, 0, self.history
        )
        least, sizes = smallest_batch(self.request), micro_batches(self.request, most)
        lines = {size: self._line(lambda draft: draft.compute_bytes, size, most) for size in sizes}
        # The part of the KV memory that does not depend on the number of cells stays allocated.
        states, cell_bytes = self._line(lambda draft: draft.kv_bytes, least, most)
        # After the last attention layer, recurrent layers compute in the memory of its mask.
        twice = 2 if states else 1
        shared = SharedMemory(
            plan.cap_bytes - plan.fixed_bytes + plan.kv_bytes + plan.compute_bytes - states,
            max(
                fewest.slots.total_bytes,
                sum(group.slot_bytes for group in placement.slots.groups),
            ),
            placement.shape.all_slot_bytes(),
            cell_bytes,
            {size: (twice * empty, each) for size, (empty, each) in lines.items()},
            # With transposed values, the cache grows by one page per dimension.
            CELL_STEP if config.importance != "exact" else 8 * CELL_STEP,
            1 + self.request.needs.sequences,
            prompts,
        )
        # A larger micro-batch may fit only prompts that are shorter than it; leave it out.
        scratch = {
            n: each for n, each in shared.scratch.items() if n in shared.fitting_micro_batches(n)
        }
        return replace(shared, scratch=scratch)

    def _line(self, part: Callable[[Plan], int], n_tokens: int, most: int) -> Line:
        """Return (bytes for an empty context, bytes per KV cell) of one part of a plan's memory.

        part: returns the bytes of this part in a plan. n_tokens: micro-batch size. most: the
        longest context in tokens.

        The two numbers define a line through the part's sizes at the shortest and at the longest
        context. Between them the part is never above the line, because it is a maximum of linear
        functions.
        """
        short, long = context_ends(n_tokens, most)
        at_short, at_long = (part(self.room(n, n_tokens)) for n in (short, long))
        each = max(0.0, (at_long - at_short) / (long - short))
        return int(at_short - each * short), each

    def _longer(self, least: Plan) -> Plan:
        """Return a draft (a plan without slots) for the longest context that costs little memory.

        This draft is used if the user requested no context length. least: the draft for the minimum
        context. The longer context may take at most the fraction SHARE of the memory of slots and
        KV cache. If all experts fit with the minimum context, they also fit with the longer one.
        """
        # If all experts fit, a conversation on the CPU gets the longest context with which they
        # fit, because a context takes no memory until it is used.
        left = least.cap_bytes - least.fixed_bytes
        estimating = replace(self, request=replace(self.request, counted=Counted()))
        allowed = int((left + least.kv_bytes) * SHARE) - least.kv_bytes
        if least.fits_whole:
            allowed = min(allowed, left - least.expert_bytes)
            if self.request.needs.conversations and not least.device:
                allowed = left - least.expert_bytes - self._prompt_bytes(least)

        def taken(n_ctx: int) -> int:
            return estimating.room(n_ctx, managed=least.managed).fixed_bytes

        most = allowed + taken(least.n_ctx)
        longest = longest_context(self._own_context, CELL_STEP, lambda n_ctx: taken(n_ctx) > most)
        return self.room(max(least.n_ctx, longest), managed=least.managed)

    def _prompt_bytes(self, draft: Plan) -> int:
        """Return the size of the prompt cache in host memory, in bytes.

        The option --cache-ram sets the size. Without the option, only conversations get a prompt
        cache. It has space for one more context and some checkpoints, and is limited to a small
        share of memory. draft: the plan without slots.
        """
        # If all experts fit in memory without the prompt cache, they also fit with it.
        config, model = self.config, self.model
        if config.cache_ram is not None or not self.request.needs.conversations:
            return config.cache_ram or 0
        left = draft.cap_bytes - draft.fixed_bytes
        if draft.device:
            left = draft.ram_bytes - footprint.process_bytes(model, self.request, on_gpu=True)
        most = int(left * footprint.PROMPT_SHARE)
        if draft.fits_whole and not draft.device:
            most = min(most, left - draft.expert_bytes)
        marks = footprint.PROMPT_MARKS * footprint.part_bytes(model, config)
        return max(0, min(draft.kv_bytes + marks, most))

    def try_in(self, *attempts: tuple[Plan, int]) -> Plan | Refusal:
        """Call `plan_in` with each of several argument pairs until one gives a plan that fits.

        Each pair is (draft, bytes of the prompt cache). A draft is a plan without expert slots. If
        no plan fits, the result is the Refusal of the last call.
        """
        for each in attempts:
            found = self.plan_in(*each)
            if isinstance(found, Plan):
                break
        return found

    def plan_in(self, draft: Plan, prompts: int) -> Plan | Refusal:
        """Complete a draft (a plan without expert slots) with a prompt cache and expert slots.

        The policy chooses the slots. A plan that holds the whole model in memory has no slots. If
        the memory is too small, the result is a Refusal with the reason.

        prompts: bytes of the prompt cache.
        """
        # With --policy plain, a model that does not fit is refused only if the user set the limit.
        config, model, asked = self.config, self.model, self._asked
        draft = replace(draft, prompt_bytes=prompts)
        if not draft.managed:
            fits, needed = draft.fits_whole, draft.total_bytes
            if not fits and config.policy == PLAIN and asked:
                limit = self._given(draft)
                return Refusal(
                    f"{limit} is too little: the policy plain keeps everything in memory and needs "
                    f"at least {format_least(needed)} with a context of {draft.n_ctx} tokens. The "
                    f"other policies keep experts on disk",
                    needed,
                    self._option,
                )
            if fits or config.policy == PLAIN:
                why = "everything fits" if fits else "asked for"
                amounts = f"{format_size(needed)} of {format_size(draft.cap_bytes)}"
                return replace(draft, reason=f"{why} ({amounts})")
            draft = replace(self.room(draft.n_ctx), prompt_bytes=prompts)

        rest = draft.cap_bytes - draft.fixed_bytes
        budget = min(config.expert_ram or rest, rest) if asked else config.expert_ram or rest
        shapes = model.shapes if draft.device else ()
        shape_of = partial(footprint.model_shape, model, shapes=shapes)
        choice = choose(config, model, shape_of, budget)
        placement = self._place(choice, shape_of(choice.tiers), budget)
        slots = placement.slots
        if slots.total_bytes > budget:
            return self._too_small(draft, placement)
        host_bytes = self._host_bytes(draft, placement) if draft.device else 0
        if isinstance(host_bytes, Refusal):
            return host_bytes
        return replace(
            draft,
            reason=placement.text,
            tiers=choice.tiers,
            tier_names=placement.shape.tiers,
            expert_bytes=sum(model.tier_bytes[tier] for tier in choice.tiers),
            skip=choice.skip,
            budget_bytes=budget if config.expert_ram or asked else slots.total_bytes,
            placement=placement,
            host_bytes=host_bytes,
        )

    def _place(self, choice: Choice, shape: ModelShape, budget: int) -> Placement:
        config = self.config
        settings, rules = settings_of(config, choice), rules_of(config, choice)
        return place(choice.policy, shape, settings, rules, budget, self.history)

    def _host_bytes(self, draft: Plan, placement: Placement) -> int | Refusal:
        """Return the bytes of the expert cache in host memory, for a plan with a device.

        draft: the plan without slots. The cache gets the host memory that is left over, up to the
        size of all experts. The result is a refusal if host memory is too small for the reads in
        flight.
        """
        config, model, slots = self.config, self.model, placement.slots
        fixed = footprint.process_bytes(model, self.request, on_gpu=True) + draft.prompt_bytes
        fixed += slots.host_bytes + footprint.copying_bytes(model, config, draft.n_ctx)
        # llama.cpp keeps token embeddings in host memory unless they stay on disk.
        if all(table.info.name != EMBEDDINGS for table in model.lookup):
            tables = (part.tensors.get(EMBEDDINGS) for part in model.parts)
            fixed += max((each.nbytes for each in tables if each), default=0)
        if slots.host_bytes:
            fixed += footprint.exchange_bytes(model, draft.n_ubatch)
        groups, layers = slots.groups, placement.shape.host_slots
        staged = {tier for (*_, tier), at in slots.group_of.items() if not groups[at].on_host}
        sizes = [size for each in layers for tier in staged for size in each[tier].values()]
        # Each slot size has slots of its own, at least two.
        in_flight = max(2 * config.io_threads * max(sizes), 2 * sum(set(sizes)))
        needed = fixed + in_flight
        if draft.ram_bytes < needed:
            return Refusal(
                f"--ram {format_size(draft.ram_bytes)} is too small with a GPU: the minimum is "
                f"{format_least(needed)}",
                needed,
                "--ram",
            )
        return min(draft.ram_bytes, model.n_expert * sum(sizes) + needed) - fixed

    @property
    def _option(self) -> str:
        """The option (--vram or --ram) that limits the memory that holds the experts."""
        return "--vram" if self.machine.device else "--ram"

    def _given(self, draft: Plan) -> str:
        """Return a phrase for messages that names the memory limit: an option, or free memory."""
        if self._asked == draft.cap_bytes:
            return f"{self._option} {format_size(draft.cap_bytes)}"
        of = f" of {draft.device.name}" if draft.device else ""
        return f"free memory{of}, {format_size(draft.cap_bytes)},"

    def _too_small(self, draft: Plan, placement: Placement) -> Refusal:
        """Return the refusal of a slot memory that is below the policy's minimum.

        draft: the plan without slots. placement: the policy's placement with the fewest slots.
        """
        expert_ram, slots = self.config.expert_ram, placement.slots.total_bytes
        name = placement.name
        if expert_ram is None or (self._asked is not None and expert_ram >= slots):
            needed = draft.fixed_bytes + slots
            text = f"the policy {name} needs at least {needed} bytes of memory"
            return _TooSmall(text, needed, self._option, placement.policy)
        least = place(policy_class(BASELINE), placement.shape).slots.total_bytes
        option = "--expert-ram"
        text = (
            f"{option} {format_size(expert_ram)} is too small: the smallest that works with the "
            f"policy {name} is {format_least(slots)}"
        )
        if least < slots:
            text = f"{text}. {_enough(option, least)}"
        return Refusal(text, slots, option)

    def refusal(self, found: _TooSmall) -> Refusal:
        """Return a Refusal with a message for the user: the memory limit is too small.

        The message names the smallest limit that works. If the model would fit without --cache-ram
        (the size of the prompt cache), the message says instead that --cache-ram is too large.

        found: the failure that `laid_out` returned. Its `needed_bytes` is a lower bound of the
        limit. This method tries larger limits from there.
        """
        plan = self.least(found.needed_bytes)
        if isinstance(plan, Refusal):
            return plan
        if self.config.cache_ram:
            without = self._asked_with(self.config.with_changes(cache_ram=None))
            if isinstance(without.laid_out(), Plan):
                return self._cache_too_large(plan.cap_bytes)
        name = plan.placement.name if plan.placement else found.policy.name
        fixed, experts = plan.fixed_bytes, plan.total_bytes - plan.fixed_bytes
        memory = (
            f"{format_size(fixed)} for dense weights, KV cache and compute buffers, "
            f"{format_size(experts)} for experts"
        )
        hints = [] if plan.shared else ["Try a smaller --ctx, which needs less memory"]
        option, least = self._option, format_least(plan.cap_bytes)
        if name != BASELINE:
            other = self._asked_with(self.config.compared(policy=BASELINE)).least()
            if isinstance(other, Plan) and _differ(other.cap_bytes, plan.cap_bytes):
                hints.append(_enough(option, other.cap_bytes))
        text = (
            f"{self._given(self.room())} is too little: the smallest {option} that works with the "
            f"policy {name} and a context of {plan.n_ctx} tokens is {least} ({memory})"
        )
        return Refusal(". ".join([text, *hints]), plan.cap_bytes, option)

    def _asked_with(self, config: Config) -> _Layout:
        return replace(self, request=replace(self.request, config=config))

    def _cache_too_large(self, needed_bytes: int) -> Refusal:
        """Return the refusal of a --cache-ram without which the model would fit.

        needed_bytes: the smallest --ram or --vram that works with this --cache-ram.
        """
        cache, limit = self.config.cache_ram or 0, self._given(self.room()).rstrip(",")
        more = "free memory"
        if self._asked is not None:
            more = f"give {self._option} {format_least(needed_bytes)}"
        text = (
            f"--cache-ram {format_size(cache)} is too much for {limit}: lower it, leave it out, or "
            f"{more}"
        )
        return Refusal(text, needed_bytes, "--cache-ram")


def _enough(option: str, n_bytes: int) -> str:
    """Return a sentence that tells the smallest value of a memory option with the policy lru."""
    return f"With --policy {BASELINE}, {option} {format_least(n_bytes)} is enough for this model"


def _differ(a: int, b: int) -> bool:
    """Return whether two sizes differ after messages round them."""
    return format_least(a) != format_least(b)


def _cap(there: Machine | Device, asked: int | None) -> int:
    return min(asked, there.memory_bytes) if asked else there.usable_bytes


def _check_images(request: PlanRequest) -> None:
    """Raise ConfigError if --ubatch is too small for an image that must be computed at once."""
    ubatch, tokens = request.config.ubatch, request.needs.image_tokens
    if ubatch and ubatch < tokens:
        raise ConfigError(
            f"--ubatch {ubatch} is too small for images: this model computes all tokens of an "
            f"image at once, up to {tokens}. Leave --ubatch out, or set --image-max-tokens {ubatch}"
        )


def _check_kv(config: Config, model: ExpertModel) -> None:
    """Raise ConfigError if the requested KV cache type does not suit the model.

    The types with blocks need keys and values whose length is a multiple of the block. They also
    need flash attention.
    """
    block = BLOCK[KV_TYPES[config.kv]].weights
    if block > 1 and config.importance == "exact":
        raise ConfigError(
            f"--kv {config.kv} needs flash attention, which the setting importance=exact does not "
            f"use: leave one of the two out"
        )
    for length in (model.hparams.key_length, model.hparams.value_length):
        if length % block:
            raise ConfigError(
                f"--kv {config.kv} needs heads whose length is a multiple of {block}, and those of "
                f"this model have the length {length}: leave --kv out"
            )
