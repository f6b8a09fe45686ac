const MODEL_FIELDS = ["temperature", "top_p", "top_k", "min_p", "repeat_penalty", "seed", "max_tokens"];
const SAVE_MS = 250, SHOW_MS = 30, SURE_MS = 5000;
const ENDS = { running: "incomplete", cut: "incomplete", stopped: "stopped", length: "the limit of its length was reached" };
// The conversation that is shown, all its messages by id, the id of the message shown last, and the
// messages from the first one to that.
let conversation = null, known = new Map(), leaf = null, messages = [];
// The answer that is running: `running` stops it, and `writing` is its message.
let running = null, writing = null, runs = 0, problem = "";

const defaults = () => JSON.parse(localStorage.getItem("settings") || "{}");
const isWide = () => matchMedia("(min-width: 1400px)").matches;

// Return the messages from the first one to the message `id`.
function pathTo(id) {
  const path = [];
  for (let message = known.get(id); message; message = known.get(message.parent)) path.unshift(message);
  return path;
}

const versions = (message) => [...known.values()].filter((each) => each.parent === message.parent).sort((a, b) => a.at - b.at);

// Return the id of the latest message that follows a message, or that of the message itself.
function tip(id) {
  const parents = new Set([...known.values()].map((each) => each.parent));
  const isAfter = (each) => {
    while (each && each.id !== id) each = known.get(each.parent);
    return Boolean(each) || id === null;
  };
  const ends = [...known.values()].filter((each) => !parents.has(each.id)).sort((a, b) => b.at - a.at);
  return ends.find(isAfter)?.id ?? id;
}

// Give a message another identifier, because its own one is another tab's version of it.
function rename(message) {
  const before = message.id;
  message.id = unique();
  if (known.get(before) !== message) return;
  known.delete(before);
  known.set(message.id, message);
  if (leaf === before) leaf = message.id;
}

function add(role, content, parent, images = []) {
  const message = { id: unique(), of: conversation.id, parent, role, content, reasoning: "", costs: "", end: "", writer: unique() };
  if (images.length) message.images = images;
  message.at = Math.max(Date.now(), ...versions(message).map((each) => each.at + 1));
  return message;
}

async function kept(...args) {
  try {
    await store(...args);
    $("unkept").hidden = true;
  } catch {
    $("unkept").hidden = false;
  }
}

// ---- The log

