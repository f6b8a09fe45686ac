"""Check the English of the code: names, docstrings, comments and messages.

Without arguments it checks the code of the repository, otherwise the given files and folders. It
prints `file:line: 'phrase': what to write instead` for each finding. `make check` runs it.
"""

import ast
import re
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parents[2]
FOLDERS = ("gguf_tools", "models", "orchestrator", "patches", "tests")
# The literals there are mostly data: only those that are raised or printed are messages.
WITH_DATA = ("models/", "tests/")
# Names in tests may be any, and a test's docstring is optional.
TESTS = "tests/"
C_SUFFIXES = (".c", ".cpp", ".cu", ".cuh", ".h")
MOST_WORDS = 30  # in a sentence
MESSAGE_WORDS = 4  # a literal with fewer words is no message
MOST_EXCEPTIONS = 20
# Public modules, classes, functions and methods without a docstring. The number may only fall.
UNDOCUMENTED = 177

# A note is a comment after code on the same line.
DOCSTRING, COMMENT, NOTE, MESSAGE = "docstring", "comment", "note", "message"
# The kinds of findings.
NAME, TEXT = "name", "text"

# A regular expression for a phrase, in which a space stands for any white space, and the remedy.
PHRASES = {
    r"\bbehind\b": "after, beyond",
    r"\b(nobody|somebody|anybody|whoever|no one|someone)\b": "name who does it",
    r"(^|[,;:(] |\b(of|by|for|from|to|than|as) )(who|whom)\b": "name who does it",
    r"\b(of|by|for|from|with|to|than|in|on|about) what\b(?! each)": "name the thing",
    r"\b(and|or|but|as|is|are|knows?|says?) what\b": "name the thing",
    r", what\b": "name the thing",
    r"\bwhat (it|they|ended|has|have|had|there|goes|runs)\b": "name the thing",
    r"\bwhere (it|they|that|there|this|nothing|no|not|one|some|its|others)\b": "if, when",
    r"\bin the place of\b": "instead of",
    r"\bbeside\b(?!:)": "next to, in addition to",
    r"\b(go|goes|going|went) by\b": "use, follow",
    r"\b(as|so) far as\b": "if, up to, for which",
    r"\b(is|are) there(?=[,.;]|$)": "name the place, or say that it exists",
    r"\b(lie|lies) (in|on|at|there)\b": "be in, be on",
    r"\b(another|(any|every|no|the) other) one\b|\b(single|such|other) ones?\b": "repeat the noun",
    r"\bone after the other\b": "in turn, successively",
    r"\bany more\b": "any longer, no longer",
    r"\bso many\b(?!( \w+)? that)": "name the parameter",
    r"\b(go|goes|went|do|does) without (it|one|them)\b": "name what is missing",
    r"\b(that|which|it|they|ones|these|those) (is|are|was|were) to\b": "must, should, will",
    r"\bloss to spend\b": "loss budget",
    r"\b(loses?|losing) nothing\b": "lossless",
    r"\bhas room\b|\broom\b(?!:)": "free space, reservation, package",
    r"\bpassing (expert|one|request|slice|cop)": "streaming, streamed",
    r"\bmode line\b": "status line",
    r"\bplain path\b": "llama.cpp's own path",
    r"\b(unlearned|unwatched|taught)\b": "see the glossary in ARCHITECTURE.md",
    r"\balike\b(?!`)": "equally, both, uniform",
}
# How a text may not begin, by its kind.
OPENINGS = {
    DOCSTRING: r"what|where|who|whose|of|as|it|they|that|there|has|is",
    COMMENT: r"what|where|who|whose|of",
    NOTE: r"what|where|who|whose",
    MESSAGE: r"what",
}
OPENING_REMEDY = "begin with a verb or with a noun phrase"
# Words that no part of a name may be, and the words to use.
GLOSSARY = {
    "alike": "uniform",
    "behind": "after",
    "beside": "other, extra",
    "brought": "prefetched, loaded",
    "passing": "streamed",
    "room": "reservation, free",
    "taught": "load_history",
    "teach": "load_history",
    "told": "notified",
    "unlearned": "without_learning",
    "unwatched": "static",
    "whose": "owner",
}
# Names that no class and no function may have.
NAMES = {
    "Heard": "ProbeQueue",
    "Held": "SequenceSnapshot",
    "Runs": "ResolvedPlan",
    "Seats": "SlotManager",
    "Shelf": "PromptCache",
    "Wants": "PolicyRequirements",
    "again": "inherit",
    "asked_mix": "tier_fractions",
    "few_experts": "warmup_mode",
    "go_by": "update_settings",
    "mode_line": "status_line",
}


