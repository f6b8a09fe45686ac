"""What the metadata promises of experts and tiers, against what is there."""

import re
from collections.abc import Iterator, Sequence

import numpy as np

from gguf_tools.errors import GGUFError, NotMoEError
from gguf_tools.experts import ExpertModel
from gguf_tools.experts.hparams import MAX_LAYERS, announced_tiers, routed_blocks
from gguf_tools.file import layout
from gguf_tools.file.layout import expert_tensor_name, parse_expert_name
from gguf_tools.file.reader import GGUFFile
from gguf_tools.verify.report import Problem, VerifyReport, problem_at

_BPW_TOLERANCE = 0.01
_OWN_KEYS = (
    layout.KEY_FORMAT_VERSION,
    layout.KEY_TIERS,
    layout.KEY_TIER_BPW,
    layout.KEY_QUANTIZATION,
    layout.KEY_CALIBRATION,
    layout.KEY_FALLBACKS,
    layout.KEY_CHECKSUMS,
)
_ROUTER = re.compile(r"blk\.([0-9]{1,9})\.ffn_gate_inp\.weight")


def model_problems(parts: list[GGUFFile], report: VerifyReport) -> Iterator[Problem]:
    """What the metadata promises of experts and tiers."""
    first = parts[0]
    try:
        tiers = announced_tiers(first)
    except GGUFError as error:
        yield Problem(str(error), str(first.path))
        return
    try:
        n_layers = routed_blocks(first)
    except GGUFError:  # What is wrong there is found below.
        n_layers = MAX_LAYERS
    found = list(_tier_problems(parts, tiers, n_layers)) if tiers != [""] else []
    yield from found
    try:
        model = ExpertModel.of_parts(parts)
    except NotMoEError as error:
        if tiers == [""] and not _announces_experts(first):
            report.no_experts = str(error)
        else:
            yield Problem(str(error), str(first.path))
        return
    except GGUFError as error:
        # Nothing is said twice of a tensor that was named above.
        if not any(each.tensor and each.tensor in str(error) for each in found):
            yield Problem(str(error), str(first.path))
        return
    report.tiers += [tier.name for tier in model.tiers]
    names = (name for part in parts for name in part.tensors)
    routers = {int(match[1]) for name in names if (match := _ROUTER.fullmatch(name))}
    for il in sorted(routers - set(model.layer_ids)):
        if il < model.hparams.block_count == model.hparams.routed_blocks:
            yield Problem(f"{first.path}: layer {il} has a router but no experts", str(first.path))
    if tiers != [""]:
        yield from _bpw_problems(first, model)
        yield from _statement_problems(first, model)


def _announces_experts(first: GGUFFile) -> bool:
    """Whether the metadata says that the model has experts."""
    count = first.metadata.get(f"{first.metadata.get('general.architecture')}.expert_count", 0)
    return bool(count)


def _statement_problems(first: GGUFFile, model: ExpertModel) -> Iterator[Problem]:
    """Finds keys of ours that do not exist, tiers whose name is no type, statements that are no
    texts, and fallbacks that are not stated."""
    for key in first.metadata:
        if key.startswith(layout.KEY_PREFIX) and key not in _OWN_KEYS:
            yield Problem(f"{first.path}: key {key}: unknown", str(first.path))
    for tier in model.tiers:
        if layout.type_by_name(tier.name) is None:
            yield Problem(
                f"{first.path}: key {layout.KEY_TIERS}: {tier.name} is no type", str(first.path)
            )
    for key in (layout.KEY_QUANTIZATION, layout.KEY_CALIBRATION):
        if not isinstance(first.metadata.get(key, ""), str):
            yield Problem(f"{first.path}: key {key}: not a text", str(first.path))
    needed: dict[str, None] = {}
    for shapes in model.shapes:
        for kind, shape in enumerate(shapes):
            for tier in model.tiers:
                declared = layout.type_by_name(tier.name)
                if shape is not None and declared is not None:
                    needed |= dict.fromkeys(layout.fallback(kind, declared, shape[0]))
    for text in needed:
        if text not in model.fallbacks:
            yield Problem(
                f"{first.path}: key {layout.KEY_FALLBACKS} does not say: {text}", str(first.path)
            )


def _bpw_problems(first: GGUFFile, model: ExpertModel) -> Iterator[Problem]:
    actual = [tier.bpw for tier in model.tiers]
    stated = first.metadata.get(layout.KEY_TIER_BPW)
    same = (
        isinstance(stated, list)
        and len(stated) == len(actual)
        and all(isinstance(each, float) for each in stated)
        and np.allclose(stated, actual, atol=_BPW_TOLERANCE)
    )
    if not same:
        held = ", ".join(f"{each:.2f}" for each in actual)
        said = "is missing" if stated is None else f"{stated!r:.80}"
        yield Problem(
            f"{first.path}: key {layout.KEY_TIER_BPW} {said}, but the tiers hold {held}"
            " bits per weight",
            str(first.path),
        )


def _tier_problems(parts: Sequence[GGUFFile], tiers: list[str], n_layers: int) -> Iterator[Problem]:
    """Finds expert matrices of the first n_layers that lack a tier, have another type than the
    announced one, or do not start at a whole disk block."""
    first = parts[0]
    if first.alignment % layout.EXPERT_ALIGNMENT:
        yield Problem(
            f"{first.path}: alignment {first.alignment}; an expert file is aligned to"
            f" {layout.EXPERT_ALIGNMENT} bytes",
            str(first.path),
        )
    where = {info.name: (part, info) for part in parts for info in part.tensors.values()}
    for part, info in list(where.values()):
        parsed = parse_expert_name(info.name)
        if parsed is None or parsed.il >= n_layers:
            if layout.TIER_MARK in info.name:
                yield problem_at(part, info, "not a tier of an expert matrix")
            continue
        asked = tiers[0] if parsed.tier is None else parsed.tier
        if asked not in tiers or (parsed.tier is not None and asked == tiers[0]):
            yield problem_at(
                part, info, f"key {layout.KEY_TIERS} does not list {asked} as a lower tier"
            )
            continue
        declared = layout.type_by_name(asked)
        fitting = None if declared is None else layout.fitting_type(declared, info.shape[0])
        if fitting is not None and info.type != fitting:
            yield problem_at(
                part, info, f"{info.type.tier_name}, but tier {asked} is {fitting.tier_name} there"
            )
        if len(parts) == 1 and info.offset % layout.EXPERT_ALIGNMENT:
            yield problem_at(part, info, f"not a multiple of {layout.EXPERT_ALIGNMENT}")
        if parsed.tier is not None:
            base = expert_tensor_name(parsed.il, parsed.kind)
            if base not in where:
                yield problem_at(part, info, f"its best tier {base} is missing")
            elif where[base][1].shape != info.shape:
                best = list(where[base][1].shape)
                yield problem_at(part, info, f"shape {list(info.shape)}; its best tier is {best}")
            continue
        for tier in tiers[1:]:
            name = expert_tensor_name(parsed.il, parsed.kind, tier)
            if name not in where:
                yield Problem(
                    f"{part.path}: tensor {name} is missing, but key {layout.KEY_TIERS} announces"
                    f" tier {tier}",
                    str(part.path),
                    name,
                )