function atEnd() {
  const log = $("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 40;
}

function toEnd() { $("log").scrollTop = $("log").scrollHeight; }

function render() {
  messages = pathTo(leaf);
  const isFollowed = atEnd(), log = $("log"), before = new Map([...log.children].map((each) => [each.message, each]));
  const lines = messages.map((message) => {
    const line = before.get(message) || made("article");
    line.message = message;
    update(line);
    return line;
  });
  const last = messages[messages.length - 1];
  if (problem) {
    const said = made("p", "wrong", problem);
    said.setAttribute("role", "alert");
    lines.push(said);
  }
  if (last && last.role === "user" && !running) {
    const again = made("p", "acts");
    again.append(button("Ask again", () => answer(last)));
    lines.push(again);
  }
  if (lines.length !== log.children.length || lines.some((line, i) => line !== log.children[i])) log.replaceChildren(...lines);
  if (isFollowed) toEnd();
}

// Show what a message is now.
function update(line) {
  const { message } = line, isAnswer = message.role === "assistant", isOpen = message === writing;
  if (!line.parts) {
    line.className = "message " + message.role;
    line.setAttribute("aria-label", isAnswer ? "Answer" : "You");
    line.parts = { text: made(isAnswer ? "div" : "p", "text"), costs: made("p", "costs"), acts: made("div", "acts") };
    line.append(line.parts.text, ...(isAnswer ? [line.parts.costs] : []), line.parts.acts);
    if (message.images) {
      line.prepend(made("ul", "images"));
      showImages(line.firstChild, message.images);
    }
  }
  const { parts } = line;
  if (isAnswer) {
    if (message.reasoning) showThoughts(line, message, isOpen);
    write(parts.text, message.content);
    // The text of a running answer may have grown in another tab.
    const costs = isOpen ? "" : [message.costs, ENDS[message.end]].filter(Boolean).join(" · ");
    if (parts.costs.textContent !== costs) parts.costs.textContent = costs;
  } else if (parts.text.textContent !== message.content) parts.text.textContent = message.content;
  const all = versions(message), at = all.indexOf(message), isLast = message.id === leaf;
  const said = [isAnswer && isLast && message.end && !isOpen, at, all.length].join();
  if (parts.acts.said === said) return;
  parts.acts.said = said;
  parts.acts.replaceChildren();
  if (all.length > 1) {
    const turn = (text, step, label) => {
      const one = button(text, () => goTo(tip(all[at + step].id)), label);
      one.disabled = !all[at + step];
      return one;
    };
    const place = made("span", "", at + 1 + " of " + all.length);
    parts.acts.append(turn("‹", -1, "Previous version"), place, turn("›", 1, "Next version"));
  }
  if (isAnswer) {
    if (isLast && message.end) parts.acts.append(button("Continue", () => resume(message)));
    const copy = button("Copy", async () => {
      $("status").textContent = (await copied(message.content)) ? "Copied" : "The browser allows no copy";
    }, "Copy the answer");
    parts.acts.append(button("Regenerate", () => answer(known.get(message.parent))), copy);
  } else parts.acts.append(button("Edit", () => edit(line)));
}

function showThoughts(line, message, isOpen) {
  if (!line.parts.thoughts) {
    const fold = made("details", "thought");
    fold.append(made("summary"), made("p"));
    line.parts.thoughts = fold;
    line.prepend(fold);
  }
  const [summary, text] = line.parts.thoughts.children, title = isOpen && !message.content ? "Thinking" : "Thoughts";
  if (summary.textContent !== title) summary.textContent = title;
  if (text.textContent.length !== message.reasoning.length) text.textContent = message.reasoning;
}

// Replace a question by a field with its text.
function edit(line) {
  if (running) return;
  const { message, parts } = line, form = made("form", "editing"), field = made("textarea"), list = made("ul", "images");
  const shown = line.querySelector(".images");
  field.value = message.content;
  field.rows = Math.min(10, message.content.split("\n").length + 1);
  field.setAttribute("aria-label", "Edit the question");
  form.attached = new Attached(list, message.images);
  const hide = (isHidden) => [parts.acts, shown].forEach((each) => each && (each.hidden = isHidden));
  const close = () => { form.replaceWith(parts.text); hide(false); $("text").focus(); };
  const go = made("button", "", "Ask");
  form.append(list, field, go, button("Cancel", close));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = field.value.trim(), { urls, reading } = form.attached;
    if (!(text || urls.length) || reading || running) return;
    close();
    put(text, message.parent, urls);
  });
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
    else sends(event, form);
  });
  parts.text.replaceWith(form);
  hide(true);
  field.focus();
}

function sends(event, form) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  form.requestSubmit();
}

// ---- Questions and answers

function costs(t) {
  const fields = ["first word " + Math.round(t.prompt_ms) + " ms", t.predicted_per_second.toFixed(1) + " tok/s"];
  if (t.hit_rate !== null && t.hit_rate !== undefined) fields.push("experts " + percent(t.hit_rate) + " in memory");
  const lower = Object.values(t.mix || {}).slice(1).reduce((sum, share) => sum + share, 0);
  if (t.kl_estimate) fields.push("estimated loss " + t.kl_estimate.toPrecision(2) + " nats a token");
  else if (lower && typeof t.kl_estimate !== "number") fields.push("loss not known: " + percent(lower) + " of experts in a lower precision");
  fields.push("memory " + size(t.peak_rss_bytes) + " of " + size(t.ram_bytes));
  return fields.join(" · ");
}

function busy(abort, message) {
  [running, writing] = [abort, message];
  if (abort) runs++;
  $("send").disabled = abort !== null;
  $("stop").disabled = abort === null;
  $("log").setAttribute("aria-busy", String(abort !== null));
}

