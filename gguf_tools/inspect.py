"""Describe a model file and how many of its experts fit a memory budget, as data or as text."""

from collections import Counter
from itertools import groupby
from typing import Any

from gguf_tools.columns import aligned
from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import KEY_CALIBRATION, KEY_QUANTIZATION, KINDS, slot_bytes
from gguf_tools.file.reader import one_line
from gguf_tools.units import format_size

BUDGET_SHARES = (0.25, 0.40, 0.60, 0.80, 1.00)
KV_TOKENS = 4096


def describe(model: ExpertModel, scratch_bytes: int = 0) -> dict[str, Any]:
    """Return facts about an opened model as a JSON-serializable dict. All sizes are in bytes.

    The list `budgets` has examples of memory budgets for experts. In each example, `slot_bytes` is
    the budget, and `share` is the fraction of all experts that fit in the best precision (tier).
    `experts_per_layer` is the number of experts of each layer that fit in each tier, by the tier's
    name. `ram_bytes` is the value of `--ram` for this budget.

    scratch_bytes: memory for compute buffers, which `ram_bytes` includes.
    """
    n_ctx = min(KV_TOKENS, model.hparams.context_length or KV_TOKENS)
    kv_bytes = model.kv_bytes(n_ctx)
    fixed_bytes = model.dense_bytes - model.lookup_bytes + kv_bytes
    budgets = []
    for share in BUDGET_SHARES:
        slot_budget = round(share * model.tier_bytes[0])
        budgets.append(
            {
                "share": share,
                "slot_bytes": slot_budget,
                "ram_bytes": fixed_bytes + scratch_bytes + slot_budget,
                "experts_per_layer": {
                    tier.name: _experts_per_layer(model, index, slot_budget)
                    for index, tier in enumerate(model.tiers)
                },
            }
        )
    return {
        "file": str(model.path),
        "files": [str(path) for path in model.files],
        "name": model.name,
        "architecture": model.hparams.arch,
        "layers": model.hparams.block_count,
        "moe_layers": model.n_layers,
        "experts": model.n_expert,
        "experts_used": model.n_expert_used,
        "shared_experts": model.has_shared,
        "context_length": model.hparams.context_length,
        "embedding_length": model.hparams.embedding_length,
        "matrices": _matrices(model),
        "file_bytes": sum(path.stat().st_size for path in model.files),
        "dense_bytes": model.dense_bytes,
        "lookup_bytes": model.lookup_bytes,
        "lookup": model.lookup_text,
        "kv_tokens": n_ctx,
        "kv_bytes": kv_bytes,
        "scratch_bytes": scratch_bytes,
        "tiers": [
            {
                "name": tier.name,
                "bits_per_weight": round(tier.bpw, 3),
                "bytes": model.tier_bytes[index],
                "expert_bytes": tier.bytes_per_expert,
                "types": _types(model, index),
            }
            for index, tier in enumerate(model.tiers)
        ],
        "quantization": _packing_detail(model, KEY_QUANTIZATION),
        "calibration": _packing_detail(model, KEY_CALIBRATION),
        "fallbacks": list(model.fallbacks),
        "per_layer": _per_layer(model),
        "outside_layers_bytes": model.dense_bytes - sum(model.dense_layer_bytes),
        "budgets": budgets,
    }


def _packing_detail(model: ExpertModel, key: str) -> str | None:
    """Return the metadata value with this key as one line of text, or None if it is missing.

    The keys are those in which `moe-edge pack` records how the model was quantized.
    """
    return one_line(str(model.metadata[key])) if key in model.metadata else None


