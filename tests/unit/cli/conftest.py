import pytest
from pseudo_terminal import PROMPT, Terminal


@pytest.fixture
def start(tmp_path):
    """Function that starts a Terminal and waits for its first prompt."""
    opened = []

    def open_terminal(*args, **environment):
        terminal = Terminal(*args, home=tmp_path, **environment)
        opened.append(terminal)
        terminal.greeting = terminal.wait(PROMPT)
        return terminal

    yield open_terminal
    for terminal in opened:
        terminal.__exit__()
