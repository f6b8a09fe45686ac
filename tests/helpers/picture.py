"""Makes docs/page.png: the server's page while the demo model answers, with less memory for experts
than they need. Run `python tests/helpers/picture.py` in the checkout when the page has changed."""

from __future__ import annotations

import sys
import tempfile
from base64 import b64decode
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "tests/unit/serve"), str(Path(__file__).parent)]

from browser import browsing  # noqa: E402
from served import serving  # noqa: E402
from test_in_browser import LAST, QUESTION, STORY, asked, opened  # noqa: E402

PLANTS = "What is photosynthesis?"
TIERS = ("--high-tier", "q4_k", "--low-tier", "q2_k")
OPTIONS = ("--ram", "160MiB", "--expert-ram", "6MiB", "--ctx", "1024", "--temp", "0")


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        browsing(Path(folder) / "browser") as browser,
        serving(Path(folder), *TIERS, *OPTIONS) as served,
    ):
        tab = opened(browser, served)
        tab.shape(1200, 720)
        tab.until("seen !== null")
        for number, question in enumerate((QUESTION, PLANTS, STORY)):
            asked(tab, question)
            if question != STORY:
                tab.until(f"!running && document.querySelectorAll('.costs').length > {number}")
        tab.until(f"light.some((each) => each === 1) && {LAST % '.assistant'}.length > 100")
        made = tab.call("Page.captureScreenshot", format="png")["data"]
    (REPO / "docs/page.png").write_bytes(b64decode(made))


if __name__ == "__main__":
    main()
