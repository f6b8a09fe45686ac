"""The page's dialog for choosing, comparing and downloading models, with a scripted server."""

import pytest
from page import Model, all_have_names, complaints, opened
from waiting import wait_until

GIB = 2**30
LOCAL = [
    {"name": "demo", "bytes": 50_000_000, "loaded": True},
    {"name": "<b>large</b>", "bytes": 11 * GIB, "loaded": False},
]
REPO = "some/repository"


def row(file, here, **more):
    made = {"tokens_s": 7.9, "tokens_s_skewed": 7.9, "reading": 0.0, "why": "", "best": False}
    size = {"disk_bytes": 4 * GIB, "missing_bytes": 4 * GIB, "ram_bytes": 5 * GIB}
    return {"file": file, "here": here, **made, **size, **more}


UNKNOWN = {"tokens_s": None, "tokens_s_skewed": None, "reading": None, "ram_bytes": None}
ROWS = [
    row("bf16.gguf", "no room", tokens_s=0.5, tokens_s_skewed=0.7),
    row("q8.gguf", "does not run", **UNKNOWN | {"ram_bytes": 40 * GIB}),
    row("q4.gguf", "streams", tokens_s=6.0, tokens_s_skewed=12.4, reading=0.32, best=True),
    row("q2.gguf", "fits", missing_bytes=0),
    row("odd.gguf", None, **UNKNOWN | {"why": "the file is damaged"}),
]
COMPARED = {"repo": REPO, "rows": ROWS, "processor": "A CPU", "left_out": 2, "disturbed": ""}
COMPARED |= {"ram_bytes": 12 * GIB, "free_bytes": 44 * GIB}


def task(action, model, state="running", doing="", done=None, error=""):
    of = {"action": action, "model": model, "state": state}
    return {**of, "doing": doing, "done": done, "error": error}


@pytest.fixture
def model():
    model = Model(changes_model=True)
    model.local = {"models": LOCAL, "task": task("list", "", "done"), "compared": None}
    yield model
    model.close()


@pytest.fixture
def tab(browser, model):
    tab = opened(browser, model.url)
    tab.value("$('list').click()")
    tab.value("$('choose').click()")
    tab.until("$('models').open && $('pulled').children.length === 2")
    yield tab
    assert complaints(tab) == []


def shown(tab, element):
    return tab.value(f"$('{element}').checkVisibility() ? $('{element}').innerText : ''")


def click(tab, name):
    """Press a button of the dialog by its name for screen readers or its text."""
    tab.value(
        "[...$('models').querySelectorAll('button')].find((each) => "
        f"[each.ariaLabel, each.innerText].includes('{name}')).click()"
    )


def enabled(tab):
    return tab.value(
        "[...$('models').querySelectorAll('button')].filter((each) => each.checkVisibility() && "
        "!each.disabled).map((each) => each.ariaLabel || each.innerText)"
    )


def test_nothing_is_offered_without_the_option(browser):
    model = Model()
    try:
        tab = opened(browser, model.url)
        tab.value("$('list').click()")
        assert not tab.value("$('choose').checkVisibility()")
        urls = [event["request"]["url"] for event in tab.events("Network.requestWillBeSent")]
        assert not [url for url in urls if "local-models" in url]
    finally:
        model.close()


def test_a_model_is_chosen(tab, model):
    assert model.tasks == [("list", "")]
    assert shown(tab, "pulled").split("\n") == [
        *("demo", "47.7 MiB", "in use"),
        *("<b>large</b>", "11.00 GiB", "Use"),
    ]
    assert shown(tab, "task") == "" and shown(tab, "compared") == ""
    model.local["task"] = task("load", "<b>large</b>", doing="Waiting for running requests")
    click(tab, "Use <b>large</b>")
    tab.until("!$('task').hidden")
    assert model.tasks[-1] == ("load", "<b>large</b>")
    assert shown(tab, "doing") == "Loading <b>large</b> · Waiting for running requests"
    assert not tab.value("$('share').hasAttribute('value')")
    assert enabled(tab) == ["Close", "Stop"]
    local = [{**LOCAL[0], "loaded": False}, {**LOCAL[1], "loaded": True}]
    model.local = {**model.local, "models": local, "task": task("load", "<b>large</b>", "done")}
    tab.until("$('halt').hidden")
    assert shown(tab, "doing") == "Now in use: <b>large</b>"
    assert enabled(tab) == ["Close", "Use demo", "Compare"]