class Exempt(NamedTuple):
    """Names or a phrase that stay. `file` and `found` are patterns of a shell, in lower case."""

    kind: str
    file: str
    found: str
    reason: str


EXCEPTIONS = (
    Exempt(NAME, "patches/native/*", "*passing*", "a field of the ABI, and the code that fills it"),
    Exempt(NAME, "orchestrator/*", "*passing*", "the field of the ABI, as policies write it"),
    Exempt(NAME, "patches/native/*", "*room*", "a callback of the ABI, and its arguments"),
    Exempt(NAME, "orchestrator/*", "*room*", "that callback, and a field of placements"),
    Exempt(NAME, "patches/native/*", "*unwatched*", "a state of the table that native tests read"),
    Exempt(NAME, "patches/native/*", "behind", "a ticket of a slot that native tests read"),
    Exempt(NAME, "orchestrator/policy/floor.py", "*behind*", "a setting, and its reader"),
    Exempt(NAME, "orchestrator/cost/plans.py", "*behind*", "a key of `moe-edge plan --json`"),
    Exempt(NAME, "orchestrator/policy/base.py", "told_in", "a field that recorded plans have"),
    Exempt(TEXT, "patches/native/*", "room", "the name of a callback of the ABI"),
    Exempt(TEXT, "orchestrator/lab/check/child.py", "lie on", "text that models read in a test"),
)


class Finding(NamedTuple):
    """A phrase or a name that does not follow the rules."""

    file: str
    line: int
    kind: str
    found: str
    instead: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.found!r}: {self.instead}"


class Text(NamedTuple):
    """A piece of prose, and the line on which it begins."""

    kind: str
    line: int
    text: str


_PHRASES = [
    (re.compile(phrase.replace(" ", r"\s+"), re.IGNORECASE), instead)
    for phrase, instead in PHRASES.items()
]
_OPENINGS = {
    kind: re.compile(rf"\s*({words})\b(?![^.]*\?)(?!\w*:)", re.IGNORECASE)
    for kind, words in OPENINGS.items()
}
_SENTENCE_END = re.compile(r"[.!?:;][\"')\]]*\s|\n\s*\n|\n(?=\s*(?:[-*|]|\d+\.) |.*\S {2,}\S)")
_WORD = re.compile(r"[\w'./-]*[A-Za-z][\w'./-]*")
_PART_OF_NAME = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
# Comments, and literals, because these can contain what looks like the start of a comment.
_PYTHON = re.compile(
    r"(?P<comment>#[^\n]*)|(\"{3}|'{3})(?:\\.|.)*?\2|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'",
    re.DOTALL,
)
_C = re.compile(
    r"(?P<comment>//[^\n]*|/\*.*?\*/)|R\"(\w*)\(.*?\)\2\""
    r"|(?P<literals>\"(?:\\.|[^\"\\\n])*\"(?:\s*\"(?:\\.|[^\"\\\n])*\")*)|'(?:\\.|[^'\\\n])'",
    re.DOTALL,
)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_SHOWING = {"add_argument", "echo", "exit", "note", "option", "print", "say", "setting", "warn"}


class Lines:
    """Translates positions in a text to line numbers."""

    def __init__(self, text: str) -> None:
        self._ends = [match.start() for match in re.finditer("\n", text)]

    def at(self, position: int) -> int:
        """Return the line, counted from 1."""
        return bisect_left(self._ends, position) + 1


def comments(source: str, pattern: re.Pattern[str], marker: str) -> Iterator[Text]:
    """Yield the comments. Successive lines with nothing but a comment are one text."""
    lines = Lines(source)
    block: list[str] = []
    first = last = 0
    kind = COMMENT
    for match in pattern.finditer(source):
        if match["comment"] is None:
            continue
        line = lines.at(match.start())
        start = source.rfind("\n", 0, match.start()) + 1
        is_alone = not source[start : match.start()].strip()
        if block and not (is_alone and line == last + 1):
            yield Text(kind, first, "\n".join(block))
            block = []
        if not block:
            first, kind = line, COMMENT if is_alone else NOTE
        block.append(re.sub(marker, "", match["comment"], flags=re.MULTILINE))
        last = lines.at(match.end()) if is_alone else -1
    if block:
        yield Text(kind, first, "\n".join(block))


