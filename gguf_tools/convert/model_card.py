"""The front matter of a checkpoint's README.md: its license, tags, languages and origin.

Upstream's converter copies it to the model's metadata. People write it by hand, so that it holds
whatever YAML allows. What cannot be copied is left out with a note: no weight depends on it.
"""

from pathlib import Path
from typing import Any

README = "README.md"
MAX_BYTES = 1 << 20
# The fields that upstream's converter reads: texts, lists of texts, and lists of texts or records.
_OWN = "author version organization description finetune basename url doi uuid repo_url".split()
_TEXTS = frozenset(
    ["name", *_OWN, "size_label", "license_name", "license_link", "model_creator", "model_type"]
    + [f"model_{each}" for each in ("name", "size_label", *_OWN)]
)
_LISTS = frozenset(("license", "tags", "pipeline_tag", "languages", "language"))
_RECORDS = frozenset(
    ("base_model", "base_models", "base_model_sources", "datasets", "dataset", "dataset_sources")
)
_NULLS = ("", "~", "null", "Null", "NULL")


def read_model_card(folder: Path) -> tuple[dict[str, Any], str]:
    """Return the fields in the README.md of a checkpoint folder that can be copied, and a note that
    names the file and what was left out, or "" if that is nothing."""
    path = folder / README
    try:
        text = _front_matter(path)
        found = _parsed(text) if text is not None else {}
    except OSError as error:
        return {}, f"{path}: its metadata is not copied: {error.strerror}"
    except ValueError as error:
        return {}, f"{path}: its metadata is not copied: {error}"
    fields: dict[str, Any] = {}
    odd = []
    for key, value in found.items():
        if key not in _TEXTS | _LISTS | _RECORDS or _is_null(value):
            continue
        fields[key] = _copied(key, value)
        if fields[key] is None:
            odd.append(key)
            del fields[key]
    note = f"{path}: not copied, since a text or a list of texts is expected: {', '.join(odd)}"
    return fields, note if odd else ""


def _front_matter(path: Path) -> str | None:
    """The lines between `---` at the start of a file; None if there are none. Raises ValueError,
    with the reason, if they cannot be read."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        start = file.read(MAX_BYTES + 1)
    if not start.removeprefix(b"\xef\xbb\xbf").startswith(b"---"):
        return None
    is_all = len(start) <= MAX_BYTES
    try:
        text = start.decode("utf-8-sig", errors="strict" if is_all else "ignore")
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    first, *lines = [line.rstrip() for line in text.splitlines()]
    if first != "---":
        return None
    if "---" in lines:
        lines = lines[: lines.index("---")]
    elif not is_all:
        raise ValueError(f"its front matter does not end within {MAX_BYTES >> 20} MiB")
    # Tabs are no indentation in YAML, and are written as such nevertheless.
    return "\n".join(lines).replace("\t", "  ")


def _parsed(text: str) -> dict[Any, Any]:
    """The fields in a text of YAML. Raises ValueError, with the reason, if it has none."""
    import yaml

    # This loader makes a text of each scalar: `no` is a language, and 2.10 a version. It creates
    # no objects of Python.
    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    try:
        found = yaml.load(text, loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 2}" if mark is not None else ""
        reason = getattr(error, "problem", None) or "it has unexpected characters"
        raise ValueError(f"it is not YAML{where}: {reason}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if found is None or found == "":
        return {}
    if not isinstance(found, dict):
        raise ValueError("its front matter is not a mapping")
    return found


def _copied(key: str, value: Any) -> Any:
    """A field as it is copied, without nulls in lists; None if it cannot be."""
    if _is_text(value):
        return value
    if key in _TEXTS or not isinstance(value, list):
        return None
    values = [each for each in value if not _is_null(each)]
    return values if all(_is_entry(key, each) for each in values) else None


def _is_entry(key: str, value: Any) -> bool:
    """Whether a list under this key may have such an entry."""
    if isinstance(value, dict) and key in _RECORDS:
        return all(_is_text(each) for pair in value.items() for each in pair)
    return _is_text(value)


def _is_text(value: Any) -> bool:
    """Whether a value is a text in whole characters: escapes in YAML may be half of one."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _is_null(value: Any) -> bool:
    return isinstance(value, str) and value in _NULLS
