"""`moe-edge` in this process, for tests of what it says."""

from click.testing import CliRunner, Result

from orchestrator.cli.main import cli


def run(*words: object, stdin: str | None = None) -> Result:
    """A command and its arguments, each of them made a text."""
    return CliRunner().invoke(cli, [str(word) for word in words], input=stdin)
