"""Compare the metadata on experts and tiers with the tensors of a model."""

import re
from collections.abc import Iterator, Sequence

import numpy as np

from gguf_tools.errors import GGUFError, NotMoEError
from gguf_tools.experts import ExpertModel
from gguf_tools.experts.hparams import MAX_LAYERS, listed_tiers, routed_blocks
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
    """Yield a problem for each contradiction between a model's metadata and its expert tensors.

    Also adds the names of the model's precisions (tiers) to `report.tiers`. If the model has no
    experts and its metadata announces none, `report.no_experts` is set to a note about this.

    parts: the opened files of the model.
    """
    first = parts[0]
    try:
        tiers = listed_tiers(first)
    except GGUFError as error:
        yield Problem(str(error), str(first.path))
        return
    try:
        n_layers = routed_blocks(first)
    except GGUFError:  # ExpertModel.of_parts reports the problem below.
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
        # Do not report a tensor twice.
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
    """Return whether a model's metadata states that the model has experts.

    first: the model's first file.
    """
    count = first.metadata.get(f"{first.metadata.get('general.architecture')}.expert_count", 0)
    return bool(count)


def _statement_problems(first: GGUFFile, model: ExpertModel) -> Iterator[Problem]:
    """Yield a problem for each wrong statement in the `moe_edge.*` metadata of a packed file.

    These are unknown keys, tiers that are not named after a type, values that should be texts, and
    missing notes on matrices with another type than their tier.

    first: the model's first file.
    """
    for key in first.metadata:
        if key.startswith(layout.KEY_PREFIX) and key not in _OWN_KEYS:
            yield Problem(f"{first.path}: key {key}: unknown key", str(first.path))
    for tier in model.tiers:
        if layout.type_by_name(tier.name) is None:
            yield Problem(
                f"{first.path}: key {layout.KEY_TIERS}: {tier.name} is not a ggml type",
                str(first.path),
            )
    for key in (layout.KEY_QUANTIZATION, layout.KEY_CALIBRATION):
        if not isinstance(first.metadata.get(key, ""), str):
            yield Problem(f"{first.path}: key {key}: expected a text value", str(first.path))
    needed: dict[str, None] = {}
    for shapes in model.shapes:
        for kind, shape in enumerate(shapes):
            for tier in model.tiers:
                declared = layout.type_by_name(tier.name)
                if shape is not None and declared is not None:
                    needed |= dict.fromkeys(layout.fallback_notes(kind, declared, shape[0]))
    for text in needed:
        if text not in model.fallbacks:
            yield Problem(
                f"{first.path}: key {layout.KEY_FALLBACKS} lacks the entry {text}", str(first.path)
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
        expected = ", ".join(f"{each:.2f}" for each in actual)
        value = "is missing" if stated is None else f"{stated!r:.80}"
        yield Problem(
            f"{first.path}: key {layout.KEY_TIER_BPW} {value}, but the tiers have {expected}"
            " bits per weight",
            str(first.path),
        )


def _tier_problems(parts: Sequence[GGUFFile], tiers: list[str], n_layers: int) -> Iterator[Problem]:
    """Yield a problem for each expert matrix that does not have the form that its tier requires.

    A tier is a precision of a packed file. A matrix can lack a tier, have another type than its
    tier, or not be aligned to disk blocks.

    n_layers: number of layers to check, from the first.
    """
    first = parts[0]
    if first.alignment % layout.EXPERT_ALIGNMENT:
        yield Problem(
            f"{first.path}: alignment {first.alignment}, but a packed file needs a multiple of"
            f" {layout.EXPERT_ALIGNMENT} bytes",
            str(first.path),
        )
    where = {info.name: (part, info) for part in parts for info in part.tensors.values()}
    for part, info in list(where.values()):
        parsed = parse_expert_name(info.name)
        if parsed is None or parsed.il >= n_layers:
            if layout.TIER_MARK in info.name:
                yield problem_at(
                    part,
                    info,
                    "the name ends like that of a tier, but is not the name of an expert matrix",
                )
            continue
        tier_name = tiers[0] if parsed.tier is None else parsed.tier
        if tier_name not in tiers or (parsed.tier is not None and tier_name == tiers[0]):
            yield problem_at(
                part, info, f"key {layout.KEY_TIERS} does not list {tier_name} as a lower tier"
            )
            continue
        declared = layout.type_by_name(tier_name)
        fitting = None if declared is None else layout.fitting_type(declared, info.shape[0])
        if fitting is not None and info.type != fitting:
            yield problem_at(
                part,
                info,
                f"the type is {info.type.tier_name}, but tier {tier_name} requires"
                f" {fitting.tier_name}",
            )
        if len(parts) == 1 and info.offset % layout.EXPERT_ALIGNMENT:
            yield problem_at(
                part, info, f"the offset is not a multiple of {layout.EXPERT_ALIGNMENT}"
            )
        if parsed.tier is not None:
            base = expert_tensor_name(parsed.il, parsed.kind)
            if base not in where:
                yield problem_at(part, info, f"the best tier {base} is missing")
            elif where[base][1].shape != info.shape:
                best = list(where[base][1].shape)
                yield problem_at(
                    part, info, f"the shape is {list(info.shape)}, but {best} in the best tier"
                )
            continue
        for tier in tiers[1:]:
            name = expert_tensor_name(parsed.il, parsed.kind, tier)
            if name not in where:
                yield Problem(
                    f"{part.path}: tensor {name} is missing, but key {layout.KEY_TIERS} lists"
                    f" tier {tier}",
                    str(part.path),
                    name,
                )
