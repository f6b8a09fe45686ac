"""The server's page in a browser, and a server of that page without a model."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from browser import Tab

from orchestrator.serve.schemas import SCHEMAS
from orchestrator.serve.views import page_response

# No correct test waits this long.
HANG_S = 60
HOLD = object()
BREAK = object()


class Model:
    """A server of the page whose answers are scripted.

    Set `pieces` to the parts of the next answers: a text, a dict (OpenAI's `delta`), HOLD (wait
    until `go` is set) or BREAK (close the connection). `requests` has the requests so far. Requests
    with more than `most_messages` messages are refused as too long. `images` has the limits of
    images, as in /experts; None if the model takes no images. With `changes_model`, the page offers
    to change the model. `local` is then the answer of /local-models, and `tasks` has the tasks that
    the page has begun.
    """

    def __init__(self, changes_model=False):
        self.changes_model = changes_model
        self.local = {"models": [], "task": None, "compared": None}
        self.tasks = []
        self.pieces = ["Yes."]
        self.reason = "stop"
        self.usage = {}
        self.most_messages = 1000
        self.images = None
        self.requests = []
        self.go = threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.model = self
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self):
        self.go.set()
        self._http.shutdown()
        self._http.server_close()


class Handler(BaseHTTPRequestHandler):
    """Answers a request to a Model."""

    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.path == "/":
            page = page_response(self.server.model.changes_model)
            self._send(page.body, **page.headers)
        elif self.path == "/experts":
            state = {"model": "m", "mode": "all fits", "layers": 0, "memory": {}}
            state["images"] = self.server.model.images
            assert {*state} == {*SCHEMAS["Experts"]["required"]}
            self._send(json.dumps(state).encode())
        elif self.path == "/local-models":
            self._send(json.dumps(self.server.model.local).encode())
        else:
            self.send_error(404)

    def do_POST(self):
        model = self.server.model
        data = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/local-models/task":
            model.tasks.append((data["action"], data["model"]))
            self._send(json.dumps(model.local).encode())
            return
        model.requests.append(data)
        if len(model.requests[-1]["messages"]) > model.most_messages:
            self.send_error(413)
            return
        pieces, reason, usage = model.pieces, model.reason, model.usage
        self._send(b"")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for piece in pieces:
                if piece is HOLD:
                    model.go.wait(HANG_S)
                elif piece is BREAK:
                    return
                else:
                    delta = {"content": piece} if isinstance(piece, str) else piece
                    self._event({"choices": [{"delta": delta}]})
            self._event({"choices": [{"delta": {}, "finish_reason": reason}]})
            self._event({"choices": [], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, body, **headers):
        self.send_response(200)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _event(self, data):
        self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())
        self.wfile.flush()


def opened(browser, url, **how):
    """Open the page in a new tab, and wait until it shows its conversation."""
    tab = Tab(browser, **how)
    tab.go(url)
    tab.until("conversation !== null")
    return tab


def asked(tab, text):
    """Type a message and send it with the keyboard."""
    tab.until("document.activeElement === $('text')")
    tab.type(text)
    tab.press("Enter")


def complaints(tab):
    """Console messages and uncaught exceptions of the page."""
    kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
    return [event for kind in kinds for event in tab.events(kind)]


def all_have_names(tab):
    """Check that each element that the keyboard reaches has a name for screen readers."""
    for node in tab.call("Accessibility.getFullAXTree")["nodes"]:
        can = any(
            p["name"] == "focusable" and p["value"]["value"] for p in node.get("properties", ())
        )
        if can and node["role"]["value"] != "RootWebArea":
            assert node["name"]["value"], node
