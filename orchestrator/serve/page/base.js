"use strict";
const $ = (id) => document.getElementById(id);
const LOST = "The connection to the server broke off.";
let key = sessionStorage.getItem("key") || "", asking = null;

// Fetch a path of this server. Ask for a key if the server wants one. Throws Error with
// the server's message, and its status.
async function ask(path, options = {}) {
  for (;;) {
    const headers = { "Content-Type": "application/json" }, used = key;
    if (used) headers.Authorization = "Bearer " + used;
    const answer = await fetch(path, { ...options, headers });
    if (answer.ok) return answer;
    if (answer.status === 401) {
      if (used === key) await askForKey(used !== "");
      continue;
    }
    const said = await answer.json().catch(() => ({}));
    const why = (said.error && said.error.message) || "The server answers with status " + answer.status + ".";
    throw Object.assign(new Error(why), { status: answer.status });
  }
}

function askForKey(isWrong) {
  if (!asking) {
    $("unfit").textContent = isWrong ? "The server does not know that key." : "";
    $("ask").hidden = false;
    const others = document.querySelectorAll("header, nav, main, aside");
    for (const each of others) each.inert = true;
    $("key").focus();
    asking = new Promise((done) => {
      $("keys").onsubmit = (event) => {
        event.preventDefault();
        key = $("key").value.trim();
        sessionStorage.setItem("key", key);
        $("key").value = "";
        for (const each of others) each.inert = false;
        $("ask").hidden = true;
        asking = null;
        $("text").focus();
        done();
      };
    });
  }
  return asking;
}

// Yield the events of a streamed answer. Throws Error if the stream ends without [DONE].
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error(LOST);
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
    }
  }
}

const size = (bytes) => bytes >= 2 ** 30 ? (bytes / 2 ** 30).toFixed(2) + " GiB" : (bytes / 2 ** 20).toFixed(1) + " MiB";
const percent = (share) => Math.round(100 * share) + " %";
// Return an identifier. crypto.randomUUID is missing over plain HTTP from another machine.
const unique = () => [...crypto.getRandomValues(new Uint32Array(3))].map((each) => each.toString(36)).join("");
