"""Loads the parts of a plan that llama.cpp owns: the dense weights and the context."""

from __future__ import annotations

from collections.abc import Callable

from gguf_tools.experts import ExpertModel
from orchestrator.config import Config
from orchestrator.errors import NativeError
from orchestrator.native.llama import Bindings, LlamaContext, Model
from orchestrator.plan.footprint import LEAST_CONTEXT, SIZES, output_tokens
from orchestrator.plan.layouts import wants_own_layout
from orchestrator.plan.machine import Accelerator
from orchestrator.plan.records import Plan, PlanRequest
from orchestrator.runtime.store_layout import has_flash


def load_weights(
    config: Config,
    plan: Plan,
    model: ExpertModel,
    bindings: Bindings,
    gpu: Accelerator | None,
    progress: Callable[[float], None] | None,
) -> Model:
    """Load the weights that llama.cpp holds in memory, and return llama.cpp's model with them.

    If an expert store holds the experts, these are only the dense weights. progress: gets the share
    that is loaded, 0 to 1.
    """
    repack, mapped = config.use_extra_bufts, config.use_mmap
    if repack is None:
        # Dense weights have the same layout as the experts.
        repack = not plan.managed or (gpu is None and wants_own_layout(config, plan))
    if mapped is None:
        # Repacked weights are copies, and a mapped file would take memory in addition.
        mapped = not (repack or config.ram) and len(model.tiers) == 1
    return Model(
        bindings,
        config.model,
        managed=plan.managed,
        use_extra_bufts=repack,
        use_mmap=mapped and not plan.managed,
        gpu=gpu.index if gpu else None,
        buffer_type=gpu.buffer_type if gpu else None,
        progress=progress,
    )


def context_of(
    request: PlanRequest, plan: Plan, model: Model, bindings: Bindings, gpu: Accelerator | None
) -> LlamaContext:
    """Make llama.cpp's context with the sizes that were planned.

    If the system refuses the memory, a smaller micro-batch is tried, and then a shorter context. A
    size that the user set is not changed. Raises NativeError if no size works.
    """
    config, n_ctx, n_ubatch = request.config, plan.n_ctx, plan.n_ubatch
    while True:
        try:
            return LlamaContext(
                bindings,
                model,
                n_ctx=n_ctx,
                n_ubatch=min(n_ctx, n_ubatch),
                threads=config.n_threads,
                outputs=output_tokens(request, model.n_vocab, n_ubatch),
                flash_attention=has_flash(config, plan),
                on_gpu=gpu is not None,
                sequences=request.needs.sequences,
                kv=config.kv,
            )
        except NativeError:
            if not config.ubatch and n_ubatch > SIZES[0]:
                n_ubatch //= 2
            elif not config.ctx and n_ctx >= 2 * LEAST_CONTEXT:
                n_ctx //= 2
            else:
                raise
