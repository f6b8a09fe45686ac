// Colours that the colour-blind can tell apart (Okabe and Ito), as red, green, blue; the best precision first.
const COLORS = [[0, 114, 178], [230, 159, 0], [0, 158, 115], [204, 121, 167], [140, 109, 49], [86, 180, 233]];
const GONE = [128, 136, 144];
const ABSENT = 254, KEPT = 150, CALM = matchMedia("(prefers-reduced-motion: reduce)").matches;
const EVERY_MS = CALM ? 2000 : 400, AGAIN_MS = 2000;
let seen = null, resident = null, used = null, light = null, flow = [], chosen = null;

const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
const mixed = (color, ground, share) => "rgb(" + color.map((c, i) => Math.round(ground[i] + (c - ground[i]) * share)) + ")";
const isDark = () => matchMedia("(prefers-color-scheme: dark)").matches;
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);

// Another size or other colours, which need no news of the server.
function redraw() {
  if (!seen || !seen.layers) return;
  delete $("legend").dataset.said;
  draw();
  drawFlow();
}

// A canvas of as many dots as the screen has for it.
function ready(canvas) {
  const dots = devicePixelRatio, context = canvas.getContext("2d");
  canvas.width = Math.round(canvas.clientWidth * dots);
  canvas.height = Math.round(canvas.clientHeight * dots);
  context.scale(dots, dots);
  return context;
}

function draw() {
  const { layers, experts, tiers } = seen, canvas = $("experts"), ground = isDark() ? [20, 24, 29] : [255, 255, 255];
  const wide = canvas.clientWidth / experts, most = $("one").checkVisibility() ? Infinity : innerHeight / 4 / layers;
  const high = Math.min(36, Math.max(6, wide), most);
  canvas.style.height = layers * high + "px";
  const context = ready(canvas), gap = Math.min(wide, high) >= 5 ? 1 : 0, empty = style("--empty");
  const present = new Array(tiers.length).fill(0);
  for (let i = 0; i < layers * experts; i++) {
    const x = (i % experts) * wide, y = Math.floor(i / experts) * high, tier = resident[i];
    context.fillStyle = empty;
    context.fillRect(x, y, wide - gap, high - gap);
    if (tier === ABSENT) {
      if (light[i] > 0.05) {
        context.fillStyle = mixed(GONE, ground, light[i]);
        context.fillRect(x, y, wide - gap, high - gap);
      }
      continue;
    }
    present[tier]++;
    // A lower precision is smaller too, for those who do not see its colour.
    const share = 1 - 0.5 * tier / Math.max(1, tiers.length - 1), w = (wide - gap) * share, h = (high - gap) * share;
    context.fillStyle = mixed(COLORS[tier % COLORS.length], ground, 0.4 + 0.6 * light[i]);
    context.fillRect(x + (wide - gap - w) / 2, y + (high - gap - h) / 2, w, h);
  }
  if (chosen !== null) {
    context.strokeStyle = style("--text");
    context.lineWidth = 2;
    context.strokeRect((chosen % experts) * wide, Math.floor(chosen / experts) * high, wide, high);
  }
  const items = tiers.map((name, tier) => ["rgb(" + COLORS[tier % COLORS.length] + ")", name + ": " + present[tier]]);
  items.push(["var(--empty)", "on disk: " + (layers * experts - present.reduce((a, b) => a + b, 0))]);
  items.push(["rgb(" + GONE + ")", "used just now, and gone again"]);
  items.push(["linear-gradient(90deg, " + mixed(COLORS[0], ground, 0.4) + " 50%, " + mixed(COLORS[0], ground, 1) + " 50%)",
    "strong colour: used just now"]);
  const said = items.map((item) => item[1]).join(", ");
  if ($("legend").dataset.said !== said) {
    $("legend").dataset.said = said;
    show("legend", items);
    canvas.setAttribute("aria-label", layers + " layers of " + experts + " experts; " + said);
  }
}

// What the memory is in use for: a part for each, in the server's order, what is free the last one.
function drawMemory(parts) {
  const names = Object.keys(parts), total = Object.values(parts).reduce((a, b) => a + b, 0);
  const color = (i) => i === names.length - 1 ? "var(--empty)" : "rgb(" + (COLORS[i] || GONE) + ")";
  $("used").hidden = total === 0;
  $("memory").setAttribute("aria-label", names.map((name) => name + " " + size(parts[name])).join(", "));
  $("memory").replaceChildren(...names.map((name, i) => {
    const part = document.createElement("i");
    part.style.background = color(i);
    part.style.width = 100 * parts[name] / total + "%";
    return part;
  }));
  show("uses", names.map((name, i) => [color(i), name + ": " + size(parts[name])]));
}

function show(list, items) {
  $(list).replaceChildren(...items.map(([color, text]) => {
    const item = document.createElement("li"), box = document.createElement("i");
    box.style.background = color;
    item.append(box, text);
    return item;
  }));
}

function choose(i) {
  chosen = i;
  if (i !== null && seen && seen.layers) {
    const where = resident[i] === ABSENT ? "on disk" : "in memory as " + seen.tiers[resident[i]];
    $("one").textContent = "Layer " + Math.floor(i / seen.experts) + ", expert " + (i % seen.experts) + ": " + where +
      ", used by " + used[i] + " tokens.";
  }
  if (seen && seen.layers) draw();
}

