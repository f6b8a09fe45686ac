"""`moe-edge`, and `python -m orchestrator`."""

from gguf_tools import interrupts


def main() -> None:
    """Import the command line and run it.

    If Ctrl-C interrupts the import, the process ends without a traceback.
    """
    interrupts.leave_at_once()
    from orchestrator.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
