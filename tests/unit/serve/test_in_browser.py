"""The page in headless Chromium."""

import json

import pytest
from browser import Tab
from page import all_have_names, asked, complaints
from served import serving

QUESTION = "What is the capital of Norway?"
STORY = "Tell me a story about a fox and a river."
ATTACK = "<img src=x onerror='hacked=1'><script>hacked=1</script> **bold** `<b>`\n```js\n<i>\n```\n"
# Replaces the page's fetch. fake(path, headers, options) returns an answer, or nothing to ask the
# server.
FAKE = """
const real = window.fetch;
window.fetch = async (path, options = {}) =>
  fake(path, options.headers || {}, options) || real(path, options);
const streamed = (text, isBroken) => new Response(new ReadableStream({ start(to) {
  const event = { choices: [{ delta: { content: text } }] }, end = "data: [DONE]\\n\\n";
  const said = "data: " + JSON.stringify(event) + "\\n\\n" + (isBroken ? "" : end);
  to.enqueue(new TextEncoder().encode(said));
  if (isBroken) setTimeout(() => to.error(new TypeError("network error")), 20); else to.close();
} }));
const isChat = (path) => path === "/v1/chat/completions";
async function slowed(answer, signal) {
  const response = await answer, pause = () => new Promise((go) => setTimeout(go, 20));
  let rest = "";
  return new Response(response.body.pipeThrough(new TextDecoderStream()).pipeThrough(
    new TransformStream({ async transform(text, to) {
      const events = (rest + text).split("\\n\\n");
      rest = events.pop();
      for (const event of events) {
        do if (!signal.aborted) await pause();
        while (window.held && event.includes('"timings"') && !signal.aborted);
        // As of a real one, nothing comes of what arrived before it was stopped.
        if (signal.aborted) return to.error(signal.reason);
        to.enqueue(event + "\\n\\n");
      }
    } })).pipeThrough(new TextEncoderStream()), response);
}
"""
# The server's own answer at 50 events per second, so that a busy machine sees it grow. Its last
# event waits while `held` is set.
SLOWED = "if (isChat(path)) return slowed(real(path, options), options.signal);"
# Records the length of the conversation at each change, and whether the picture of the experts
# changes while some are lit. The answer's last event is held until then.
WATCH = """
lengths = new Set();
new MutationObserver(() => lengths.add($('log').innerText.length))
  .observe($('log'), {childList: true, subtree: true});
lit = false;
held = true;
(() => {
  const plainly = draw, before = $('experts').toDataURL();
  window.draw = () => {
    plainly();
    if (running && light.some((each) => each === 1)) lit ||= $('experts').toDataURL() !== before;
    held = !lit;
  };
})();
"""
LOST = """
if (isChat(path) && window.none) return Promise.reject(new TypeError("Failed to fetch"));
if (isChat(path) && !window.whole) return streamed("Half", true);
"""
LAST = "[...document.querySelectorAll('%s')].pop().innerText"


@pytest.fixture(scope="module")
def served(browser, tmp_path_factory, library):
    cache = tmp_path_factory.mktemp("served")
    tiers = ("--policy", "dymoe", "--high-tier", "q4_k", "--low-tier", "q2_k")
    options = ("--ram", "160MiB", "--expert-ram", "8MiB", "--ctx", "1024", "--temp", "0")
    with serving(cache, *tiers, *options) as running:
        yield running


@pytest.fixture
def tab(browser, served):
    return opened(browser, served)


def opened(browser, served, fake=""):
    """Open the page in a new tab. fake: body of a function (path, headers, options) whose answer
    replaces the server's."""
    tab = Tab(browser)
    if fake:
        source = FAKE + "function fake(path, headers, options) {" + fake + "}"
        tab.call("Page.addScriptToEvaluateOnNewDocument", source=source)
    tab.go(served.url + "/")
    tab.until("conversation !== null")
    return tab


