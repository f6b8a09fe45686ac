"""Policies of other packages are found like our own, and a broken one breaks nothing."""

import json

import click
import pytest
from command_line import DEMO, python
from own_policies import policy
from tables import cases

from orchestrator.cli.main import COMMANDS, cli
from orchestrator.config import Config
from orchestrator.errors import ConfigError, PolicyError
from orchestrator.policy import POLICIES, policy_settings
from orchestrator.policy.base import About
from orchestrator.policy.lru import LRU
from orchestrator.policy.registry import RESERVED, Policies

USE = f"""
import json
from orchestrator import LLM
with LLM({str(DEMO)!r}, ram="400MiB", policy="tiny", expert_ram="16MiB", tininess=3) as llm:
    print(json.dumps([llm.plan.policy, llm.plan.settings, llm.notes]))
"""


def test_an_installed_policy_is_found_like_ours(library, installed, moe_edge):
    folder = installed(tiny_package=policy())
    said = " ".join(moe_edge(folder, "chat", "--help-all").stdout.split())
    assert "mixed, tiny, plain" in said
    assert "Policy tiny: --tininess N A setting of a package. [default: 2]" in said
    said = " ".join(moe_edge(folder, "replay", "--help-all").stdout.split())
    assert "--tininess N" in said
    done = moe_edge(
        *(folder, "chat", "-m", DEMO, "-p", "hello", "--json", "--max-tokens", 4),
        *("--policy", "tiny", "--tininess", 3, "--expert-ram", "16MiB"),
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["stats"]["mode"].startswith("managed: tiny ")
    wrong = moe_edge(folder, "chat", "-p", "hello", "--policy", "lru", "--tininess", 3)
    assert "--tininess has no effect with --policy lru" in wrong.stderr
    done = python("-c", USE, PYTHONPATH=str(folder))
    assert (done.returncode, done.stderr) == (0, "")
    name, settings, _ = json.loads(done.stdout)
    assert (name, settings) == ("tiny", {"tininess": 3})


@cases(
    "module, value, said",
    ("import nothing_there", None, "cannot be imported (ModuleNotFoundError: No module named"),
    ("raise SystemExit(3)", None, "cannot be imported (SystemExit: 3)"),
    ("def Tiny(): pass", None, "is not a policy: derive a class from"),
    ("Tiny = 3", None, "3 is not a policy"),
    (policy(), "broken:Huge", "AttributeError"),
    (policy(name="lru"), None, "has the name lru, which moe-edge uses"),
    (policy(name="plain"), None, "has the name plain, which moe-edge uses"),
    (policy(name="a b"), None, "has the name 'a b': use a-z"),
    (policy(setting="retention"), None, "setting retention with another default, range or help"),
    (policy(setting="ram"), None, "has the setting ram, which moe-edge uses itself"),
    ("from orchestrator.policy.base import Policy\nclass Tiny(Policy): pass", None, "no `about`"),
)
def test_a_broken_policy_is_named_once_and_left_out(installed, moe_edge, module, value, said):
    folder = installed(value, broken=module)
    done = moe_edge(folder, "chat", "--help-all")
    assert done.returncode == 0 and said in done.stderr and "broken" in done.stderr
    assert done.stderr.count("Note:") == 1 and done.stderr.endswith("This policy is left out.\n")
    assert "--retention" in done.stdout
    done = moe_edge(folder, "--help")
    assert (done.returncode, done.stderr) == (0, "")


@cases(
    "points, said",
    ("[moe_edge.policies]\nbroken\n", "the entry points of the package broken cannot be read"),
    ("[moe_edge.policies]\nbroken = a b\n", "broken cannot be imported (AttributeError"),
)
def test_damaged_metadata_breaks_no_command(installed, moe_edge, points, said):
    done = moe_edge(installed(points=points, broken=policy()), "chat", "--help-all")
    assert done.returncode == 0 and said in done.stderr and done.stderr.count("\n") == 1
    assert "--retention" in done.stdout


def test_a_fault_of_many_lines_is_one_sentence(installed, moe_edge):
    folder = installed(broken="raise RuntimeError('one\\ntwo')")
    done = moe_edge(folder, "chat", "--help-all")
    assert "(RuntimeError: one two). This policy is left out.\n" in done.stderr


def test_an_llm_notes_a_broken_policy(library, installed):
    folder = installed(tiny_package=policy(), broken="import nothing_there")
    done = python("-c", USE, PYTHONPATH=str(folder))
    assert (done.returncode, done.stderr) == (0, "")
    _, _, notes = json.loads(done.stdout)
    assert len([each for each in notes if "broken cannot be imported" in each]) == 1


def test_a_policy_that_imports_the_library_is_no_problem(installed, moe_edge):
    """Either the package or the command is imported first."""
    before = "from orchestrator import LLM\nfrom orchestrator.config import Config"
    folder = installed(tiny_package=policy(before=before))
    done = moe_edge(folder, "chat", "--help-all")
    assert (done.returncode, done.stderr) == (0, "") and "--tininess" in done.stdout
    program = "import tiny_package\nfrom orchestrator.policy import POLICIES\nprint(*POLICIES)"
    done = python("-c", program, PYTHONPATH=str(folder))
    assert (done.returncode, done.stderr) == (0, "") and "tiny" in done.stdout.split()


def test_a_class_of_a_module(library, tmp_path, moe_edge):
    (tmp_path / "tiny_module.py").write_text(policy())
    done = moe_edge(
        *(tmp_path, "chat", "-m", DEMO, "-p", "hello", "--json", "--max-tokens", 4),
        *("--policy", "tiny_module:Tiny", "--expert-ram", "16MiB"),
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["stats"]["mode"].startswith("managed: tiny ")
    done = moe_edge(tmp_path, "chat", "-p", "hello", "--policy", "tiny_module:Huge")
    assert done.returncode == 1 and "tiny_module:Huge cannot be imported" in done.stderr


class Small(LRU):
    about = About(name="small", precisions=LRU.precisions, wants=LRU.about.wants)


def test_a_class_is_added_and_replaced():
    known = Policies([LRU], ["plain"])
    assert known.named("lru") == "lru" and known.named("what?") == "what?"
    assert known.named(Small) == "small" and known["small"] is Small
    again = type("Small", (LRU,), {"about": Small.about, "__module__": Small.__module__})
    assert known.named(again) == "small" and known["small"] is again  # a cell that runs again
    other = type("Other", (LRU,), {"about": Small.about})
    with pytest.raises(PolicyError, match="has the name small, which"):
        known.named(other)


def test_where_another_process_finds_a_policy():
    known = Policies([LRU], ["plain"])
    known.add(Small)
    assert known.for_processes("lru") == "lru"
    assert known.for_processes("small") == f"{Small.__module__}:Small"
    known.add(type("Inner", (LRU,), {"about": About(name="inner"), "__module__": "__main__"}))
    with pytest.raises(ConfigError, match="inner is defined in __main__, from which"):
        known.for_processes("inner")


def test_config_takes_a_class():
    try:
        assert Config.build(model="m.gguf", policy=Small).policy == "small"
    finally:
        POLICIES.pop("small", None)


def test_reserved_names_are_those_of_the_commands():
    """The options of each command that has those of the policies, without these."""
    found = set(Config.declared())
    for name in COMMANDS:
        context = click.Context(cli)
        command = cli.get_command(context, name)
        own = {each.name for each in command.get_params(click.Context(command))}
        if own & set(policy_settings()):
            found |= own
    found -= {"help_all", "_click_default_help", *policy_settings()}
    assert found == RESERVED
