"""The patch series: its files and headers, and the tool's checks of them."""

import io
import re
import tarfile
from dataclasses import replace

import pytest
from tables import cases

from patches import series, tool
from patches.series import Patch
from patches.upstream import (
    PATCHES,
    BuildError,
    Sdist,
    cached_sdist,
    content_digest,
    fetch_sdist,
    is_pinned,
    part_files,
    read_upstream,
    write_part,
)

ALLOWED = "vendor/llama.cpp/src/llama-graph.cpp"
HEADER = (
    "From: A Name <a@example.org>\nSubject: a call site\n\nReason: none but this test\n"
    "Forwarded: no\nUpstream-Base: llama_cpp_python-0.3.36\nRemove-When: never\n"
)
BODY = f"--- a/{ALLOWED}\n+++ b/{ALLOWED}\n@@ -1,2 +1,3 @@\n one\n+between\n two\n"


def write_series(folder, patches):
    for name, text in patches.items():
        (folder / name).write_text(text)
    (folder / "series").write_text("".join(f"{name}\n" for name in patches))
    return folder


def make_sdist(folder, files):
    upstream = read_upstream()
    path = folder / upstream.sdist_name
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(f"{upstream.base}/{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return Sdist(path, upstream)


@pytest.fixture
def toy(tmp_path):
    """A toy upstream: (patch folder, source distribution, edited llama.cpp tree)."""
    sdist = make_sdist(tmp_path, {ALLOWED: b"one\ntwo\n", "vendor/llama.cpp/ggml/x.c": b"int x;\n"})
    tree = tmp_path / "edited"
    edited = {"src/llama-graph.cpp": b"one\nbetween\ntwo\n", "ggml/x.c": b"int x;\n"}
    for name, data in edited.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(data)
    folder = tmp_path / "patches"
    folder.mkdir()
    return write_series(folder, {}), sdist, tree


def test_series_is_valid():
    assert series.problems(PATCHES, read_upstream()) == []


def test_upstream_and_package_agree():
    upstream = read_upstream()
    pinned = f"llama-cpp-python=={upstream.local_version}"
    assert pinned in (PATCHES / "requirements.txt").read_text().splitlines()


@cases(
    "patches, said",
    ({"a.patch": HEADER.replace("Reason: none", "Nothing: none") + "\n" + BODY}, "no field Reason"),
    ({"a.patch": HEADER.replace("0.3.36", "0.3.35") + "\n" + BODY}, "but must be"),
    ({"a.patch": HEADER.replace(" <a@example.org>", "") + "\n" + BODY}, "NAME <MAIL>"),
    ({"a.patch": HEADER + "\n" + BODY.replace("llama-graph", "llama-chat")}, "ALLOWED_FILES"),
    ({"a.patch": HEADER + "\n" + BODY, "b.patch": HEADER + "\n" + BODY}, "already belongs"),
    ({"a.patch": HEADER}, "changes no file"),
    ({"a.patch": HEADER + "\n" + BODY + "+x\n" * series.MAX_ADDED_LINES}, "but the maximum is"),
)
def test_invalid_series_are_reported(tmp_path, patches, said):
    found = series.problems(write_series(tmp_path, patches), read_upstream())
    assert len(found) == 1 and said in found[0], found


def test_series_and_files_match_one_to_one(tmp_path):
    write_series(tmp_path, {"a.patch": HEADER + "\n" + BODY})
    (tmp_path / "series").write_text("b.patch\nb.patch\n")
    found = " | ".join(series.problems(tmp_path, read_upstream()))
    assert "b.patch twice" in found
    assert "lists b.patch, which does not exist" in found
    assert "a.patch is not in patches/series" in found


def test_files_of_add_is_not_the_global_files_option():
    given = ["add", "a.patch", "--tree", "edited", "--files", "src/a.cpp", "src/b.cpp"]
    args = tool.parser().parse_args(given)
    assert (args.files, args.changed) == (None, ["src/a.cpp", "src/b.cpp"])


def test_add_then_refresh_is_byte_stable(toy):
    folder, sdist, tree = toy
    upstream = read_upstream()
    fields = {"From": "A Name <a@example.org>", "Subject": "s", "Reason": "r", "Remove-When": "w"}
    patch = series.add("call.patch", fields, ["src/llama-graph.cpp"], tree, sdist, upstream, folder)
    assert patch.text.endswith(BODY)
    assert series.problems(folder, upstream) == []
    assert series.series_names(folder) == ["call.patch"]
    assert series.check_source([patch], sdist) == []
    for source in (None, tree):
        assert series.refresh(sdist, upstream, source, folder) == 0
    assert (folder / "call.patch").read_text() == patch.text
    assert series.apply_series([patch], sdist) == {ALLOWED: b"one\nbetween\ntwo\n"}


def test_refresh_uses_the_edited_tree(toy):
    folder, sdist, tree = toy
    write_series(folder, {"a.patch": HEADER + "\n" + BODY})
    (tree / "src/llama-graph.cpp").write_bytes(b"one\nbetween\ntwo\nthree\n")
    assert series.refresh(sdist, read_upstream(), tree, folder) == 1
    text = (folder / "a.patch").read_text()
    assert text.startswith(HEADER) and "+three" in text
    (tree / "ggml/x.c").write_bytes(b"int y;\n")
    with pytest.raises(BuildError, match=r"belong to no patch: vendor/llama\.cpp/ggml/x\.c"):
        series.refresh(sdist, read_upstream(), tree, folder)


def test_patches_with_fuzz_or_in_another_form_are_refused(tmp_path):
    sdist = make_sdist(tmp_path, {ALLOWED: b"other\ntwo\n"})
    patch = Patch("a.patch", HEADER + "\n" + BODY)
    with pytest.raises(BuildError, match=r"a\.patch does not apply"):
        series.apply_series([patch], sdist)
    assert "does not apply" in series.check_source([patch], sdist)[0]
    sdist = make_sdist(tmp_path, {ALLOWED: b"one\ntwo\nthree\nfour\n"})
    wide = BODY.replace("-1,2 +1,3", "-1,4 +1,5") + " three\n four\n"
    found = series.check_source([Patch("a.patch", HEADER + "\n" + wide)], sdist)
    assert found == ["a.patch: not in standard form: run `make patches-refresh`"]


def test_wrong_source_is_refused(tmp_path, user_folder):
    wrong = tmp_path / "wrong.tar.gz"
    wrong.write_bytes(b"not it")
    with pytest.raises(BuildError, match="SHA-256 is"):
        fetch_sdist(read_upstream(), wrong)
    assert cached_sdist(read_upstream()) is None


def test_the_built_part_replaces_the_source(tmp_path, user_folder):
    """The part is recognised in any archive. With another file or byte it is refused."""
    inside = {
        "llama_cpp/__init__.py": b"1",
        ALLOWED: b"one\ntwo\n",
        "vendor/llama.cpp/ggml/src/ggml-cuda/a.cu": b"kernel",
    }
    outside = {"docs/a.md": b"x", "vendor/llama.cpp/ggml/src/ggml-vulkan/a.cpp": b"y"}
    whole = make_sdist(tmp_path, inside | outside).path
    known = replace(read_upstream(), part=content_digest(dict(sorted(inside.items()))))
    assert part_files(whole, known) == inside
    target = tmp_path / "part" / known.sdist_name
    write_part(whole, known, target)
    assert is_pinned(target, known) and not is_pinned(whole, known)
    assert dict(Sdist(fetch_sdist(known, target), known).files()) == inside
    assert cached_sdist(known) is not None
    with pytest.raises(BuildError, match="UPSTREAM requires"):
        write_part(whole, read_upstream(), tmp_path / "other.tar.gz")
    for name, data in ((ALLOWED, b"one\n"), ("setup.py", b"")):
        wrong = make_sdist(tmp_path, inside | {name: data}).path
        with pytest.raises(BuildError, match="SHA-256 is"):
            fetch_sdist(known, wrong)


def test_the_pinned_part(source):
    upstream, sdist = source
    assert is_pinned(sdist.path, upstream)
    assert content_digest(part_files(sdist.path, upstream)) == upstream.part


@cases(
    "line, said",
    ("version = 1", "expected KEY = VALUE"),
    ("colour = red", "unknown key"),
    ("words", "KEY = VALUE"),
)
def test_upstream_file_is_strict(tmp_path, line, said):
    path = tmp_path / "UPSTREAM"
    path.write_text((PATCHES / "UPSTREAM").read_text() + line + "\n")
    with pytest.raises(BuildError, match=re.escape(said)):
        read_upstream(path)


@pytest.fixture
def source(real_cache):
    upstream = read_upstream()
    path = cached_sdist(upstream)
    if path is None:
        pytest.skip(f"no {upstream.sdist_name} in {real_cache}: `make build` puts it there")
    return upstream, Sdist(path, upstream)


def test_series_applies_and_refreshes_to_the_same_bytes(source):
    assert series.check_source(series.read_series(), source[1]) == []
