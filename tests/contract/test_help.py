"""`--help` fits a screen. `--help-all` and the documents have every option."""

import re

import click
import pytest
from click.testing import CliRunner
from generated import REPO, commands_of, documents, program

from orchestrator.policy import policy_settings


def all_commands(group):
    """Yield every command with its name after `moe-edge`, including `moe-edge` itself."""
    yield "", group
    for name, command in commands_of(group).items():
        if not isinstance(command, click.Group):
            yield name, command
            continue
        for below, found in all_commands(command):
            yield f"{name} {below}".strip(), found


COMMANDS = dict(all_commands(program()))
OF_POLICIES = [each for each in policy_settings().values() if each.option]


def help_of(name, flag="--help", columns=80):
    words = [*name.split(), flag]
    done = CliRunner().invoke(program(), words, env={"COLUMNS": str(columns)})
    assert done.exit_code == 0, done.stderr
    return done.stdout


def options_of(name):
    """Return the longest flag of each visible option."""
    ctx = click.Context(COMMANDS[name], help_option_names=["--help"])
    params = COMMANDS[name].get_params(ctx)
    shown = [each for each in params if isinstance(each, click.Option) and not each.hidden]
    return [max(each.opts, key=len) for each in shown]


def shows(text, flag):
    return re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", text) is not None


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_a_screen(name):
    """40 lines of 80 columns. At 40 columns no word is split and no line is longer."""
    wide = help_of(name).splitlines()
    assert len(wide) <= 40 and max(map(len, wide)) <= 80
    narrow = help_of(name, columns=40)
    assert max(map(len, narrow.splitlines())) <= 40
    assert set(narrow.split()) == set(" ".join(wide).split())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_shown_and_documented(name):
    everything = help_of(name, "--help-all")
    pages = "\n".join((REPO / page).read_text() for page in documents())
    for flag in options_of(name):
        assert shows(everything, flag)
        assert shows(pages, flag), f"no document names {flag} of moe-edge {name}"


@pytest.mark.parametrize("name", COMMANDS)
def test_options_of_policies_are_in_help_all_only(name):
    text = help_of(name)
    assert not [each.flag for each in OF_POLICIES if not each.group and shows(text, each.flag)]


def test_a_chat_has_every_setting_of_a_policy():
    everything = help_of("chat", "--help-all")
    assert all(shows(everything, each.flag) for each in OF_POLICIES)