// Put a question after a message, and answer it.
async function put(text, parent, images) {
  if (!conversation.title) conversation.title = text.split("\n", 1)[0].slice(0, 80) || "Image";
  const question = add("user", text, parent, images), owner = conversation;
  known.set(question.id, question);
  leaf = question.id;
  const saved = kept(conversation, { at: Date.now() }, question);
  saved.then(listed);
  showAddress();
  if (images.length) {
    render();
    await saved; // if the page is left, images are too large for takeLeft
    if (conversation !== owner || leaf !== question.id) return;
  }
  answer(question);
  toEnd();
}

// Begin an answer to a question. Earlier answers to it stay.
function answer(question) {
  if (running) return;
  run(add("assistant", "", question.id), question.id);
}

// Continue an answer that is incomplete.
function resume(message) {
  if (!running) run(message, message.id);
}

// Return the place of the first message that is sent. `path` has the messages up to an answer.
const firstSent = (owner, path) => Math.max(0, path.findIndex((each) => each.id === owner.from));

// From now on, leave out the older half of the messages. Return whether that is possible.
function shorten(owner, path) {
  const middle = (firstSent(owner, path) + path.length) / 2;
  const next = path.find((each, i) => i >= middle && each.role === "user");
  if (!next) return false;
  owner.from = next.id;
  kept(owner, { from: next.id });
  return true;
}

// Return the request for an answer that follows a path, or that continues its last message.
function request(owner, path) {
  const { settings } = owner, tail = path[path.length - 1];
  const { said } = withImages(path.slice(firstSent(owner, path)));
  const body = { messages: said, stream: true, return_progress: true, stream_options: { include_usage: true }, overflow: "drop" };
  if (tail.role === "assistant" && tail.reasoning) {
    said[said.length - 1].reasoning_content = tail.reasoning;
    if (!tail.content) body.continue_final_message = "reasoning_content";
  }
  if (settings.system) said.unshift({ role: "system", content: settings.system });
  for (const name of MODEL_FIELDS) if (settings[name] !== undefined) body[name] = settings[name];
  if (settings.thinking) body.reasoning_effort = settings.thinking;
  return body;
}

// Ask the server for an answer. Messages that are too long for one request are left out, the oldest first.
async function posted(owner, path, signal) {
  for (;;) {
    const body = JSON.stringify(request(owner, path));
    try {
      return await ask("/v1/chat/completions", { method: "POST", body, signal });
    } catch (error) {
      if (error.status !== 413 || !shorten(owner, path)) throw error;
    }
  }
}

