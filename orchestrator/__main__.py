"""`moe-edge`, and `python -m orchestrator`."""

import signal


def main() -> None:
    """Loads the command line and runs it. Ctrl-C while it loads ends the process as it ends a
    program in C: what was being imported is nobody's business."""
    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if raises:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from orchestrator.cli import main as run

    if raises:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
