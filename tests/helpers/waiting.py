"""Wait for a condition."""

import time

HANG_S = 600.0  # no correct test waits this long


def wait_until(is_so, complaint="timed out"):
    """Wait until is_so() is true. Raises AssertionError after HANG_S seconds."""
    end_s = time.monotonic() + HANG_S
    while not is_so():
        assert time.monotonic() < end_s, complaint
        time.sleep(0.01)
