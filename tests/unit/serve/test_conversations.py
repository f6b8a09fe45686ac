"""Conversations of the page: kept in the browser, continued, changed, and shared by tabs."""

import pytest
from browser import Browser, Tab, chromium
from page import BREAK, HOLD, Model, all_have_names, asked, complaints, opened

ROLES = "messages.map((each) => each.role).join()"
SAID = "messages.map((each) => each.content).join('|')"
SHOWN = "[...document.querySelectorAll('.text')].map((each) => each.innerText.trim()).join('|')"
LISTED = "[...document.querySelectorAll('#all li button:first-child')].map((e) => e.innerText)"
# Number of records in the browser's database.
COUNT = """
transact("readonly", (conversations, messages, done) => {
  messages.count().onsuccess = ({ target }) => done(target.result);
})
"""


@pytest.fixture
def model():
    model = Model()
    yield model
    model.close()


@pytest.fixture
def tab(browser, model):
    tab = opened(browser, model.url)
    yield tab
    assert complaints(tab) == []


def press(tab, name):
    """Press the last button whose text or label is `name`."""
    tab.value(
        "[...document.querySelectorAll('button')].filter((each) => each.checkVisibility() && "
        f"[each.innerText, each.ariaLabel].includes('{name}')).pop().click()"
    )


def answered(tab, n):
    tab.until(f"!running && messages.length === {n} && !messages[{n - 1}].end")
    # The last record is in the database.
    tab.value(COUNT)


def loaded_anew(tab):
    tab.value("window.before = true")
    tab.call("Page.reload")
    tab.until("!window.before && document.readyState === 'complete'")
    tab.until("typeof conversation !== 'undefined' && conversation !== null")


def test_a_conversation_survives_a_reload(tab, model):
    for i in range(30):
        model.pieces = [f"Answer {i}."]
        asked(tab, f"Question {i}?")
        answered(tab, 2 * i + 2)
    said = tab.value(SAID)
    assert "Question 0?|Answer 0.|" in said and said.endswith("Answer 29.")
    tab.value("$('text').value = 'a draft'")
    loaded_anew(tab)
    assert tab.value(SAID) == said and tab.value("$('text').value") == "a draft"
    assert tab.value(SHOWN) == said
    tab.value("$('text').value = ''")
    asked(tab, "One more?")
    answered(tab, 62)
    assert len(model.requests[-1]["messages"]) == 61
    # The address names the conversation.
    tab.value("$('anew').click()")
    assert tab.value("messages.length") == 0
    tab.value("history.back()")
    tab.until("messages.length === 62")


def test_a_partial_answer_survives_a_reload_and_is_continued(tab, model):
    model.pieces = [{"reasoning_content": "Hm. "}, "One ", "two ", HOLD]
    asked(tab, "Count.")
    tab.until("messages.length === 2 && messages[1].content === 'One two '")
    loaded_anew(tab)
    assert tab.value(SAID) == "Count.|One two "
    assert "incomplete" in tab.value("document.querySelector('.costs').innerText")
    model.pieces = ["three."]
    press(tab, "Continue")
    answered(tab, 2)
    assert tab.value(SAID) == "Count.|One two three."
    assert tab.value("document.querySelector('details').open") is False
    assert model.requests[-1]["messages"] == [
        {"role": "user", "content": "Count."},
        {"role": "assistant", "content": "One two ", "reasoning_content": "Hm. "},
    ]
    assert tab.value(COUNT) == 2
    loaded_anew(tab)
    assert tab.value(SAID) == "Count.|One two three."


def test_reasoning_that_was_cut_off_is_continued(tab, model):
    model.pieces = [{"reasoning_content": "Let me "}, BREAK]
    asked(tab, "Think.")
    tab.until("!running && messages.length === 2")
    model.pieces = [{"reasoning_content": "see."}, "Done."]
    press(tab, "Continue")
    answered(tab, 2)
    assert model.requests[-1]["continue_final_message"] == "reasoning_content"
    assert tab.value("messages[1].reasoning") == "Let me see."
    assert tab.value("document.querySelector('details p').textContent") == "Let me see."
    assert tab.value(SHOWN) == "Think.|Done."