def _experts_per_layer(model: ExpertModel, tier: int, budget: int) -> int:
    """Return how many experts of each layer fit into a memory budget, all in the same tier.

    Each expert matrix takes a memory slot, which is larger than the matrix, because slots are
    rounded up to whole disk blocks.

    tier: index of the precision.
    budget: memory in bytes.
    """
    per_expert = sum(
        slot_bytes(each.offset, each.expert_bytes, model.n_expert)
        for layer in model.slices
        for kind in layer
        if (each := kind[tier]) is not None
    )
    if budget >= model.tier_bytes[tier]:
        return model.n_expert
    return min(model.n_expert, budget // per_expert)


def _matrices(model: ExpertModel) -> list[dict[str, Any]]:
    """Return the different shapes of the model's expert matrices, as kind, row length and rows."""
    found = {
        (kind, shape): None
        for layer in model.shapes
        for kind, shape in enumerate(layer)
        if shape is not None
    }
    return [{"kind": KINDS[kind], "row": shape[0], "rows": shape[1]} for kind, shape in found]


def _types(model: ExpertModel, tier: int) -> dict[str, list[str]]:
    """Return the names of the ggml types in which a tier stores each kind of expert matrix.

    tier: index of the precision.
    """
    types: dict[str, list[str]] = {}
    for layer in model.slices:
        for kind, tiers in enumerate(layer):
            each = tiers[tier]
            if each is not None:
                names = types.setdefault(KINDS[kind], [])
                if each.type.tier_name not in names:
                    names.append(each.type.tier_name)
    return types


def _per_layer(model: ExpertModel) -> list[dict[str, Any]]:
    """Return for each layer the size of its dense weights, and the size and types of its experts.

    Each layer has a list `tiers` with one entry for each stored precision. An entry has the bytes
    of all experts of the layer and the ggml type of each kind of matrix. The list is empty for a
    layer without experts.
    """
    layers: list[dict[str, Any]] = [
        {"layer": il, "dense_bytes": nbytes, "tiers": []}
        for il, nbytes in enumerate(model.dense_layer_bytes)
    ]
    for il, kinds in zip(model.layer_ids, model.slices, strict=True):
        for index, tier in enumerate(model.tiers):
            held = {
                KINDS[kind]: each for kind, by_tier in enumerate(kinds) if (each := by_tier[index])
            }
            layers[il]["tiers"].append(
                {
                    "name": tier.name,
                    "bytes": sum(each.expert_bytes for each in held.values()) * model.n_expert,
                    "types": {kind: each.type.tier_name for kind, each in held.items()},
                }
            )
    return layers


def render(facts: dict[str, Any]) -> str:
    """Format the facts that `describe` returned about a model as text for a terminal."""
    shared = " and shared experts" if facts["shared_experts"] else ""
    lines = [
        facts["file"]
        + (f" and {len(facts['files']) - 1} more files" if len(facts["files"]) > 1 else ""),
        f"  {facts['name']}: {facts['architecture']}, {facts['layers']} layers,"
        f" {facts['moe_layers']} of them with {facts['experts']} experts{shared},"
        f" {facts['experts_used']} experts per token",
        "  expert matrices: "
        + ", ".join(f"{each['kind']} {each['rows']}x{each['row']}" for each in facts["matrices"]),
        f"  dense weights {format_size(facts['dense_bytes'])},"
        f" KV cache {format_size(facts['kv_bytes'])} for {facts['kv_tokens']} tokens,"
        f" files {format_size(facts['file_bytes'])}",
        *(
            [f"  tensors read from disk row by row if moe-edge manages the experts: {tables}"]
            if (tables := facts["lookup"])
            else []
        ),
        "",
    ]
    rows = [["tier", "bits/weight", "all experts", "one expert", "types"]]
    for tier in facts["tiers"]:
        types = sorted({name for names in tier["types"].values() for name in names})
        rows.append(
            [
                tier["name"],
                f"{tier['bits_per_weight']:.2f}",
                format_size(tier["bytes"]),
                format_size(tier["expert_bytes"]),
                " ".join(types),
            ]
        )
    lines += _table(rows)
    if facts["quantization"]:
        lines.append(
            f"  quantized by {facts['quantization']}; calibration: {facts['calibration'] or 'none'}"
        )
    lines += [f"  fallback {text}" for text in facts["fallbacks"]]
    lines += ["", "  bytes in each layer:", *_table(_layer_rows(facts))]
    lines.append(f"  outside of the layers: {format_size(facts['outside_layers_bytes'])}")
    lines += ["", f"  experts per layer (of {facts['experts']}) that fit a budget, by tier:"]
    rows = [["expert slots", "", "total RAM", *(tier["name"] for tier in facts["tiers"])]]
    for budget in facts["budgets"]:
        rows.append(
            [
                f"{budget['share']:.0%}",
                format_size(budget["slot_bytes"]),
                format_size(budget["ram_bytes"], up=True),
                *(str(n) for n in budget["experts_per_layer"].values()),
            ]
        )
    lines += _table(rows)
    lines.append("  total RAM (for --ram): expert slots, dense weights, KV cache, scratch buffers")
    return "\n".join(lines)


def _layer_rows(facts: dict[str, Any]) -> list[list[str]]:
    """Return the rows of the table that shows the size of each layer, starting with its heading.

    Consecutive layers with the same contents share a row. A tier gets a column of types if any
    layer has a type that differs from the tier's name.
    """
    names = [tier["name"] for tier in facts["tiers"]]
    mixed = {
        tier["name"]
        for layer in facts["per_layer"]
        for tier in layer["tiers"]
        if _short_types(tier["types"]) != tier["name"]
    }
    heads = (cell for name in names for cell in ((name, "types") if name in mixed else (name,)))
    rows = [["layers", "dense", *heads]]

    def content(layer: dict[str, Any]) -> tuple[str, ...]:
        cells = [format_size(layer["dense_bytes"])]
        for tier in layer["tiers"]:
            cells.append(format_size(tier["bytes"]))
            if tier["name"] in mixed:
                cells.append(_short_types(tier["types"]))
        return tuple(cells + ["-"] * (len(rows[0]) - 1 - len(cells)))

    for cells, group in groupby(facts["per_layer"], content):
        numbers = [layer["layer"] for layer in group]
        span = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
        rows.append([span, *cells])
    return rows


def _short_types(types: dict[str, str]) -> str:
    """Return the type that most matrices have, then each matrix that has another type.

    types: type of each kind of matrix. An example of the result is `q4_k, down q6_k`.
    """
    usual = Counter(types.values()).most_common(1)[0][0]
    others = (f"{kind} {name}" for kind, name in types.items() if name != usual)
    return ", ".join((usual, *others))


def _table(rows: list[list[str]]) -> list[str]:
    return [f"  {line}" for line in aligned(rows, str.rjust)]