// Let the model write a message, from its present text on. `last` is the last message that the model gets.
async function run(message, last) {
  const abort = new AbortController(), owner = conversation, before = leaf, { end, content, reasoning } = message;
  const path = pathTo(last), isShown = () => conversation === owner;
  let timings = null, dropped = 0, count = 0, first_ms = 0, shown_ms = 0, isWaiting = false, isUnsaved = false, reason = "";
  Object.assign(message, { was: message.writer, writer: unique(), end: "running" });
  known.set(message.id, message);
  leaf = message.id;
  problem = "";
  busy(abort, message);
  render();
  const show = () => {
    isWaiting = false;
    if (!isShown() || writing !== message) return;
    const begin_ms = performance.now(), isFollowed = atEnd();
    update([...$("log").children].find((line) => line.message === message));
    if (isFollowed) toEnd();
    shown_ms = performance.now() - begin_ms;
  };
  const save = () => {
    isUnsaved = false;
    if (message.end === "running") kept(owner, { at: Date.now() }, message);
  };
  const state = (text) => { if (isShown()) $("status").textContent = text; };
  state("Waiting for its turn");
  let wrong = null;
  try {
    for await (const event of events(await posted(owner, path, abort.signal))) {
      if (event.error) throw new Error(event.error.message);
      timings = event.timings || timings;
      dropped = (event.usage && event.usage.dropped_messages) || dropped;
      const read = event.prompt_progress, choice = event.choices && event.choices[0], delta = choice && choice.delta;
      if (read && read.total) state("Reading the prompt: " + percent(read.processed / read.total));
      reason = (choice && choice.finish_reason) || reason;
      if (!delta || !(delta.content || delta.reasoning_content)) continue;
      if (!count++) first_ms = performance.now();
      message.reasoning += delta.reasoning_content || "";
      message.content += delta.content || "";
      state(message.content ? "Answering" : "Thinking");
      if (!isUnsaved) { isUnsaved = true; setTimeout(save, SAVE_MS); }
      // A long answer is shown less often, so that a tenth of the time is spent on it.
      if (!isWaiting) { isWaiting = true; setTimeout(show, Math.max(SHOW_MS, 9 * shown_ms)); }
    }
  } catch (error) {
    wrong = error.name === "AbortError" ? "" : error instanceof TypeError ? LOST : error.message;
  }
  const hasMore = message.content !== content || message.reasoning !== reasoning;
  message.end = wrong === null ? (reason === "length" ? "length" : "") : wrong ? "cut" : "stopped";
  if (timings) message.costs = costs(timings);
  else if (count > 1) {
    const rate = 1000 * (count - 1) / (performance.now() - first_ms);
    message.costs = count + " pieces · " + rate.toFixed(1) + " a second";
  }
  dropped += firstSent(owner, path);
  const { lost } = withImages(path.slice(firstSent(owner, path)));
  message.costs = [
    message.costs,
    dropped && "the model did not get the oldest " + dropped + " messages",
    lost && "the model did not get " + lost + (lost > 1 ? " images" : " image"),
  ].filter(Boolean).join(" · ");
  if (hasMore || (last === message.id && wrong === null)) kept(owner, { at: Date.now() }, message).then(listed);
  else if (last === message.id) Object.assign(message, { end, writer: message.was });
  if (writing === message) busy(null, null);
  if (!isShown()) return;
  if (!hasMore && last !== message.id) {
    known.delete(message.id);
    leaf = before;
  }
  problem = wrong || "";
  state(wrong ? "" : wrong === "" ? "Stopped" : hasMore ? "Answered" : "The answer is empty");
  render();
  const { activeElement } = document;
  if (activeElement === document.body || activeElement.disabled) $("text").focus();
  refresh();
}

// ---- Conversations

function showAddress() {
  const hash = known.size ? "#" + conversation.id : "";
  if (location.hash !== hash) history.pushState(null, "", location.pathname + hash);
}

// Show another version of the conversation.
function goTo(id) {
  if (running) return;
  leaf = id;
  problem = "";
  render();
  kept(conversation, { leaf });
}

function begin(found = null) {
  if (running) running.abort();
  busy(null, null);
  conversation = found ? { ...found.conversation, isKept: true } : { id: unique(), title: "", at: 0, settings: defaults() };
  known = new Map(found ? found.messages.map((each) => [each.id, each]) : []);
  leaf = known.has(conversation.leaf) ? conversation.leaf : tip(null);
  problem = "";
  $("status").textContent = "";
  render();
  toEnd();
  listed();
  $("text").focus();
}

// Move the answers that were running when a page was left to the database.
async function takeLeft() {
  for (const name of Object.keys(localStorage).filter((each) => each.startsWith("left "))) {
    const [owner, latest] = JSON.parse(localStorage.getItem(name));
    for (const message of latest) await store(owner, {}, message);
    localStorage.removeItem(name);
  }
}

// Show the conversation that the page's address names.
async function openAddressed() {
  const id = location.hash.slice(1);
  if (conversation && conversation.id === id) return;
  let found = null;
  try { if (id) found = await loaded(id); } catch { $("unkept").hidden = false; }
  begin(found);
  if (id && !found) showAddress();
}

// Take in what other tabs have written.
async function refresh() {
  const shown = conversation, before = runs, found = await loaded(shown.id).catch(() => null);
  // What was read before an answer of this tab is older than that answer.
  if (!found || conversation !== shown || running || runs !== before || document.querySelector(".editing")) return;
  for (const each of found.messages) {
    const here = known.get(each.id);
    if (here) Object.assign(here, each); else known.set(each.id, each);
  }
  shown.settings = found.conversation.settings;
  leaf = tip(leaf);
  render();
}

