"""A machine with fixed speeds in place of the measured ones."""

from orchestrator.cost import disk, products
from orchestrator.cost.disk import Bandwidth


def seconds(_timer, what):
    """Time of an operation on a simulated machine: 20 GB/s of weights and one microsecond per
    operation."""
    nbytes = what.nbytes if isinstance(what, products.Product) else 0
    return 1e-6 + what.rows * nbytes / 20e9


def simulate(monkeypatch, folder):
    """Simulate a machine whose disk reads 2 GB/s, with a new cache folder.

    Returns a list that gets an entry for each measurement of this machine.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    measured = []

    def read(*_, **__):
        measured.append("disk")
        return Bandwidth(2e9)

    def timed(timer, what):
        measured.append("processor")
        return seconds(timer, what)

    monkeypatch.setattr(disk, "read_bandwidth", read)
    monkeypatch.setattr(products.Timer, "seconds", timed)
    return measured