def test_an_answer_at_its_limit_can_be_continued(tab, model):
    model.reason = "length"
    asked(tab, "Go on.")
    tab.until("!running && messages.length === 2")
    assert "limit" in tab.value("document.querySelector('.costs').innerText")
    model.reason = "stop"
    press(tab, "Continue")
    answered(tab, 2)
    assert tab.value(SAID) == "Go on.|Yes.Yes."


def test_a_question_without_an_answer_can_be_asked_again(tab, model):
    model.pieces = [HOLD]
    asked(tab, "Anyone?")
    tab.until("running !== null")
    loaded_anew(tab)
    assert tab.value(SAID) == "Anyone?" and tab.value("running") is None
    model.pieces = ["Yes."]
    press(tab, "Ask again")
    answered(tab, 2)
    # Instead, another question can be asked. The first one is not sent along.
    model.pieces = [BREAK]
    asked(tab, "And now?")
    tab.until(
        "!running && messages.length === 3 && document.querySelector('.wrong[role=alert]') !== null"
    )
    model.pieces = ["Now."]
    asked(tab, "And then?")
    answered(tab, 4)
    assert tab.value(SAID) == "Anyone?|Yes.|And then?|Now."
    assert [each["content"] for each in model.requests[-1]["messages"]][2:] == ["And then?"]


def test_a_question_is_kept_if_the_browser_aborts_the_writing(tab, model):
    """A browser does that while a page is left."""
    model.pieces = [HOLD]
    aborts = "function () { try { this.transaction.abort(); } catch { /* the second time */ } }"
    tab.value(f"IDBObjectStore.prototype.put = {aborts}")
    asked(tab, "Anyone?")
    tab.until("running !== null && !document.getElementById('unkept').hidden")
    loaded_anew(tab)
    assert tab.value(SAID) == "Anyone?"


def test_answers_are_regenerated_and_questions_edited(tab, model):
    model.pieces = ["First."]
    asked(tab, "Say it.")
    answered(tab, 2)
    model.pieces = ["Second."]
    press(tab, "Regenerate")
    answered(tab, 2)
    assert tab.value(SHOWN) == "Say it.|Second." and "2 of 2" in tab.text()
    press(tab, "Previous version")
    assert tab.value(SHOWN) == "Say it.|First."
    asked(tab, "More.")
    answered(tab, 4)
    # The edited question begins another version of the conversation.
    tab.value(
        "[...document.querySelectorAll('.acts button')].find((e) => e.innerText === 'Edit').click()"
    )
    tab.until("document.activeElement.closest('.editing')")
    tab.value("document.activeElement.value = 'Say something else.'")
    model.pieces = ["Else."]
    tab.press("Enter")
    answered(tab, 2)
    assert tab.value(SHOWN) == "Say something else.|Else."
    loaded_anew(tab)
    assert tab.value(SHOWN) == "Say something else.|Else."
    press(tab, "Previous version")
    assert tab.value(SHOWN) == "Say it.|First.|More.|Second."
    assert tab.value(COUNT) == 7
    # A new answer that fails leaves the old one.
    model.pieces = [BREAK]
    press(tab, "Regenerate")
    tab.until("!running && document.querySelector('.wrong[role=alert]') !== null")
    assert tab.value(SHOWN) == "Say it.|First.|More.|Second."


def test_conversations_are_listed_and_deleted(tab, model):
    for text in ("Apples?", "Pears?", "<b>Plums?</b>"):
        asked(tab, text)
        answered(tab, 2)
        tab.value("$('anew').click()")
    tab.value("$('list').click()")
    tab.until(f"{LISTED}.length === 3")
    assert tab.value(LISTED) == ["<b>Plums?</b>", "Pears?", "Apples?"]
    press(tab, "Pears?")
    tab.until("messages.length === 2")
    assert tab.value(SAID) == "Pears?|Yes." and not tab.value("$('kept').checkVisibility()")
    tab.value("$('list').click()")
    press(tab, "Delete: Apples?")
    assert tab.value(f"{LISTED}.length") == 3
    press(tab, "Delete: Apples?, press again")
    tab.until(f"{LISTED}.length === 2")
    assert tab.value(SAID) == "Pears?|Yes." and tab.value(COUNT) == 4
    press(tab, "Delete: Pears?")
    press(tab, "Delete: Pears?, press again")
    tab.until(f"{LISTED}.length === 1 && messages.length === 0")
    loaded_anew(tab)
    assert tab.value("messages.length") == 0 and tab.value(COUNT) == 2