async function listed() {
  const all = await allConversations().catch(() => { $("unkept").hidden = false; return []; });
  const shown = JSON.stringify([conversation.id, ...all.map((each) => [each.id, each.title])]);
  if ($("all").shown === shown) return; // a press on Delete may be waiting for the second one
  $("all").shown = shown;
  $("all").replaceChildren(...all.map((each) => {
    const item = made("li"), open = button(each.title || "Untitled", () => { turnTo(each.id); fold(false); });
    open.title = each.title;
    if (each.id === conversation.id) open.setAttribute("aria-current", "true");
    item.append(open, twice("×", "Delete?", () => deleted(each.id), "Delete: " + each.title));
    return item;
  }));
  $("empty").hidden = all.length > 0;
}

// A button that acts at the second press.
function twice(text, question, action, label) {
  const name = (shown, said) => { one.textContent = shown; one.setAttribute("aria-label", said); };
  const one = button(text, () => {
    if (one.textContent === question) { action(); return; }
    name(question, label + ", press again");
    setTimeout(name, SURE_MS, text, label);
  }, label);
  return one;
}

function turnTo(id) {
  history.pushState(null, "", location.pathname + (id ? "#" + id : ""));
  return openAddressed();
}

async function deleted(id) {
  if (id === conversation.id) await turnTo("");
  await remove(id);
  listed();
}

let isListing = false;
news.onmessage = ({ data }) => {
  if (!conversation) return;
  if (data.id === conversation.id && data.isGone) {
    turnTo("").then(() => ($("status").textContent = "The conversation was deleted in another tab."));
  } else if (data.id === conversation.id) refresh();
  if (!isListing) { isListing = true; setTimeout(() => { isListing = false; listed(); }, 500); }
};

// Show or hide the list, which a wide window always shows.
function fold(isOpen) {
  document.body.classList.toggle("listing", isOpen);
  $("list").setAttribute("aria-expanded", String(isOpen));
  if (isOpen) $("fresh").focus(); else if (!isWide()) $("text").focus();
}

// ---- Settings

$("tune").addEventListener("click", () => {
  fold(false);
  const { settings } = conversation, form = $("settings");
  for (const each of form.elements) if (each.name) each.value = settings[each.name] ?? "";
  $("tuning").showModal();
});
$("settings").addEventListener("submit", (event) => {
  event.preventDefault();
  const settings = {};
  for (const each of event.target.elements) {
    if (each.name && each.value.trim()) settings[each.name] = each.type === "number" ? Number(each.value) : each.value;
  }
  conversation.settings = settings;
  localStorage.setItem("settings", JSON.stringify(settings));
  if (conversation.isKept) kept(conversation, { settings });
  $("tuning").close();
});
$("cancel").addEventListener("click", () => $("tuning").close());

// ---- Events

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("text").value.trim(), last = messages[messages.length - 1], { urls, reading } = attached;
  if (!(text || urls.length) || reading || running || !conversation) return;
  $("text").value = "";
  attached.set([]);
  // A question without an answer is not sent along: the new one is another version of it.
  put(text, !last ? null : last.role === "user" ? last.parent : last.id, urls);
});
$("text").addEventListener("keydown", (event) => sends(event, $("form")));
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (document.body.classList.contains("listing") && !isWide()) fold(false);
  else if (running) running.abort();
});
$("stop").addEventListener("click", () => running && running.abort());
for (const id of ["anew", "fresh"]) $(id).addEventListener("click", () => { turnTo(""); fold(false); });
$("list").addEventListener("click", () => fold(!document.body.classList.contains("listing")));
$("shade").addEventListener("click", () => fold(false));
$("show").addEventListener("click", () => {
  const shown = document.body.classList.toggle("experts");
  $("show").setAttribute("aria-pressed", String(shown));
  $("show").textContent = shown ? "Chat" : "Experts";
  redraw();
});
addEventListener("popstate", openAddressed);
addEventListener("pagehide", () => {
  sessionStorage.setItem("draft", $("text").value);
  if (!writing) return;
  // The database does not finish what it writes while the page is left.
  const latest = [known.get(writing.parent), writing].filter((each) => (each.content || each.reasoning) && !each.images);
  localStorage.setItem("left " + writing.id, JSON.stringify([conversation, latest]));
});
addEventListener("resize", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