def docstring_of(node: ast.AST) -> ast.Constant | None:
    """Return the docstring of a module, class or function."""
    if isinstance(node, _DOCUMENTED) and node.body and isinstance(node.body[0], ast.Expr):
        value = node.body[0].value
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            return value
    return None


def literal_of(node: ast.AST) -> str | None:
    """Return the text of a literal, with X for each expression in it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(literal_of(each) or "X" for each in node.values)
    return None


def messages(node: ast.AST, is_shown: bool) -> Iterator[Text]:
    """Yield the literals that may be messages. is_shown: all of them, else only printed ones."""
    text = literal_of(node)
    if text is not None and is_shown:
        yield Text(MESSAGE, getattr(node, "lineno", 1), text)
    if text is not None:
        return
    if isinstance(node, ast.Raise):
        is_shown = True
    if isinstance(node, ast.Call):
        name = _name_of(node.func)
        if name == "split":
            return
        is_shown = is_shown or name in _SHOWING
    said = docstring_of(node)
    for child in ast.iter_child_nodes(node):
        if said is None or getattr(child, "value", None) is not said:
            yield from messages(child, is_shown)


class Name(NamedTuple):
    """A name that the code gives. is_defined: to a class or a function."""

    line: int
    name: str
    is_defined: bool = False


def names(tree: ast.AST) -> Iterator[Name]:
    """Yield the names that a module gives."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 1)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield Name(line, node.name, is_defined=True)
        elif isinstance(node, ast.arg):
            yield Name(line, node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield Name(line, node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield Name(line, node.attr)


def _name_of(node: ast.expr) -> str:
    """Return the last part of a dotted name, or "" for other expressions."""
    return str(getattr(node, "attr", getattr(node, "id", "")))


def undocumented(tree: ast.AST) -> int:
    """Return the number of public modules, classes, functions and methods without a docstring.

    An overload has no docstring, because the function after it has one.
    """
    count = int(docstring_of(tree) is None)
    pending = [tree]
    while pending:
        for node in ast.iter_child_nodes(pending.pop()):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                if node.name.startswith("_") or "overload" in map(_name_of, node.decorator_list):
                    continue
                count += docstring_of(node) is None
                if isinstance(node, ast.ClassDef):
                    pending.append(node)
            elif isinstance(node, ast.If | ast.Try):
                pending.append(node)
    return count


def of_python(source: str, is_shown: bool) -> tuple[list[Text], list[Name], int]:
    """Return the texts of a file, its names, and the number of undocumented public ones."""
    tree = ast.parse(source)
    texts = [*comments(source, _PYTHON, r"^#[:!]*\s?")]
    for node in ast.walk(tree):
        said = docstring_of(node)
        if said is not None:
            texts.append(Text(DOCSTRING, said.lineno, str(said.value)))
    texts += messages(tree, is_shown)
    return texts, [*names(tree)], undocumented(tree)


def of_c(source: str) -> tuple[list[Text], list[Name]]:
    """Return the texts of a C, C++ or CUDA file and its names."""
    texts = [*comments(source, _C, r"^\s*(?://+|/?\*+/?)\s?|\*/\s*$")]
    lines = Lines(source)
    for match in _C.finditer(source):
        if match["literals"]:
            parts = re.findall(r"\"((?:\\.|[^\"\\])*)\"", match["literals"])
            texts.append(Text(MESSAGE, lines.at(match.start()), "".join(parts)))
    code = _C.sub(lambda match: "\n" * match[0].count("\n"), source)
    lines = Lines(code)
    given = {}
    for match in re.finditer(r"\b[A-Za-z_]\w*", code):
        given.setdefault(match[0], match.start())
    return texts, [Name(lines.at(position), name, True) for name, position in given.items()]


def faults_of_text(text: Text) -> Iterator[tuple[int, str, str]]:
    """Yield (line, phrase, remedy) for each fault of a text."""
    kind, first, said = text
    if kind == MESSAGE and (len(said.split()) < MESSAGE_WORDS or "\nimport " in f"\n{said}"):
        return
    # Code between backticks is no prose, but keeps its lines.
    said = re.sub(r"`[^`]*`", lambda match: "X" + "\n" * match[0].count("\n"), said)
    opening = _OPENINGS[kind].match(said)
    if opening:
        yield first, opening[1], OPENING_REMEDY
    for pattern, instead in _PHRASES:
        for match in pattern.finditer(said):
            line = first + said.count("\n", 0, match.start())
            yield line, " ".join(match[0].split()), instead
    start = 0
    for match in [*_SENTENCE_END.finditer(said), None]:
        end = match.start() if match else len(said)
        sentence = _WORD.findall(said, start, end)
        if len(sentence) > MOST_WORDS:
            line = first + said.count("\n", 0, start)
            instead = f"{len(sentence)} words, of at most {MOST_WORDS}: write two sentences"
            yield line, " ".join(sentence[:4]) + " ...", instead
        start = match.end() if match else end


def faults_of_names(given: Iterable[Name]) -> Iterator[tuple[int, str, str]]:
    """Yield (line, name, remedy) for each name with a word that the glossary replaces."""
    seen = set()
    for line, name, is_defined in given:
        if is_defined and name in NAMES:
            yield line, name, NAMES[name]
        if name in seen:
            continue
        seen.add(name)
        for part in _PART_OF_NAME.findall(name):
            if part.lower() in GLOSSARY:
                yield line, name, f"{part.lower()}: {GLOSSARY[part.lower()]}"


def examine(path: Path, name: str) -> tuple[list[Finding], int]:
    """Return the findings in a file, exceptions included, and its undocumented public names."""
    source = path.read_text(encoding="utf-8")
    n_bare = 0
    if path.suffix == ".py":
        texts, given, n_bare = of_python(source, not name.startswith(WITH_DATA))
    else:
        texts, given = of_c(source)
    if name.startswith(TESTS):
        given, n_bare = [], 0
    found = [
        Finding(name, line, kind, *rest)
        for kind, faults in (
            (TEXT, (fault for text in texts for fault in faults_of_text(text))),
            (NAME, faults_of_names(given)),
        )
        for line, *rest in faults
    ]
    return sorted(found), n_bare


def exemption_of(finding: Finding) -> Exempt | None:
    """Return the first exception that covers a finding."""
    for each in EXCEPTIONS:
        if (
            finding.kind == each.kind
            and fnmatchcase(finding.file, each.file)
            and fnmatchcase(finding.found.lower(), each.found)
        ):
            return each
    return None


def sources(roots: Iterable[Path]) -> Iterator[Path]:
    """Yield the files to check."""
    for root in roots:
        for path in sorted(root.rglob("*")) if root.is_dir() else [root]:
            if path.suffix == ".py" or path.suffix in C_SUFFIXES:
                yield path


def check(roots: Iterable[Path]) -> tuple[list[Finding], int, Counter[Exempt]]:
    """Return the findings, the number of undocumented public names, and the exceptions' uses."""
    found: list[Finding] = []
    used: Counter[Exempt] = Counter()
    n_bare = 0
    for path in sources(roots):
        path = path.resolve()
        name = path.relative_to(REPO).as_posix() if path.is_relative_to(REPO) else str(path)
        here, bare = examine(path, name)
        n_bare += bare
        for each in here:
            exception = exemption_of(each)
            if exception is None:
                found.append(each)
            else:
                used[exception] += 1
    return found, n_bare, used


def main() -> int:
    """Print the findings, and return the exit status."""
    roots = [Path(each) for each in sys.argv[1:]]
    found, n_bare, used = check(roots or [REPO / each for each in FOLDERS])
    for each in found:
        print(each)
    if roots:
        return int(bool(found))
    problems = [f"{len(found)} findings" for _ in found[:1]]
    problems += [
        f"EXCEPTIONS: {each.found!r} in {each.file} no longer occurs: remove it"
        for each in EXCEPTIONS
        if not used[each]
    ]
    if n_bare > UNDOCUMENTED:
        problems.append(
            f"{n_bare} public names without a docstring, of at most {UNDOCUMENTED}: "
            "document those that you added (ruff check --select D1)"
        )
    elif n_bare < UNDOCUMENTED:
        problems.append(f"UNDOCUMENTED can fall from {UNDOCUMENTED} to {n_bare}: write that number")
    for problem in problems:
        print(f"prose: {problem}")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