def test_an_answer_streams_and_its_experts_light_up(browser, served):
    tab = opened(browser, served, SLOWED)
    tab.until("seen !== null")
    tab.value(WATCH)
    asked(tab, STORY)
    tab.until("running && $('log').ariaBusy === 'true'")
    tab.until("lit")
    tab.until("!running")
    assert tab.value("lengths.size") > 4
    assert tab.value("document.querySelector('.assistant').innerText.length") > 50
    costs = tab.value("document.querySelector('.costs').innerText")
    for word in ("first word", "tok/s", "% in memory", "memory", "of 160.0 MiB", "estimated loss"):
        assert word in costs
    assert tab.value("$('mode').innerText").startswith("moe-edge-demo: managed: dymoe q4_k/q2_k")
    tab.until("flow.some((each) => each.hits > 0)")
    assert "since the start: " in tab.value("$('figures').innerText")
    assert "8 layers of 16 experts; q4_k: " in tab.value("$('experts').ariaLabel")
    # The conversation is sent with the next question.
    asked(tab, QUESTION)
    tab.until("!running && document.querySelectorAll('.costs').length === 2")
    assert tab.value("messages.map((each) => each.role).join()") == "user,assistant,user,assistant"
    assert "Oslo" in tab.text()
    urls = {event["request"]["url"] for event in tab.events("Network.requestWillBeSent")}
    assert urls and all(url.startswith((served.url + "/", "data:")) for url in urls), urls
    assert complaints(tab) == []


PLAIN = """
const all = { model: "m", mode: "all fits", layers: 0, memory: {}, streams_below: 110 * 2 ** 20 };
if (path === "/experts") return new Response(JSON.stringify(all));
"""


def test_a_ram_that_streams_experts_is_suggested(browser, served):
    tab = opened(browser, served, PLAIN)
    tab.until("!$('plain').hidden")
    assert "moe-edge serve --ram 110MiB," in tab.value("$('plain').innerText")
    assert tab.value("$('mode').innerText") == "m: all fits"


@pytest.mark.parametrize(
    "timings, said",
    [
        ("{ kl_estimate: 0.0123, mix: { q8_0: 0.5, q2_k: 0.5 } }", "estimated loss 0.012 nats"),
        ("{ kl_estimate: null, mix: { q8_0: 0.75, skip: 0.25 } }", "loss not known: 25 % of"),
        ("{ kl_estimate: 0, mix: { q8_0: 1, skip: 0 } }", ""),
        ("{ kl_estimate: null, mix: { q8_0: 1 } }", ""),
    ],
)
def test_a_loss_is_shown(timings, said, tab):
    usual = "prompt_ms: 1, predicted_per_second: 1, peak_rss_bytes: 1, ram_bytes: 1"
    shown = tab.value(f"costs({{ {usual}, ...{timings} }})")
    assert (said in shown) if said else ("loss" not in shown)


def test_an_answer_can_be_stopped(browser, served):
    tab = opened(browser, served, SLOWED)
    tab.value("held = true")
    for way in ("Escape", "the button"):
        asked(tab, STORY)
        tab.until(
            f"document.querySelectorAll('.assistant').length && {LAST % '.assistant'}.length > 20"
        )
        if way == "Escape":
            tab.press("Escape")
        else:
            tab.press("Tab")
            assert tab.value("document.activeElement.id") == "stop"
            tab.press(" ")
        tab.until("!running")
        assert tab.value(LAST % ".costs").endswith(" a second · stopped")
        assert tab.value("$('status').innerText") == "Stopped"
    # A new conversation may start during an answer. It contains nothing of the old one.
    asked(tab, STORY)
    tab.until(f"running && {LAST % '.assistant'}.length > 20")
    tab.value("$('anew').click(); held = false")
    asked(tab, QUESTION)
    tab.until("!running && messages.length === 2")
    assert tab.value("document.querySelectorAll('#log > *').length") == 2
    assert complaints(tab) == []


def test_markup_of_the_model_is_shown_as_text(browser, served):
    fake = f"if (isChat(path)) return streamed({json.dumps(ATTACK)});"
    tab = opened(browser, served, fake)
    asked(tab, ATTACK)
    tab.until("!running && messages.length === 2")
    assert tab.value(
        "[...document.querySelectorAll('.assistant .text *')].map((e) => e.tagName).join()"
    ) == ("P,STRONG,CODE,DIV,DIV,SPAN,BUTTON,PRE,CODE")
    assert "<script>hacked=1</script>" in tab.text() and "<img src=x" in tab.text()
    assert tab.value("document.querySelectorAll('#log img, #log script').length") == 0
    assert complaints(tab) == []
    # Even as markup, the browser would not run it.
    tab.value(f"$('status').innerHTML = {json.dumps(ATTACK)}")
    tab.value(
        "$('status').append(Object.assign(document.createElement('script'), {text: 'hacked=1'}))"
    )
    tab.until("document.querySelectorAll('#status script').length === 2")
    assert tab.value("typeof hacked") == "undefined"


