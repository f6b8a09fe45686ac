"""Names of policies, settings and architectures are written in one place only.

No code that runs a model names an architecture.
"""

import ast
import re
from functools import cache

import pytest
from test_layers import REPO, SOURCES, imports

from gguf_tools.experts import PROVEN
from orchestrator.policy import BASELINE, POLICIES, Policy, policy_settings
from orchestrator.policy.base import About

ORCHESTRATOR = REPO / "orchestrator"
NATIVE = REPO / "patches" / "native"
# Packages that may name a policy and its settings: the policies, their shared code, and comparisons
# of them.
FREE = ("allocation", "policy", "lab")
# Words that events and the store use for their own mechanisms.
MECHANISM = ("prefetch", "n_ahead")
# Policies whose name is an ordinary word, such as llama.cpp's context. For these the test only
# checks imports.
ORDINARY = ("context",)
# Settings whose name is an ordinary word.
WORDS = ("losses", "placement")
# Files outside the policies that use a policy's setting.
USES = {
    "profile": {"orchestrator/cli/options.py", "orchestrator/cache/profile.py"},
    "transition_rate": {
        "orchestrator/runtime/driver.py",
        "orchestrator/plan/layouts.py",
        "orchestrator/lab/replay/report.py",
    },
}


def runtime_files():
    return [
        path
        for path in sorted(ORCHESTRATOR.rglob("*.py"))
        if path.relative_to(ORCHESTRATOR).parts[0] not in FREE
    ]


@cache
def words_of(path):
    """Return the names and texts in a module's code, without comments and docstrings."""
    tree = ast.parse(path.read_text())
    found = set()
    said = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and ast.get_docstring(node) is not None
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        found |= {getattr(node, each, None) or "" for each in ("id", "attr", "arg")}
        text = getattr(node, "value", None)
        if isinstance(text, str) and id(node) not in said:
            found.update(text.replace("--", " ").replace("-", "_").split())
    return found


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != BASELINE])
def test_no_policy_is_named_elsewhere(policy):
    naming = [
        path.relative_to(REPO).as_posix()
        for path in runtime_files()
        if (
            f"orchestrator.policy.{policy}" in imports(path, set(SOURCES))
            if policy in ORDINARY
            else policy in words_of(path)
        )
    ]
    assert not naming


@pytest.mark.parametrize(
    "name", [each for each in policy_settings() if each not in (*MECHANISM, *WORDS)]
)
def test_no_setting_of_a_policy_is_named_elsewhere(name):
    naming = {
        path.relative_to(REPO).as_posix() for path in runtime_files() if name in words_of(path)
    }
    assert naming <= USES.get(name, set())


def test_no_architecture_is_named():
    """Exceptions are names of tokenizers and answer formats, and a shape for benchmarks."""
    known = {each.replace("-", "_") for each in PROVEN if each != "llama"}  # as in llama.cpp
    naming = {
        path.relative_to(ORCHESTRATOR).as_posix(): words_of(path) & known
        for path in ORCHESTRATOR.rglob("*.py")
    }
    assert {path: found for path, found in naming.items() if found} == {
        "lab/bench/options.py": {"olmoe"},
        "serve/bodies.py": {"exaone_moe", "gemma4"},
        "serve/schemas.py": {"deepseek"},
    }
    for path in NATIVE.rglob("*.*"):
        assert not re.search(r"LLM_ARCH_(?!UNKNOWN)", path.read_text(errors="replace")), path
        named = set(re.findall(r'"([\w.-]+)"', path.read_text(errors="replace")))
        assert not named & set(PROVEN), path


def test_decide_requires_asked_in():
    with pytest.raises(TypeError, match="the policy class Silent defines the method decide, but"):
        type("Silent", (Policy,), {"about": About("silent"), "decide": lambda *_: None})
