"""A policy's name and a setting's name stand in one place each, and an architecture's in none that
runs a model."""

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
# The rooms that may name a policy and its settings: the policies themselves, what they share, and
# what compares them.
FREE = ("allocation", "policy", "lab")
# Events and the store have these words for what they do themselves.
MECHANISM = ("prefetch", "n_ahead")
# Policies named by a word that other things have too, as llama.cpp's context: of these nobody may
# import the file.
ORDINARY = ("context",)
# Settings named by a word that other things have too.
WORDS = ("losses", "placement")
# Where a policy's setting is used outside the policies.
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
    """Names and texts of a module's code; comments and docstrings say what they like."""
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
def test_nobody_knows_a_policy_by_name(policy):
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
def test_a_setting_of_a_policy_is_named_where_it_is_declared(name):
    naming = {
        path.relative_to(REPO).as_posix() for path in runtime_files() if name in words_of(path)
    }
    assert naming <= USES.get(name, set())


def test_nobody_knows_an_architecture_by_name():
    """But for tokenizers and a form of answers that have such names as well, and the shapes that a
    benchmark makes models of."""
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


def test_a_policy_that_is_never_asked_does_not_decide():
    with pytest.raises(TypeError, match="Silent defines decide, but about"):
        type("Silent", (Policy,), {"about": About("silent"), "decide": lambda *_: None})
