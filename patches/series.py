"""Read, check, apply and regenerate the patch series.

A patch is a header (From, Subject, Reason, Forwarded, Upstream-Base, Remove-When) followed by a
unified diff, whose paths are relative to the top of the source distribution. Each file belongs to
exactly one patch, so patches do not depend on each other's line numbers.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from patches.upstream import PATCHES, BuildError, Sdist, Upstream, write_atomic

HEADERS = ("From", "Subject", "Reason", "Forwarded", "Upstream-Base", "Remove-When")
CONTEXT_LINES = 1

# All files of llama.cpp that patches may change. New files are added here by hand, after a review
# of whether they need a patch.
ALLOWED_FILES = frozenset(
    f"vendor/llama.cpp/{name}"
    for name in (
        "ggml/src/ggml-cpu/CMakeLists.txt",
        "ggml/src/ggml-cpu/ggml-cpu.c",
        "ggml/src/ggml-cpu/ggml-cpu.cpp",
        "ggml/src/ggml-cuda/CMakeLists.txt",
        "ggml/src/ggml-cuda/common.cuh",
        "ggml/src/ggml-cuda/ggml-cuda.cu",
        "ggml/src/ggml-cuda/mmq.cu",
        "ggml/src/ggml-cuda/mmq.cuh",
        "ggml/src/ggml-cuda/mmvq.cu",
        "src/CMakeLists.txt",
        "src/llama-context.cpp",
        "src/llama-context.h",
        "src/llama-graph.cpp",
        "src/llama-impl.cpp",
        "src/llama-kv-cache.cpp",
        "src/llama-model-loader.cpp",
        "src/llama-model.cpp",
        "src/llama.cpp",
    )
)
MAX_ADDED_LINES = 200


@dataclass(frozen=True)
class Patch:
    """A patch of the source distribution: its file name and its text."""

    name: str
    text: str

    @property
    def header(self) -> str:
        """The text of the patch before the first diff."""
        match = re.search(r"^--- ", self.text, re.MULTILINE)
        return self.text[: match.start()] if match else self.text

    @property
    def fields(self) -> dict[str, str]:
        """The fields of the patch's header, such as Subject, by name.

        A line that starts with a space continues the previous field.
        """
        found: dict[str, str] = {}
        last = ""
        for line in self.header.splitlines():
            match = re.match(r"([A-Z][A-Za-z-]*):\s*(.*)", line)
            if match:
                last = match[1]
                found[last] = match[2].strip()
            elif line.startswith(" ") and last:
                found[last] += " " + line.strip()
        return found

    @property
    def files(self) -> list[str]:
        """The patched files in the order of the patch, as paths inside the source distribution."""
        pairs = re.findall(r"^--- (\S+)\n\+\+\+ (\S+)$", self.text, re.MULTILINE)
        return [(new if new != "/dev/null" else old).split("/", 1)[1] for old, new in pairs]

    @property
    def added_lines(self) -> int:
        """The number of lines that the patch adds."""
        body = self.text[len(self.header) :]
        return sum(
            line.startswith("+") and not line.startswith("+++ ") for line in body.splitlines()
        )


def series_names(folder: Path = PATCHES) -> list[str]:
    """Return the names of the patches in the order in which they are applied."""
    lines = (folder / "series").read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def read_series(folder: Path = PATCHES) -> list[Patch]:
    """Read all patches that the file `series` lists.

    Raises BuildError if one of them does not exist.
    """
    patches = []
    for name in series_names(folder):
        path = folder / name
        if not path.is_file():
            raise BuildError(f"{folder / 'series'} lists {name}, which does not exist")
        patches.append(Patch(name, path.read_text()))
    return patches


def problems(folder: Path, upstream: Upstream) -> list[str]:
    """Return the problems of the patches that can be found without the source, as sentences.

    folder: the folder with the patches and the file `series`.
    upstream: the release to which the patches apply.
    """
    found = []
    names = series_names(folder)
    for name in sorted({name for name in names if names.count(name) > 1}):
        found.append(f"patches/series lists {name} twice")
    on_disk = {path.name for path in folder.glob("*.patch")}
    found += [
        f"patches/series lists {name}, which does not exist"
        for name in names
        if name not in on_disk
    ]
    found += [f"{name} is not in patches/series" for name in sorted(on_disk - set(names))]
    owner: dict[str, str] = {}
    added = 0
    for patch in [Patch(name, (folder / name).read_text()) for name in names if name in on_disk]:
        fields = patch.fields
        for key in HEADERS:
            if not fields.get(key):
                found.append(f"{patch.name}: the header has no field {key}")
        base = fields.get("Upstream-Base", upstream.base)
        if base != upstream.base:
            found.append(f"{patch.name}: Upstream-Base is {base}, but must be {upstream.base}")
        if not re.fullmatch(r".+ <\S+@\S+>", fields.get("From", "A <a@b>")):
            found.append(f"{patch.name}: From must be NAME <MAIL>")
        if not patch.files:
            found.append(f"{patch.name}: the patch changes no file")
        for file in patch.files:
            if file not in ALLOWED_FILES:
                found.append(f"{patch.name}: {file} is not in ALLOWED_FILES of patches/series.py")
            if owner.setdefault(file, patch.name) != patch.name:
                found.append(f"{patch.name}: {file} already belongs to {owner[file]}")
        added += patch.added_lines
    if added > MAX_ADDED_LINES:
        found.append(f"the series adds {added} lines, but the maximum is {MAX_ADDED_LINES}")
    return found


def apply_series(patches: list[Patch], sdist: Sdist) -> dict[str, bytes]:
    """Apply all patches to the source, and return the contents of the patched files by path.

    Raises BuildError if a patch does not apply.
    """
    if not patches:
        return {}
    if shutil.which("patch") is None:
        raise BuildError("patch is missing: install it with `sudo apt install patch`.")
    names = {file for patch in patches for file in patch.files}
    with tempfile.TemporaryDirectory(prefix="moe-edge-patch.") as folder:
        root = Path(folder)
        for name, data in sdist.read(names).items():
            target = root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        for patch in patches:
            # Do not use `git apply`: inside another repository it changes nothing and exits with 0.
            command = ["patch", "-p1", "--fuzz=0", "--forward", "--no-backup-if-mismatch"]
            done = subprocess.run(
                command,
                cwd=root,
                input=patch.text.encode(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, "LC_ALL": "C"},
            )
            if done.returncode != 0:
                output = done.stdout.decode(errors="replace").strip()
                raise BuildError(f"{patch.name} does not apply to {sdist.path.name}:\n{output}")
        return {name: (root / name).read_bytes() for name in names if (root / name).exists()}


def diff_file(name: str, old: bytes | None, new: bytes | None) -> str:
    """Return the unified diff of one file, without dates.

    name: path of the file, for the diff's header.
    old, new: contents before and after the change, or None if the file does not exist.
    """
    with tempfile.TemporaryDirectory(prefix="moe-edge-diff.") as folder:
        sides = []
        for side, data in (("a", old), ("b", new)):
            path = Path(folder) / side
            path.write_bytes(data or b"")
            sides += ["--label", "/dev/null" if data is None else f"{side}/{name}"]
        command = ["diff", f"-U{CONTEXT_LINES}", "--minimal", *sides, "a", "b"]
        try:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, env={**os.environ, "LC_ALL": "C"}
            )
        except FileNotFoundError:
            raise BuildError(
                "diff is missing: install it with `sudo apt install diffutils`."
            ) from None
    if done.returncode > 1:
        raise BuildError(f"{name}: diff failed: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout.decode()


def regenerate(patch: Patch, old: Mapping[str, bytes], new: Mapping[str, bytes]) -> str:
    """Return the text of a patch in its standard form: header, then diffs sorted by file name.

    old, new: contents of the patched files before and after the patch, by path.
    """
    diffs = [diff_file(name, old.get(name), new.get(name)) for name in sorted(patch.files)]
    return patch.header.rstrip("\n") + "\n\n" + "".join(diffs)


def check_source(patches: list[Patch], sdist: Sdist) -> list[str]:
    """Return the problems of the patches that can only be found with the source, as sentences.

    A patch has a problem if it does not apply, or is not in the form that `refresh` writes.
    """
    try:
        new = apply_series(patches, sdist)
    except BuildError as error:
        return [str(error)]
    old = sdist.read(set(new))
    return [
        f"{patch.name}: not in standard form: run `make patches-refresh`"
        for patch in patches
        if regenerate(patch, old, new) != patch.text
    ]


def refresh(sdist: Sdist, upstream: Upstream, tree: Path | None, folder: Path = PATCHES) -> int:
    """Rewrite the patches in their standard form. Return the number of patches that changed.

    The standard form is the patch's header, then its diffs, sorted by file name.

    - tree: None to rewrite only the form of the patches. Otherwise an edited copy of the source
      distribution, or of the llama.cpp in it. The patches are then changed so that they produce the
      files of this copy.
    - sdist, upstream: the original source distribution and its release.
    - folder: the folder with the patches.

    Raises BuildError for a changed file in `tree` that belongs to no patch, so that no edit is
    lost.
    """
    patches = read_series(folder)
    owned = {file for patch in patches for file in patch.files}
    if tree is None:
        old = sdist.read(owned)
        new = apply_series(patches, sdist)
    else:
        old, new = read_edited(sdist, upstream, tree, owned)
        stray = sorted(name for name in new if name not in owned and new[name] != old.get(name))
        if stray:
            raise BuildError(
                f"{tree}: changed files that belong to no patch: {', '.join(stray)}: "
                "add them to a patch with `patches/tool.py add`"
            )
    changed = 0
    for patch in patches:
        text = regenerate(patch, old, new)
        if text != patch.text:
            write_atomic(folder / patch.name, text.encode())
            changed += 1
    return changed


def read_edited(
    sdist: Sdist, upstream: Upstream, tree: Path, owned: set[str]
) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Return (original contents, edited contents) of llama.cpp's files in an edited source tree.

    Both results are {path: contents}. They have the files in `owned`, and other files that were
    changed in `tree`. A file in `owned` that `tree` adds has no original contents. One that `tree`
    deletes has no edited contents. Other added or deleted files are left out.

    - sdist, upstream: the original source distribution and its release.
    - tree: an edited copy of the source distribution, or of the llama.cpp in it.
    - owned: paths of the files that belong to a patch.

    Raises BuildError if `tree` is not a copy of the source.
    """
    prefix = upstream.source + "/"
    if (tree / upstream.source).is_dir():
        prefix = ""
    elif not (tree / "ggml").is_dir():
        raise BuildError(f"{tree}: not a copy of the source distribution or of its llama.cpp")
    old: dict[str, bytes] = {}
    new: dict[str, bytes] = {}
    for name, data in sdist.files():
        if not name.startswith(prefix or upstream.source + "/"):
            continue
        edited = tree / name[len(prefix) :]
        content = edited.read_bytes() if edited.is_file() else None
        if name in owned or (content is not None and content != data):
            old[name] = data
            if content is not None:
                new[name] = content
    for name in owned - old.keys():
        edited = tree / name[len(prefix) :]
        if edited.is_file():
            new[name] = edited.read_bytes()
    return old, new