def test_two_tabs_overwrite_nothing(tab, browser, model):
    asked(tab, "Hello?")
    answered(tab, 2)
    other = Tab(browser, beside=tab)
    other.go(tab.value("location.href"))
    other.until("typeof conversation !== 'undefined' && messages.length === 2")
    # Both ask at the same time, before they hear of one another.
    other.value("heard = news.onmessage; news.onmessage = null")
    model.pieces = ["From ", HOLD, "here."]
    asked(tab, "Left?")
    tab.until("messages.length === 4 && messages[3].content")
    asked(other, "Right?")
    other.until("messages.length === 4 && messages[3].content")
    other.value("news.onmessage = heard")
    model.go.set()
    answered(tab, 4)
    answered(other, 4)
    for each, question in ((tab, "Left?"), (other, "Right?")):
        assert each.value(SAID) == f"Hello?|Yes.|{question}|From here."
        each.until("known.size === 6")
    loaded_anew(tab)
    assert (tab.value("known.size") == 6 and "2 of 2" in tab.text()) or "1 of 2" in tab.text()
    # An answer in one tab appears in the other tab.
    model.pieces = ["Later."]
    other.value("history.replaceState(null, '', location.href)")
    shown = other.value(SAID)
    tab.value("goTo(tip(messages[1].id))")
    asked(other, "Again?")
    answered(other, 6)
    assert other.value(SAID).startswith(shown)
    tab.until("known.size === 8")
    # Both continue the same answer.
    model.pieces = ["Half", BREAK]
    asked(other, "Halves?")
    other.until("!running && messages.length === 8")
    tab.until("known.size === 10")
    tab.value("goTo([...known.values()].find((each) => each.content === 'Half').id)")
    model.go.clear()
    model.pieces = [" more", HOLD, "."]
    for each in (tab, other):
        press(each, "Continue")
        each.until("running !== null && messages[7].content === 'Half more'")
    model.go.set()
    for each in (tab, other):
        answered(each, 8)
        each.until("known.size === 11")
    both = "[...known.values()].filter((each) => each.content === 'Half more.').length"
    for each in (tab, other):
        each.until(f"{both} === 2")
    # One tab deletes the conversation that the other tab is answering.
    model.go.clear()
    asked(tab, "Gone?")
    tab.until("running !== null && messages[9].content")
    other.value("deleted(conversation.id)")
    tab.until("!running && messages.length === 0")
    model.go.set()
    tab.until("/deleted in another tab/.test($('status').innerText)")
    other.until(f"{COUNT}.then((n) => n === 0)")
    assert complaints(other) == []


def test_conversations_survive_a_killed_browser(model, tmp_path):
    path = chromium()
    browser = Browser(path, tmp_path)
    try:
        tab = opened(browser, model.url, lasting=True)
        asked(tab, "Remember?")
        answered(tab, 2)
        model.pieces = ["Half a ", HOLD]
        asked(tab, "And this?")
        tab.until("messages.length === 4 && messages[3].content")
        tab.until(f"{COUNT}.then((n) => n === 4)")
    finally:
        browser.close()
    browser = Browser(path, tmp_path)
    try:
        tab = opened(browser, model.url, lasting=True)
        assert tab.value("messages.length") == 0
        tab.until(f"{LISTED}.length === 1")
        tab.value("$('list').click()")
        press(tab, "Remember?")
        tab.until("messages.length === 4")
        assert tab.value(SAID) == "Remember?|Yes.|And this?|Half a "
        model.pieces = ["sentence."]
        press(tab, "Continue")
        answered(tab, 4)
        assert tab.value(SAID).endswith("|Half a sentence.")
    finally:
        browser.close()


def test_a_browser_without_a_database_still_chats(browser, model):
    tab = Tab(browser)
    source = "indexedDB.open = () => { throw new Error('no') };"
    tab.call("Page.addScriptToEvaluateOnNewDocument", source=source)
    tab.go(model.url)
    tab.until("conversation !== null")
    asked(tab, "Hello?")
    tab.until("!running && messages.length === 2")
    tab.value("$('list').click()")
    tab.until("/did not keep/.test($('kept').innerText)")