def test_a_key_is_asked_for(browser, served):
    tab = opened(
        browser,
        served,
        "if (headers.Authorization !== 'Bearer right') return new Response('', {status: 401});",
    )
    for key, complaint in (("wrong", ""), ("right", "The server does not know that key.")):
        tab.until("!$('ask').hidden && document.activeElement === $('key')")
        assert tab.value("$('unfit').innerText") == complaint
        assert tab.value("document.querySelector('main').inert")
        tab.type(key)
        tab.press("Enter")
    tab.until("$('ask').hidden && seen !== null")
    asked(tab, QUESTION)
    tab.until("!running && /Oslo/.test($('log').innerText)")


def test_a_broken_connection_keeps_the_partial_answer(browser, served):
    tab = opened(browser, served, LOST)
    asked(tab, QUESTION)
    tab.until("!running && document.querySelectorAll('#log .wrong[role=alert]').length")
    assert "Half" in tab.text() and "connection to the server broke off" in tab.text()
    # If nothing arrived, the question can be sent again.
    tab.value("window.none = true")
    asked(tab, STORY)
    tab.until("!running && messages.length === 3 && document.querySelector('#log .wrong') !== null")
    tab.value("window.none = false; window.whole = true")
    tab.value("document.querySelector('#log > .acts button').click()")
    tab.until("!running && messages.length === 4")
    assert tab.value("document.querySelectorAll('#log .wrong').length") == 0


def test_all_elements_are_reachable_by_keyboard(tab):
    tab.until("seen !== null")
    reached = []
    for _ in range(5):
        reached.append(tab.value("document.activeElement.id"))
        tab.press("Tab")
    assert reached == ["text", "send", "anew", "experts", ""]
    tab.value("$('experts').focus()")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        tab.value(f"$('experts').dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}'}}))")
    assert tab.value("$('one').innerText").startswith("Layer 1, expert 1: ")
    all_have_names(tab)


@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_a_telephone(browser, served, dark):
    tab = opened(browser, served, SLOWED)
    tab.shape(320, 640, dark)
    tab.until("seen !== null")
    assert tab.value("document.documentElement.scrollWidth") <= 320
    for tag in ("text", "send", "stop", "anew", "show", "list"):
        assert 0 < tab.value(f"$('{tag}').getBoundingClientRect().right") <= 320, tag
    # The chat has the full width. The button shows the experts instead.
    assert tab.value("$('text').getBoundingClientRect().width") > 250
    assert tab.value("$('experts').clientWidth") == 0
    tab.value("$('show').click()")
    assert tab.value("$('experts').clientWidth") > 250 and tab.value("$('text').clientWidth") == 0
    for tag in ("experts", "flow"):
        box = f"$('{tag}').getBoundingClientRect()"
        assert tab.value(f"{box}.right") <= 320 and tab.value(f"{box}.top") < 640, tag
    assert tab.value("document.documentElement.scrollWidth") <= 320
    tab.value("$('show').click()")
    assert tab.value("$('text').clientWidth") > 250
    ground = tab.value("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(20, 24, 29)" if dark else "rgb(255, 255, 255)")
    # During an answer both are visible.
    tab.value("held = true; $('text').focus()")
    asked(tab, STORY)
    tab.until(f"$('experts').clientWidth > 250 && {LAST % '.assistant'}.length > 20")
    for tag in ("experts", "legend", "log", "text"):
        box = f"$('{tag}').getBoundingClientRect()"
        assert tab.value(f"{box}.height") > 20 and tab.value(f"{box}.bottom") <= 640, tag
    assert tab.value("atEnd()")
    tab.value("held = false")
    tab.until("!running && $('experts').clientWidth === 0")