def test_quantizations_are_compared_and_one_is_downloaded(tab, model):
    model.local["task"] = task("compare", REPO, doing="Reading headers", done=0.4)
    tab.value("$('repo').focus()")
    tab.type(f" {REPO} ")
    tab.press("Enter")
    tab.until("!$('task').hidden")
    assert model.tasks[-1] == ("compare", REPO)
    assert shown(tab, "doing") == f"Comparing {REPO} · Reading headers · 40 %"
    assert tab.value("$('share').value") == 0.4
    model.local = {**model.local, "task": task("compare", REPO, "done"), "compared": COMPARED}
    tab.until("!$('compared').hidden && $('halt').hidden")
    rows = tab.value("[...$('rows').rows].map((line) => [...line.cells].map((e) => e.innerText))")
    rows = [[" ".join(cell.split()) for cell in row] for row in rows]
    assert rows == [
        ["bf16.gguf 4.00 GiB", "too large for the free disk space", "0.50–0.70"],
        ["q8.gguf 4.00 GiB", "does not run: needs 40.00 GiB of memory", ""],
        [
            "q4.gguf best here 4.00 GiB Download",
            "streams: 32 % of the time reads from disk",
            "6.0–12",
        ],
        ["q2.gguf 4.00 GiB, downloaded", "fits", "7.9"],
        ["odd.gguf 4.00 GiB", "the file is damaged", ""],
    ]
    assert shown(tab, "machine").startswith(f"{REPO} on this machine: A CPU, 12.00 GiB of memory")
    assert "2 smaller models were not examined" in shown(tab, "machine")

    name = f"{REPO}/q4.gguf"
    model.local = {**model.local, "task": task("pull", name, doing="Downloading", done=0.31)}
    click(tab, "Download q4.gguf")
    tab.until("!$('halt').hidden")
    assert model.tasks[-1] == ("pull", name)
    assert shown(tab, "doing") == f"Downloading {name} · 31 %"
    # The download goes on if the dialog is closed.
    tab.press("Escape")
    assert not tab.value("$('models').open")
    tab.value("$('choose').click()")
    tab.until("$('share').value === 0.31")
    click(tab, "Stop")
    wait_until(lambda: model.tasks[-1] == ("stop", ""))
    model.local = {**model.local, "task": task("pull", name, "stopped")}
    tab.until("$('halt').hidden")
    assert shown(tab, "doing") == "Stopped. The downloaded part is kept."


def test_errors_are_shown(tab, model):
    error = "--ram 1 GiB is too small for this model."
    model.local["task"] = task("load", "<b>large</b>", "failed", error=error)
    click(tab, "Use <b>large</b>")
    tab.until("$('failed').innerText")
    assert shown(tab, "failed") == error and shown(tab, "doing") == ""


def test_the_dialog_fits_a_narrow_window_and_has_names(tab, model):
    tab.shape(400, 700)
    long = {**COMPARED, "rows": [{**each, "file": "x" * 60 + each["file"]} for each in ROWS]}
    model.local = {**model.local, "task": task("pull", "y" * 90, done=0.5), "compared": long}
    click(tab, "Use <b>large</b>")
    tab.until("!$('compared').hidden && !$('halt').hidden")
    box = "$('models').getBoundingClientRect()"
    assert tab.value(f"{box}.left") >= 0 and tab.value(f"{box}.right") <= 400
    assert tab.value("$('models').scrollWidth <= $('models').clientWidth")
    assert tab.value("document.documentElement.scrollWidth") <= 400
    assert tab.value("$('rows').closest('.table').scrollWidth") <= tab.value(
        "$('rows').closest('.table').clientWidth"
    )
    all_have_names(tab)
