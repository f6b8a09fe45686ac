// The dialog in which the server's model is chosen, and another one downloaded. The server offers it if it was
// started with --allow-model-change.
const POLL_MS = 700;
const VERBS = { compare: "Comparing", pull: "Downloading", load: "Loading" };
const ENDED = { compare: "Compared", pull: "Downloaded", load: "Now in use:" };
let isPolling = false;

// Begin or stop a task of the server, and show its progress.
async function beginTask(action, model = "") {
  $("failed").textContent = "";
  try {
    await ask("/local-models/task", { method: "POST", body: JSON.stringify({ action, model }) });
  } catch (error) {
    // Another tab may have begun a task, which is shown instead.
    if (error.status !== 409) $("failed").textContent = error instanceof TypeError ? LOST : error.message;
  }
  poll();
}

// Show the models and the task, until the task has ended or the dialog is closed.
async function poll() {
  if (isPolling) return;
  isPolling = true;
  for (let isBusy = true; isBusy && $("models").open;) {
    try {
      const latest = await (await ask("/local-models")).json();
      isBusy = showTask(latest.task);
      showPulled(latest.models);
      showCompared(latest.compared);
      for (const each of $("models").querySelectorAll("li button, td button, #search button")) {
        each.disabled = isBusy && latest.task.action !== "list"; // the server begins a task after a list
      }
      if (document.activeElement === document.body) $(isBusy ? "halt" : "repo").focus();
    } catch (error) {
      $("failed").textContent = error instanceof TypeError ? "The server cannot be reached." : error.message;
    }
    if (isBusy) await new Promise((go) => setTimeout(go, POLL_MS));
  }
  isPolling = false;
}

// Show the latest task. Return whether it is running.
function showTask(task) {
  const isBusy = task !== null && task.state === "running", isShown = task !== null && task.action !== "list";
  $("task").hidden = !isShown;
  $("failed").textContent = task ? task.error : "";
  for (const id of ["share", "halt"]) $(id).hidden = !isBusy;
  if (!isShown) return isBusy;
  const { action, model, state, doing, done } = task, steps = [VERBS[action] + " " + model];
  if (doing && doing !== VERBS[action]) steps.push(doing);
  if (done !== null) steps.push(percent(done));
  const end = { done: ENDED[action] + " " + model, failed: "", stopped: "Stopped" + (action === "pull" ? ". The downloaded part is kept." : "") };
  $("doing").textContent = isBusy ? steps.join(" · ") : end[state];
  if (done === null) $("share").removeAttribute("value"); else $("share").value = done;
  return isBusy;
}

// Fill an element with what `parts` returns, if `state` differs from the state that it shows.
function refill(element, state, parts) {
  const shown = JSON.stringify(state);
  if (element.shown === shown) return;
  element.shown = shown;
  element.replaceChildren(...parts());
}

function showPulled(models) {
  refill($("pulled"), models, () => models.map(({ name, bytes, loaded }) => {
    const item = made("li");
    item.append(made("span", "", name), made("span", "soft", size(bytes)));
    item.append(loaded ? made("b", "", "in use") : button("Use", () => beginTask("load", name), "Use " + name));
    return item;
  }));
}

function showCompared(found) {
  $("compared").hidden = !found;
  if (!found) return;
  refill($("rows"), found, () => found.rows.map((row) => {
    const line = made("tr"), file = made("td", "", row.file), isUseful = row.here === "fits" || row.here === "streams";
    if (row.best) file.append(made("b", "best", "best here"));
    const below = made("p", "soft", size(row.disk_bytes) + (row.missing_bytes ? " " : ", downloaded"));
    if (row.missing_bytes && isUseful) {
      below.append(button("Download", () => beginTask("pull", found.repo + "/" + row.file), "Download " + row.file));
    }
    file.append(below);
    line.append(file, made("td", "", outlook(row)), made("td", "", speed(row)));
    return line;
  }));
  const left = found.left_out ? " " + found.left_out + " smaller models were not examined." : "";
  $("machine").textContent = found.repo + " on this machine: " + found.processor + ", " + size(found.ram_bytes) + " of memory for a model, " +
    size(found.free_bytes) + " of disk space free." + left + " " + found.disturbed;
}

// Return how a model would run on this machine.
function outlook({ here, why, ram_bytes, reading }) {
  if (why) return why;
  if (here === "no room") return "too large for the free disk space";
  if (here === "does not run") return "does not run: needs " + size(ram_bytes) + " of memory";
  if (here === "streams") return "streams: " + percent(reading) + " of the time reads from disk";
  return here || "not known";
}

// Return the predicted tokens per second, as a range if it depends much on the text.
function speed({ tokens_s: least, tokens_s_skewed: most }) {
  if (least === null) return "";
  const round = (value) => (value < 10 ? value.toPrecision(2) : value.toFixed(0));
  return most && most > 1.1 * least ? round(least) + "–" + round(most) : round(least);
}

$("choose").hidden = !document.body.classList.contains("may-change");
$("choose").addEventListener("click", () => {
  fold(false);
  $("models").showModal();
  beginTask("list");
});
$("search").addEventListener("submit", (event) => {
  event.preventDefault();
  beginTask("compare", $("repo").value.trim());
});
$("halt").addEventListener("click", () => beginTask("stop"));
$("enough").addEventListener("click", () => $("models").close());