def add(
    name: str,
    fields: Mapping[str, str],
    files: list[str],
    tree: Path,
    sdist: Sdist,
    upstream: Upstream,
    folder: Path = PATCHES,
) -> Patch:
    """Create a patch from files of an edited source tree, and append it to the series.

    If a patch with this name exists, the files are added to it.

    fields: values for the patch's header, by the names in HEADERS. In the header of an existing
    patch, they replace the old values.
    files: paths inside llama.cpp or inside the source distribution.
    tree: an edited copy of the source distribution, or of the llama.cpp in it.
    sdist, upstream: the original source distribution and its release.
    folder: the folder with the patches.

    Raises BuildError if a field of the header is missing, a file is not edited, or a file belongs
    to another patch.
    """
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*\.patch", name):
        raise BuildError(f"{name}: not a valid name: use lower-case-words.patch")
    path = folder / name
    existing = Patch(name, path.read_text()) if path.exists() else None
    values = {**(existing.fields if existing else {}), **{k: v for k, v in fields.items() if v}}
    values["Upstream-Base"] = upstream.base
    values.setdefault("Forwarded", "no")
    for key in HEADERS:
        if not values.get(key):
            raise BuildError(f"{name}: the field {key} is missing: set it with --{key.lower()}")
    prefix = upstream.source + "/"
    owned = {file if file.startswith(prefix) else prefix + file for file in files}
    owned |= set(existing.files if existing else [])
    for other in read_series(folder):
        taken = owned & set(other.files)
        if other.name != name and taken:
            raise BuildError(f"{', '.join(sorted(taken))} belongs to {other.name}")
    old, new = read_edited(sdist, upstream, tree, owned)
    for file in sorted(owned):
        if old.get(file) == new.get(file):
            raise BuildError(f"{file} is not changed in {tree}")
    head = "".join(f"{key}: {values[key]}\n" for key in HEADERS[:2])
    tail = "".join(f"{key}: {values[key]}\n" for key in HEADERS[2:])
    diffs = "".join(diff_file(file, old.get(file), new.get(file)) for file in sorted(owned))
    patch = Patch(name, f"{head}\n{tail}\n{diffs}")
    write_atomic(path, patch.text.encode())
    names = series_names(folder)
    if name not in names:
        write_atomic(folder / "series", "".join(f"{n}\n" for n in [*names, name]).encode())
    return patch
