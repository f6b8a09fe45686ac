"""Progress bars of the library, in notebooks and terminals (tqdm, which huggingface_hub brings)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# A bar that ends sooner would only flicker.
_DELAY_S = 0.5


def in_notebook() -> bool:
    """Return whether this process is the kernel of a Jupyter notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in shell.config


def shows_bars() -> bool:
    """Return whether progress bars are shown by default.

    They are shown in a notebook and if stderr is a terminal.
    """
    return in_notebook() or (sys.stderr is not None and sys.stderr.isatty())


class DownloadBar:
    """Shows the progress of a download. Call it with the share that is done, 0 to 1.

    The download sets `total_bytes` to its size.
    """

    def __init__(self, bars: Bars) -> None:
        self._bars, self.total_bytes = bars, 0

    def __call__(self, share: float) -> None:
        self._bars.show("Downloading", share, self.total_bytes)


class Bars:
    """Shows progress bars in a notebook or terminal, one at a time. Call `close` at the end."""

    def __init__(self, shown: bool | None) -> None:
        """Choose whether bars are shown. None means only in a notebook or terminal."""
        self._is_shown = shows_bars() if shown is None else shown
        self._bar: Any = None
        self._label = ""

    def stage(self, label: str, share: float | None) -> None:
        """Show a bar for a stage of loading the model.

        `share` is the share that is done, 0 to 1, or None if it is unknown.
        """
        self.show(label, share or 0.0, 0)

    @contextmanager
    def download(self) -> Iterator[DownloadBar]:
        """Yield a DownloadBar that shows a bar, and remove the bar at the end of the block."""
        try:
            yield DownloadBar(self)
        finally:
            self.close()

    def show(self, label: str, share: float, total_bytes: int) -> None:
        """Show a bar with the share of the work that is done, or update it.

        `total_bytes` is the size of the whole work, or 0 to show percent.
        """
        if not self._is_shown:
            return
        if label != self._label:
            self.close()
            self._label, self._bar = label, _new_bar(label, total_bytes)
        self._bar.update(round(share * self._bar.total) - self._bar.n)

    def close(self) -> None:
        """Remove the bar that is shown, if there is one."""
        if self._bar is not None:
            self._bar.close()
        self._bar, self._label = None, ""


def _new_bar(label: str, total_bytes: int) -> Any:
    from tqdm import notebook, tqdm

    # In a notebook without ipywidgets, tqdm's notebook bar would raise ImportError.
    bar = notebook.tqdm if in_notebook() and notebook.IProgress is not None else tqdm
    sized: dict[str, Any] = {"total": total_bytes, "unit": "B", "unit_scale": True}
    if not total_bytes:
        sized = {"total": 100, "bar_format": "{l_bar}{bar}| {elapsed}"}
    return bar(desc=label, leave=False, delay=_DELAY_S, **sized)
