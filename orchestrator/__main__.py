"""`moe-edge`, and `python -m orchestrator`."""

from gguf_tools import interrupts


def main() -> None:
    """Loads the command line and runs it.

    Ctrl-C while it loads ends the process, without a traceback of the import.
    """
    interrupts.leave_at_once()
    from orchestrator.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
