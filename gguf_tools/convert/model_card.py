"""Read the front matter of a checkpoint's README.md: its license, tags, languages and origin.

llama.cpp's converter copies these fields to the model's metadata. They are written by hand and can
contain anything that YAML allows. Fields that cannot be copied are left out with a note, because
the weights do not depend on them.
"""

from pathlib import Path
from typing import Any

README = "README.md"
MAX_BYTES = 1 << 20
# The fields that the converter reads: texts, lists of texts, and lists of texts or records.
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
    """Return the metadata fields of a checkpoint's README.md that can be copied into a GGUF file.

    Also return a note for the user that names the fields that cannot be copied, or "".
    """
    path = folder / README
    try:
        text = _front_matter(path)
        found = _parsed(text) if text is not None else {}
    except OSError as error:
        return {}, f"{path}: the metadata is not copied: {error.strerror}"
    except ValueError as error:
        return {}, f"{path}: the metadata is not copied: {error}"
    fields: dict[str, Any] = {}
    odd = []
    for key, value in found.items():
        if key not in _TEXTS | _LISTS | _RECORDS or _is_null(value):
            continue
        fields[key] = _copied(key, value)
        if fields[key] is None:
            odd.append(key)
            del fields[key]
    note = f"{path}: fields not copied (expected a text or a list of texts): {', '.join(odd)}"
    return fields, note if odd else ""


def _front_matter(path: Path) -> str | None:
    """Return the YAML text between two lines `---` at the start of a Markdown file.

    Return None if the file does not start with such a line. Raises ValueError, whose message is the
    reason, if the text is too long or is not UTF-8.
    """
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
        raise ValueError("the file is not UTF-8") from None
    first, *lines = [line.rstrip() for line in text.splitlines()]
    if first != "---":
        return None
    if "---" in lines:
        lines = lines[: lines.index("---")]
    elif not is_all:
        raise ValueError(f"the front matter is longer than {MAX_BYTES >> 20} MiB")
    # YAML does not allow tabs as indentation, but some files have them.
    return "\n".join(lines).replace("\t", "  ")


def _parsed(text: str) -> dict[Any, Any]:
    """Parse YAML text that must be a mapping. All scalar values are returned as strings.

    Raises ValueError, whose message is the reason, if the text is not a YAML mapping.
    """
    import yaml

    # This loader returns every scalar as a text, so the language `no` does not become False and the
    # version 2.10 does not become 2.1. It cannot create Python objects.
    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    try:
        found = yaml.load(text, loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        in_line = f" in line {mark.line + 2}" if mark is not None else ""
        reason = getattr(error, "problem", None) or "unexpected characters"
        raise ValueError(f"not valid YAML{in_line}: {reason}") from None
    except RecursionError:
        raise ValueError("the front matter is nested too deeply") from None
    if found is None or found == "":
        return {}
    if not isinstance(found, dict):
        raise ValueError("the front matter is not a mapping")
    return found


def _copied(key: str, value: Any) -> Any:
    """Return the value of a README field as it is copied into the GGUF file.

    Empty entries of a list are left out. Return None if the value is neither a text nor a valid
    list for this field.
    """
    if _is_text(value):
        return value
    if key in _TEXTS or not isinstance(value, list):
        return None
    values = [each for each in value if not _is_null(each)]
    return values if all(_is_entry(key, each) for each in values) else None


def _is_entry(key: str, value: Any) -> bool:
    """Return whether a value can be an entry of the list in a README field.

    key: name of the field.
    """
    if isinstance(value, dict) and key in _RECORDS:
        return all(_is_text(each) for pair in value.items() for each in pair)
    return _is_text(value)


def _is_text(value: Any) -> bool:
    """Return whether a value is a string that can be encoded as UTF-8.

    Escapes in YAML can produce lone surrogates, which cannot be encoded.
    """
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _is_null(value: Any) -> bool:
    return isinstance(value, str) and value in _NULLS
