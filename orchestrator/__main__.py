"""`python -m orchestrator` is `moe-edge`."""

from orchestrator.cli import main

main()