$("experts").addEventListener("pointermove", (event) => {
  if (!seen || !seen.layers) return;
  const box = $("experts").getBoundingClientRect();
  const column = Math.floor((event.clientX - box.left) / box.width * seen.experts);
  const row = Math.floor((event.clientY - box.top) / box.height * seen.layers);
  if (column >= 0 && row >= 0 && column < seen.experts && row < seen.layers) choose(row * seen.experts + column);
});
$("experts").addEventListener("pointerleave", () => choose(null));
$("experts").addEventListener("blur", () => choose(null));
$("experts").addEventListener("keydown", (event) => {
  if (!seen || !seen.layers) return;
  const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -seen.experts, ArrowDown: seen.experts }[event.key];
  if (step === undefined) return;
  event.preventDefault();
  const next = chosen === null ? 0 : chosen + step;
  if (next >= 0 && next < seen.layers * seen.experts) choose(next);
});

function drawFlow() {
  const canvas = $("flow"), context = ready(canvas), left = 42, top = 8, right = canvas.clientWidth - 74, low = canvas.clientHeight - 20;
  const most = Math.max(0, ...flow.map((each) => each.rate)), step = (right - left) / KEPT, first = right - flow.length * step;
  const at = (share) => low - (low - top) * share;
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  for (const share of [0, 0.5, 1]) {
    context.fillStyle = style("--line");
    context.fillRect(left, at(share), right - left, 1);
    context.fillStyle = style("--soft");
    context.textAlign = "right";
    context.fillText(percent(share), left - 5, at(share));
    context.textAlign = "left";
    if (most || !share) context.fillText(share ? size(share * most) + "/s" : "0", right + 5, at(share));
  }
  context.fillText(Math.round(KEPT * EVERY_MS / 1000) + " s ago", left, low + 12);
  context.textAlign = "right";
  context.fillText("now", right, low + 12);
  context.fillStyle = "rgb(" + COLORS[1] + ")";
  flow.forEach((each, i) => {
    if (each.rate) context.fillRect(first + i * step, at(each.rate / most), step, low - at(each.rate / most));
  });
  context.strokeStyle = context.fillStyle = style("--text");
  context.lineWidth = 2;
  context.beginPath();
  let open = false;
  flow.forEach((each, i) => {
    if (each.hits === null) { open = false; return; }
    const x = first + (i + 0.5) * step, y = at(each.hits);
    context.fillRect(x - 1.5, y - 1.5, 3, 3);
    if (open) context.lineTo(x, y); else context.moveTo(x, y);
    open = true;
  });
  context.stroke();
  const share = seen.requests ? percent(seen.hits / seen.requests) : "none yet";
  const text = "Line, left axis: experts that were in memory when a token needed them (hits; since the start: " + share +
    "). Bars, right axis: bytes read a second (since the start: " + size(seen.bytes_read) + ").";
  $("figures").textContent = text;
  canvas.setAttribute("aria-label", text + " At most " + size(most) + "/s.");
}

function take(latest) {
  const counts = new Uint32Array(bytes(latest.used).buffer), n = latest.layers * latest.experts;
  if (!light || light.length !== n) { light = new Float32Array(n); used = counts; seen = null; }
  for (let i = 0; i < n; i++) light[i] = counts[i] !== used[i] ? 1 : light[i] * 0.6;
  if (seen && latest.requests >= seen.requests) {
    const asked = latest.requests - seen.requests, passed_s = (performance.now() - seen.at_ms) / 1000;
    const rate = (latest.bytes_read - seen.bytes_read) / Math.max(passed_s, 0.001);
    flow.push({ hits: asked ? (latest.hits - seen.hits) / asked : null, rate });
    flow = flow.slice(-KEPT);
  }
  [seen, resident, used] = [Object.assign(latest, { at_ms: performance.now() }), bytes(latest.resident), counts];
  if (chosen !== null) choose(chosen); else draw();
  drawFlow();
}

async function look() {
  let wait_ms = EVERY_MS;
  try {
    if (!document.hidden) {
      const latest = await (await ask("/experts")).json();
      $("mode").textContent = latest.model + ": " + latest.mode;
      takeLimits(latest.images || null);
      if (latest.streams_below) $("less").textContent = Math.floor(latest.streams_below / 2 ** 20) + "MiB";
      $("managed").hidden = !latest.layers;
      $("plain").hidden = latest.layers > 0;
      const follow = atEnd();
      document.body.classList.toggle("answering", running !== null && latest.layers > 0);
      if (latest.layers) take(latest);
      drawMemory(latest.memory);
      if (follow) toEnd();
    }
  } catch (error) {
    const why = error instanceof TypeError ? "The server cannot be reached." : error.message;
    $("mode").textContent = why + " Trying again.";
    wait_ms = AGAIN_MS;
  }
  setTimeout(look, wait_ms);
}

$("text").value = sessionStorage.getItem("draft") || "";
takeLeft().catch(() => ($("unkept").hidden = false)).then(openAddressed);
look();