def test_the_page_says_what_the_model_did_not_get(tab, model):
    model.pieces, model.usage = ["Yes", "."], {"dropped_messages": 4}
    asked(tab, "Still there?")
    answered(tab, 2)
    said = tab.value("document.querySelector('.costs').innerText")
    assert said.endswith("the model did not get the oldest 4 messages")
    assert model.requests[-1]["overflow"] == "drop"


def test_a_conversation_may_outgrow_the_longest_request(browser, model):
    tab = opened(browser, model.url)
    model.most_messages = 6
    for i in range(6):
        asked(tab, f"{i}?")
        answered(tab, 2 * i + 2)
    sent = [[each["content"] for each in said["messages"]] for said in model.requests]
    assert sent[3] == ["0?", "Yes.", "1?", "Yes.", "2?", "Yes.", "3?"]
    # The older half is left out, and stays out, so that the beginning of the prompt stays the same.
    assert sent[4] == ["2?", "Yes.", "3?"]
    assert sent[5] == ["2?", "Yes.", "3?", "Yes.", "4?"]
    assert "the oldest 4 messages" in tab.value("document.querySelectorAll('.costs')[3].innerText")
    loaded_anew(tab)
    assert tab.value("conversation.from === messages[8].id")
    # A question that is too long by itself is an error.
    model.most_messages = 0
    asked(tab, "6?")
    tab.until("!running && document.querySelector('.wrong') !== null")


def test_settings_are_sent(tab, model):
    asked(tab, "Plain?")
    answered(tab, 2)
    plain = {"messages", "stream", "return_progress", "stream_options", "overflow"}
    assert set(model.requests[-1]) == plain
    tab.value("$('list').click()")
    press(tab, "Settings")
    tab.value("const fields = $('settings').elements")
    chosen = {"temperature": 0.5, "top_k": 40, "seed": 7, "max_tokens": 100}
    for name, value in (chosen | {"system": "Be brief.", "thinking": "none"}).items():
        tab.value(f"fields.{name}.value = {value!r}")
    press(tab, "Save")
    assert not tab.value("$('tuning').open")
    asked(tab, "Again?")
    answered(tab, 4)
    said = model.requests[-1]
    assert said["messages"][0] == {"role": "system", "content": "Be brief."}
    assert {name: said[name] for name in chosen} == chosen and "top_p" not in said
    assert said["reasoning_effort"] == "none"
    # They stay, also for new conversations. The form refuses values out of range.
    loaded_anew(tab)
    assert tab.value("conversation.settings.top_k") == 40
    tab.value("$('anew').click()")
    assert tab.value("conversation.settings.temperature") == 0.5
    tab.value("$('tune').click(); $('settings').elements.top_p.value = 2")
    press(tab, "Save")
    assert tab.value("$('tuning').open") and "top_p" not in tab.value("conversation.settings")


def test_all_has_names_for_screen_readers(tab, model):
    model.pieces = [
        {"reasoning_content": "Hm."},
        "```\na\n```\n| a |\n|---|\n| b |\n\n[c](http://d)",
    ]
    asked(tab, "Show it.")
    answered(tab, 2)
    press(tab, "Regenerate")
    tab.until("!running && known.size === 3")
    all_have_names(tab)
    press(tab, "Edit")
    all_have_names(tab)
    tab.value("$('list').click()")
    tab.until(f"{LISTED}.length === 1")
    all_have_names(tab)
    press(tab, "Settings")
    all_have_names(tab)


def test_it_fits_a_narrow_window(tab, model):
    tab.shape(400, 700)
    rows = "| a | b |\n|---|---|\n| " + "wide " * 40 + " | x |\n"
    model.pieces = [f"# Head\n\n```py\n{'x' * 200}\n```\n{rows}\n- {'y' * 300}"]
    asked(tab, "Show it.")
    answered(tab, 2)
    assert tab.value("document.documentElement.scrollWidth") <= 400
    assert tab.value("$('log').scrollWidth <= $('log').clientWidth")
    for name in ("list", "tune"):
        tab.value(f"$('{name}').click()")
        assert tab.value("document.documentElement.scrollWidth") <= 400
    box = "$('tuning').getBoundingClientRect()"
    assert tab.value(f"{box}.left") >= 0 and tab.value(f"{box}.right") <= 400
    tab.press("Escape")
    assert not tab.value("$('tuning').open")
