"""The page at `/`: one file of ours, which works without network."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from pathlib import Path

from starlette.responses import Response

PAGE = Path(__file__).with_name("page.html")


def page_response() -> Response:
    """The page, and what a browser may do for it: run its own script, use its own style, and ask
    this server. Whatever an answer brought into it could do neither."""
    text = PAGE.read_text(encoding="utf-8")
    may = (
        "default-src 'none'",
        f"style-src '{_digest(text, 'style')}'",
        f"script-src '{_digest(text, 'script')}'",
        "img-src data:",
        "connect-src 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
        "form-action 'none'",
    )
    headers = {
        "content-security-policy": "; ".join(may),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return Response(text, headers=headers, media_type="text/html")


def _digest(text: str, tag: str) -> str:
    """An inline element as Content Security Policy names it (level 2, section 7.17.2)."""
    (inner,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return "sha256-" + b64encode(hashlib.sha256(inner.encode()).digest()).decode()
