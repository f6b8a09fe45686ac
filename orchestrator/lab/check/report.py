"""Formats the report of a check as text."""

from __future__ import annotations

from typing import Any

from gguf_tools.columns import aligned
from gguf_tools.units import format_size


def render(report: dict[str, Any]) -> str:
    """Format the report of `moe-edge check` as a page of text for the user.

    - report: the result of examine(), which compares our engine's logits with llama.cpp's.
    """
    machine = report["machine"]
    versions = ", ".join(f"{name} {found or '?'}" for name, found in machine["versions"].items())
    pair = f" with {report['low']}" if report["low"] else ""
    lines = [
        f"moe-edge check of {report['model']}{pair}",
        f"  {versions}; {machine['system']}",
        f"  {machine['processor']}, {machine['cores']} cores, "
        f"{format_size(machine['usable_bytes'])} of memory available",
    ]
    if machine["device"]:
        lines.append(f"  {machine['device']}, {format_size(machine['device_bytes'])} available")
    lines += ["", *_file(report), *_words(report["words"])]
    for tier in report["tiers"]:
        lines += ["", *_tier(tier)]
    asked = report["as_asked"]
    if asked and "error" not in asked:
        prompt, decode = _tok_s(asked)
        speeds = f"prompts at {prompt} tokens/s, decode at {decode} tokens/s"
        lines += ["", f"as asked: {asked['mode']}", f"  {speeds}; {_memory(asked)}"]
    if report["own_bytes"]:
        own = format_size(report["own_bytes"], up=True)
        lines.append(
            f"Of the memory limit --ram, moe-edge check itself uses {own} during each run. The "
            f"rest is for the model."
        )
    lines.append("")
    lines += [f"Note: {each}" for each in report["notes"]]
    lines += [f"Problem: {each}" for each in report["problems"]]
    if report["ok"]:
        lines.append("Good: every run equals llama.cpp bit for bit, within its planned memory.")
    else:
        problems = _problems(len(report["problems"]))
        lines.append(f"Not good: {problems}, see above.")
    return "\n".join([*lines, *row(report)])


def row(report: dict[str, Any]) -> list[str]:
    """Return the results of `moe-edge check` as a Markdown row for the table in docs/reports.md.

    The row has the speed and the memory use that the check measured with the user's own options.
    The result is a list of three lines: an empty line, a heading for the user, and the row. The
    list is empty if this measurement is missing or failed, or if the check found a problem.

    - report: the report of the check.
    """
    run, machine = report["as_asked"], report["machine"]
    if not report["ok"] or not run or "error" in run:
        return []
    n, seconds = len(run["prompt"]), len(run["prompt"]) / run["prompt_tok_s"]
    hits = f"{run['hit_rate']:.1%}" if "hit_rate" in run else "all in memory"
    where = [machine["processor"], f"{machine['cores']} cores", machine["device"]]
    cells = (
        " + ".join(filter(None, [report["model"], report["low"]])),
        ", ".join(filter(None, where)),
        format_size(run["used_bytes"], up=True),
        f"{run['decode_tok_s']:.1f}",
        f"{seconds:.1f} s of {n}",
        hits,
        machine["versions"]["moe-edge"] or "?",
    )
    safe = (each.replace("|", "/") for each in cells)
    return ["", "As a row for docs/reports.md:", f"| {' | '.join(safe)} |"]


def _file(report: dict[str, Any]) -> list[str]:
    facts, verified = report["file"], report["verified"]
    lines = []
    if facts:
        managed = "managed" if report["managed"] else "not managed"
        lines += [
            f"architecture: {facts['architecture']}, {managed}",
            f"layers: {facts['layers']}, {facts['moe_layers']} of them with {facts['experts']} "
            f"experts, {facts['experts_used']} experts per token"
            + (", plus shared experts" if facts["shared_experts"] else ""),
            f"sizes: model files {format_size(facts['file_bytes'])}, dense weights "
            f"{format_size(facts['dense_bytes'])}, KV cache {format_size(facts['kv_bytes'])} for "
            f"{facts['kv_tokens']} tokens",
        ]
        for tier in facts["tiers"]:
            types = sorted({name for names in tier["types"].values() for name in names})
            lines.append(
                f"tier {tier['name']}: {tier['bits_per_weight']:.2f} bits per weight, "
                f"{format_size(tier['bytes'])}, types {', '.join(types)}"
            )
        lines += [f"fallback: {text}" for text in facts["fallbacks"]]
    if verified:
        n = verified["findings"]
        state = _problems(n) if n else "good"
        lines.append(f"every block read: {state}, {format_size(verified['bytes'])}")
    return lines


def _problems(n: int) -> str:
    return "1 problem" if n == 1 else f"{n} problems"


def _words(words: dict[str, Any] | None) -> list[str]:
    if words is None:
        return []
    kept = words["samples"] - len(words["lost"])
    own = "the file's own" if words["template"] else "ChatML (the file has none)"
    rendered = words["rendered"]
    result = "an error" if rendered is None else f"{rendered} tokens"
    return [
        f"tokenizer: encodes and decodes {kept} of {words['samples']} texts without a change",
        f"chat template: {own}. Result for a sample conversation: {result}",
    ]


def _tier(tier: dict[str, Any]) -> list[str]:
    """Format the runs of one tier as a table. Failed runs are left out."""
    plain, runs = tier["plain"], [each for each in tier["runs"] if "error" not in each]
    rows = [["memory", "policy", "planned", "used", "bits", "prompt", "decode", "hits"]]
    if plain and "error" not in plain:
        taken = format_size(plain["used_bytes"])
        rows.append(["llama.cpp's own", "", "", taken, "", *_tok_s(plain), ""])
    for run in runs:
        promised = format_size(run["promised_bytes"])
        hits, bits = f"{run['hit_rate']:.1%}", _bits(run.get("compared"))
        taken = format_size(run["used_bytes"], up=True)
        rows.append([run["budget"], run["policy"], promised, taken, bits, *_tok_s(run), hits])
    read = (plain if plain and "error" not in plain else None) or (runs[0] if runs else None)
    if read is None:
        return [f"{tier['tier']}: no run worked"]
    title = (
        f"{tier['tier']}: a prompt of {len(read['prompt'])} tokens and {len(read['answer'])} "
        f"decoded tokens; speeds in tokens/s"
    )
    return [title, *(f"  {line}" for line in aligned(rows))]


def _bits(compared: dict[str, Any] | None) -> str:
    if compared is None:
        return "not compared"
    return "equal" if compared["equal"] else f"differ from {compared['first']}"


def _tok_s(run: dict[str, Any]) -> tuple[str, str]:
    return f"{run['prompt_tok_s']:.1f}", f"{run['decode_tok_s']:.1f}"


def _memory(run: dict[str, Any]) -> str:
    taken = f"used {format_size(run['used_bytes'], up=True)}"
    if run["promised_bytes"] is None:
        return f"{taken} of memory, including pages of the memory-mapped model file"
    return f"{taken} of {format_size(run['promised_bytes'])}"
