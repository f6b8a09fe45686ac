"""Waiting for what a test is about."""

import time

HANG_S = 600.0  # only what hangs takes so long


def wait_until(is_so, complaint="it never is"):
    """Asks again and again. Raises AssertionError where the answer stays no."""
    end_s = time.monotonic() + HANG_S
    while not is_so():
        assert time.monotonic() < end_s, complaint
        time.sleep(0.01)
