"""The choice of a wheel's libraries by the processor's features."""

from pathlib import Path

import pytest
from command_line import python
from tables import cases

from gguf_tools import built

ALL = {name for features in built.SETS.values() for name in features}
AVX2 = set(built.SETS["avx2"])


@pytest.fixture
def prebuilt(tmp_path, monkeypatch):
    """The package as installed from a wheel, without its libraries."""
    for name in built.SETS:
        (tmp_path / "lib" / name).mkdir(parents=True)
    monkeypatch.setattr(built, "OWN", tmp_path)
    monkeypatch.delenv("LLAMA_CPP_LIB_PATH", raising=False)
    caches = (built.package, built.instruction_set)
    for each in caches:
        each.cache_clear()
    yield tmp_path
    for each in caches:
        each.cache_clear()


@cases(
    "features, chosen",
    (ALL, "avx512_vnni"),
    (ALL - {"avx512_vnni"}, "avx_vnni"),
    (ALL - {"avx512vl", "avx_vnni"}, "avx2"),
    (AVX2, "avx2"),
)
def test_the_best_set_that_the_processor_has_whole(features, chosen, prebuilt, monkeypatch):
    there = {
        where for each in built.SETS.values() for name, where in each.items() if name in features
    }
    monkeypatch.setattr(built, "_has_cpu_feature", lambda *where: where in there)
    assert built.instruction_set() == chosen


def test_a_processor_below_the_minimum_is_refused(prebuilt, monkeypatch):
    lacking = {built.SETS["avx2"][name] for name in ("avx2", "fma")}
    monkeypatch.setattr(built, "_has_cpu_feature", lambda *where: where not in lacking)
    with pytest.raises(built.NotBuilt, match=r"lacks fma, avx2, .*`make build`$"):
        built.instruction_set()


def test_features_are_those_that_the_kernel_lists():
    listed = Path("/proc/cpuinfo").read_text().partition("flags\t\t: ")[2].splitlines()
    if not listed:
        pytest.skip("the kernel lists no features")
    flags = {"lzcnt" if each == "abm" else each for each in listed[0].split()}
    found = {
        name
        for each in built.SETS.values()
        for name, where in each.items()
        if built._has_cpu_feature(*where)
    }
    assert found == ALL & flags


def test_hidden_processor_features_are_not_used():
    """A feature that the system hides, for example in a virtual machine, counts as missing."""
    code = (
        "from gguf_tools import built; print(built._has_cpu_feature(*built.SETS['avx2']['avx2']))"
    )
    assert python("-c", code, GLIBC_TUNABLES="glibc.cpu.hwcaps=-AVX2").stdout == "False\n"


def test_a_missing_package_is_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(built, "OWN", tmp_path / "none")
    monkeypatch.setattr(built, "find_spec", lambda _name: None)
    built.package.cache_clear()
    try:
        with pytest.raises(built.NotBuilt, match="not installed: run `make build`"):
            built.libraries()
        assert built.stamp() == {}
    finally:
        built.package.cache_clear()


LLAMA = "Failed to load shared library '/e/libllama.so': "


@cases(
    "said, why",
    (
        f"{LLAMA}/opt/conda/lib/libstdc++.so.6: version `GLIBCXX_3.4.32' not found (required by x)",
        "/opt/conda/lib/libstdc++.so.6 has no GLIBCXX_3.4.32, so it is older than the version "
        "that llama.cpp was built with: if the library belongs to another program, such as conda, "
        "update it, or remove its folder from LD_LIBRARY_PATH; if it belongs to the system, run "
        "`make build` in a clone on this system",
    ),
    (
        "/lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.38' not found (required by y)",
        "/lib/x86_64-linux-gnu/libc.so.6 has no GLIBC_2.38, so it is older than the version that "
        "llama.cpp was built with: run `make build` in a clone on this system",
    ),
)
def test_an_older_library_gets_its_own_remedy(said, why, monkeypatch):
    def refused(_name):
        raise RuntimeError(said)

    monkeypatch.setattr(built, "_preloads", lambda: [])
    monkeypatch.setattr(built, "import_module", refused)
    with pytest.raises(built.NotBuilt) as caught:
        built.bindings.__wrapped__()
    assert str(caught.value) == f"llama.cpp cannot be loaded: {why}"
