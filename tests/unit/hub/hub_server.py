"""A small server that speaks the Hub's protocol, for the real client.

/api/models/REPO[/revision/REV] lists files with sizes. /REPO/resolve/REV/FILE answers HEAD and GET
with ETag, X-Repo-Commit and, for large files, a redirect to another host with X-Linked-Size and
X-Linked-Etag, as the Hub does. Range requests are served unless `ranges` is false.
"""

import hashlib
import json
import re
import socket
import struct
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

LARGE = 1000


class Sparse:
    """A file of `size` bytes: first the given bytes, then zeros."""

    def __init__(self, first, size):
        self.first, self.size = first, size

    def __len__(self):
        return self.size

    def __getitem__(self, part):
        start, end, _ = part.indices(self.size)
        return self.first[start:end].ljust(end - start, b"\0")


def sha256(data):
    return hashlib.sha256(data.first if isinstance(data, Sparse) else data).hexdigest()


@dataclass
class Repo:
    files: dict[str, bytes | Sparse]
    commit: str = "c0ffee" * 6 + "beef"
    revisions: tuple[str, ...] = ("main",)
    token: str | None = None  # private: needs this token
    gated: bool = False  # listed for everyone, but files need the token
    disabled: bool = False


@dataclass
class Fault:
    """A broken connection: data of a file ends after this many bytes."""

    after: int
    times: int = 1
    reset: bool = False


@dataclass
class Hub:
    """The server's state. seen: (method, path, Range, Authorization) of its requests."""

    repos: dict[str, Repo] = field(default_factory=dict)
    faults: dict[str, Fault] = field(default_factory=dict)
    seen: list[tuple[str, str, str | None, str | None]] = field(default_factory=list)
    slow: threading.Event | None = None  # if given, data stops half way until the event is set
    status: int = 0
    heads: int | None = None  # number of HEAD requests that are answered; later ones get 503
    corrupt: bool = False
    ranges: bool = True

    def __post_init__(self):
        # Held while a thread writes and counts its bytes.
        self.counting, self.counted = threading.Lock(), 0

    @property
    def sent(self):
        """Bytes of data sent to clients. When a client has all of them, they are counted."""
        with self.counting:
            return self.counted

    def start(self):
        hub = self

        class Handler(_Handler):
            state = hub

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self):
        if self.slow is not None:
            self.slow.set()
        self.server.shutdown()
        self.server.server_close()

    def data_requests(self):
        """(file or blob, Range) of the requests for data."""
        return [
            (path, span)
            for method, path, span, _ in self.seen
            if method == "GET" and "/api/" not in path and not path.startswith("/redirected")
        ]


class _Handler(BaseHTTPRequestHandler):
    state: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        authorization = self.headers.get("Authorization")
        self.state.seen.append((self.command, path, self.headers.get("Range"), authorization))
        if self.state.status:
            return self.fail(self.state.status)
        if self.command == "HEAD" and self.state.heads is not None:
            self.state.heads -= 1
            if self.state.heads < 0:
                return self.fail(503)
        if match := re.fullmatch(r"/api/models/(.+?)(?:/revision/(.+))?", path):
            return self.listing(match[1], match[2] or "main")
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self.resolve(*match.groups())
        if match := re.fullmatch(r"/cdn/([0-9a-f]{64})", path):
            for repo in self.state.repos.values():
                for name, data in repo.files.items():
                    if sha256(data) == match[1]:
                        return self.data(name, data, {})
        return self.fail(404)

    do_HEAD = do_GET

    def head(self, status, headers, length=0):
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def fail(self, status, code="", message=""):
        said = {"X-Error-Code": code, "X-Error-Message": message}
        self.head(status, {key: value for key, value in said.items() if value})

    def repo(self, name, revision, listing):
        repo = self.state.repos.get(name)
        known = repo is not None and f"Bearer {repo.token}" == self.headers.get("Authorization")
        if repo is None or (repo.token and not repo.gated and not known):
            # The Hub does not distinguish missing and private repositories.
            self.fail(401 if repo else 404, "RepoNotFound")
        elif repo.gated and not known and not listing:
            self.fail(403, "GatedRepo")
        elif repo.disabled:
            self.fail(403, message="Access to this resource is disabled.")
        elif revision not in (*repo.revisions, repo.commit):
            self.fail(404, "RevisionNotFound")
        else:
            return repo
        return None

    def listing(self, name, revision):
        repo = self.repo(name, revision, listing=True)
        if repo is None:
            return
        siblings = []
        for file, data in repo.files.items():
            entry = {"rfilename": file}
            if "blobs=" in self.path:
                entry |= {"size": len(data), "blobId": sha256(data)[:40]}
                if len(data) >= LARGE:
                    entry["lfs"] = {"sha256": sha256(data), "size": len(data), "pointerSize": 135}
            siblings.append(entry)
        body = json.dumps({"id": name, "modelId": name, "sha": repo.commit, "siblings": siblings})
        self.head(200, {"Content-Type": "application/json"}, len(body))
        self.wfile.write(body.encode())

    def resolve(self, name, revision, file):
        repo = self.repo(name, revision, listing=False)
        if repo is None:
            return
        if file not in repo.files:
            return self.fail(404, "EntryNotFound")
        data = repo.files[file]
        headers = {"X-Repo-Commit": repo.commit}
        if len(data) < LARGE:
            headers["ETag"] = f'"{hashlib.sha1(data).hexdigest()}"'
            return self.data(file, data, headers)
        digest = sha256(data)
        headers |= {"X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{digest}"'}
        headers["Location"] = f"http://localhost:{self.state.port}/cdn/{digest}"
        self.head(302, headers)

    def data(self, name, data, headers):
        start, end = 0, len(data)
        span = self.headers.get("Range") if self.state.ranges else None
        if span:
            first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", span).groups()
            start, end = int(first), min(end, int(last) + 1) if last else end
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        headers["Accept-Ranges"] = "bytes" if self.state.ranges else "none"
        self.head(206 if span else 200, headers, end - start)
        if self.command == "HEAD":
            return
        if self.state.corrupt:
            data = data[:-1] + bytes([data[-1] ^ 1])
        fault = self.state.faults.get(name)
        if fault is not None and fault.times:
            fault.times -= 1
            self.write(data[start : min(end, start + fault.after)])
            self.close_connection = True
            if fault.reset:
                linger = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                self.connection.close()
            return
        # No client reads a large file to its end.
        rest = data[: 1 << 24] if isinstance(data, Sparse) and not span else data[start:end]
        if self.state.slow is not None and len(data) >= LARGE:
            self.write(rest[: len(rest) // 2])
            self.state.slow.wait(600)
            rest = rest[len(rest) // 2 :]
        self.write(rest)

    def write(self, data):
        with self.state.counting:
            try:
                self.wfile.write(data)
                self.wfile.flush()
                self.state.counted += len(data)
            except OSError:
                self.close_connection = True
