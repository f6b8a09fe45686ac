// A model's markdown becomes nodes. No text of a model is parsed as HTML: elements come from
// createElement, and everything else is a text node. Nothing is loaded: a link is opened by a click
// only, and an image is a link. The time is linear in the length of the text, also for hostile ones.
const MOST_DEPTH = 8; // of nested lists and quotes, and of nested emphasis
const MOST_MARKS = 3; // of one run of * or _
const MOST_COLUMNS = 100;
const FENCE = /^ {0,3}(`{3,}|~{3,})([^]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?: |$)/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)(?:[-*+]|(\d{1,9})[.)])(?: +|$)/;
const TASK = /^\[([ xX])\] /;
const SPECIAL = new RegExp([
  /\\[\n!-/:-@[-`{-~]/, // an escaped character
  /`+|\*+|_+|~~|!?\[|\]/,
  /<br ?\/?>/,
  /<(?:https?:\/\/|mailto:)[^\s<>]{1,2000}>/,
  /https?:\/\/[^\s<>"`[\]]{1,2000}/,
].map((each) => each.source).join("|"), "gi");
// The target of a link after the label, with an optional title.
const TARGET = /\]\(\s{0,9}(?:<([^<>\n]{0,2000})>|([^\s()<>]{0,2000}(?:\([^\s()<>]{0,2000}\)[^\s()<>]{0,2000}){0,9}))(?:\s{1,9}(?:"[^"]{0,500}"|'[^']{0,500}'))?\s{0,9}\)/y;
const LETTER = /[\p{L}\p{N}]/u;
const TAGS = { "*": "em", _: "em", "**": "strong", __: "strong", "~~": "del" };

function made(tag, name = "", text = "") {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text) element.textContent = text;
  return element;
}

function button(text, action, label = "") {
  const element = made("button", "", text);
  element.type = "button";
  if (label) element.setAttribute("aria-label", label);
  element.addEventListener("click", action);
  return element;
}

// Write a text into an element. Blocks that are the same as before stay, so that a growing answer
// costs little and a selection survives.
function write(element, text) {
  const blocks = blocksOf(text.split(/\r?\n/)), before = element.sources || [];
  element.sources = blocks.map((block) => block.source);
  let same = 0;
  while (same < before.length && before[same] === element.sources[same]) same++;
  while (element.children.length > same) element.lastChild.remove();
  for (const block of blocks.slice(same)) element.append(nodeOf(block, 0));
}

// Return the blocks of lines: kind, lines of its content, source.
function blocksOf(lines) {
  const blocks = [];
  for (let i = 0; i < lines.length;) {
    const first = i, line = lines[i++];
    if (!line.trim()) continue;
    const fence = fenceOf(line), block = { kind: "p", lines: [] };
    if (fence) {
      while (i < lines.length && !isEnd(lines[i], fence)) i++;
      Object.assign(block, { kind: "code", lines: lines.slice(first + 1, i++), language: fence.language });
    } else if (HEADING.test(line)) block.kind = "h";
    else if (RULE.test(line)) block.kind = "hr";
    else if (QUOTE.test(line)) {
      while (i < lines.length && QUOTE.test(lines[i])) i++;
      Object.assign(block, { kind: "quote", lines: lines.slice(first, i).map((each) => each.replace(QUOTE, "")) });
    } else if (ITEM.test(line)) {
      block.kind = "list";
      i = readList(lines, first, block);
    } else if (isTable(lines, first)) {
      while (i < lines.length && lines[i].includes("|")) i++;
      Object.assign(block, { kind: "table", lines: lines.slice(first, i) });
    } else {
      while (i < lines.length && lines[i].trim() && !begins(lines, i)) i++;
      block.lines = lines.slice(first, i);
    }
    block.source = lines.slice(first, i).join("\n");
    blocks.push(block);
  }
  return blocks;
}

function fenceOf(line) {
  const [, marks, rest] = FENCE.exec(line) || [];
  if (!marks || (marks[0] === "`" && rest.includes("`"))) return null;
  return { marks, language: rest.trim().split(/\s/, 1)[0].slice(0, 40) };
}

function isEnd(line, fence) {
  const [, marks, rest] = FENCE.exec(line) || [];
  return Boolean(marks) && marks[0] === fence.marks[0] && marks.length >= fence.marks.length && !rest.trim();
}

// Return whether a line that follows text of a paragraph begins another block.
function begins(lines, i) {
  const line = lines[i], item = ITEM.exec(line);
  if (item) return item[0].length < line.length && (!item[2] || Number(item[2]) === 1);
  return Boolean(fenceOf(line)) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || isTable(lines, i);
}

// Read a list from its first line. Set the block's items, and return the index of the next line.
function readList(lines, first, block) {
  const start = ITEM.exec(lines[first]), left = start[1].length, isNumbered = start[2] !== undefined;
  const isItem = (line) => {
    const item = ITEM.exec(line);
    return item && !RULE.test(line) && item[1].length < left + 2 && (item[2] !== undefined) === isNumbered ? item : null;
  };
  const indent = (line) => line.length - line.trimStart().length;
  Object.assign(block, { items: [], start: isNumbered ? Number(start[2]) : null });
  let i = first, inner = 0, item = null;
  while (i < lines.length) {
    const line = lines[i], begun = isItem(line);
    if (begun) {
      // A wide gap after the marker belongs to the text.
      const gap = begun[0].length - begun[0].trimEnd().length;
      inner = begun[0].length - (gap > 4 ? gap - 1 : 0);
      block.items.push(item = [line.slice(inner)]);
    } else if (!line.trim()) {
      let next = i;
      while (next < lines.length && !lines[next].trim()) next++;
      if (next === lines.length || !(indent(lines[next]) >= left + 2 || isItem(lines[next]))) return i;
      while (i < next) { item.push(""); i++; }
      continue;
    } else if (indent(line) >= left + 2) item.push(line.slice(Math.min(indent(line), inner)));
    else if (item[item.length - 1] && !begins(lines, i) && !ITEM.test(line)) item.push(line.trimStart());
    else return i;
    i++;
  }
  return i;
}

function isTable(lines, i) {
  if (i + 1 >= lines.length || !lines[i].includes("|") || !/^[ |:-]+$/.test(lines[i + 1])) return false;
  const below = cells(lines[i + 1]);
  if (below.length > MOST_COLUMNS || !below.every((each) => /^:?-+:?$/.test(each))) return false;
  return below.length === cells(lines[i]).length;
}

function cells(line) {
  let row = line.trim();
  if (row.startsWith("|")) row = row.slice(1);
  if (row.endsWith("|") && !row.endsWith("\\|")) row = row.slice(0, -1);
  return row.split(/(?<!\\)\|/).map((each) => each.replaceAll("\\|", "|").trim());
}

function nodeOf(block, depth) {
  const { kind, lines, source } = block;
  if (kind === "code") return codeBlock(lines.join("\n"), block.language);
  if (kind === "hr") return made("hr");
  if (kind === "table") return table(lines);
  if (kind === "h") {
    const level = HEADING.exec(source)[1].length, heading = made("h" + Math.min(6, level + 2));
    let text = source.trim().slice(level).trim(), end = text.length;
    while (text[end - 1] === "#") end--;
    if (!end || text[end - 1] === " ") text = text.slice(0, end).trim();
    inline(text, heading);
    return heading;
  }
  if (kind === "p" || depth === MOST_DEPTH) {
    const paragraph = made("p");
    inline(source.trim(), paragraph);
    return paragraph;
  }
  const whole = made(kind === "quote" ? "blockquote" : block.start === null ? "ul" : "ol");
  const fill = (element, inner) => {
    for (const each of blocksOf(inner)) element.append(nodeOf(each, depth + 1));
    return element;
  };
  if (kind === "quote") return fill(whole, lines);
  if (block.start !== null) whole.start = block.start;
  for (const item of block.items) {
    item[0] = item[0].replace(TASK, (_, mark) => (mark === " " ? "☐ " : "☑ "));
    whole.append(fill(made("li"), item));
  }
  return whole;
}

function codeBlock(text, language) {
  const whole = made("div", "code"), bar = made("div", "bar"), block = made("pre");
  const copy = button("Copy", async () => {
    copy.textContent = (await copied(text)) ? "Copied" : "Not copied";
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  }, "Copy the code");
  bar.append(made("span", "", language), copy);
  block.append(made("code", "", text));
  scrolls(block, "Code");
  whole.append(bar, block);
  return whole;
}

// Let the keyboard scroll an element.
function scrolls(element, label) {
  element.tabIndex = 0;
  element.setAttribute("role", "group");
  element.setAttribute("aria-label", label);
}

// Copy a text. Over plain HTTP from another machine, browsers have no navigator.clipboard.
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = Object.assign(made("textarea"), { value: text }), before = document.activeElement;
    document.body.append(field);
    field.select();
    const isDone = document.execCommand("copy");
    field.remove();
    before.focus();
    return isDone;
  }
}

function table(lines) {
  const box = made("div", "table"), whole = made("table"), [head, marks, ...rows] = lines.map(cells);
  const aligned = marks.map((each) => (each.endsWith(":") ? (each.startsWith(":") ? "center" : "right") : ""));
  // A short row gets no further cells, because many short rows below a wide head would be quadratic.
  const row = (texts, tag, parent) => {
    const line = made("tr"); // insertRow counts all rows each time
    parent.append(line);
    texts.slice(0, head.length).forEach((text, i) => {
      const cell = made(tag);
      if (aligned[i]) cell.style.textAlign = aligned[i];
      inline(text, cell);
      line.append(cell);
    });
  };
  row(head, "th", whole.createTHead());
  const body = whole.createTBody();
  for (const each of rows) row(each, "td", body);
  box.append(whole);
  scrolls(box, "Table");
  return box;
}

// Return the address of a link if it has a scheme that is allowed, or else null.
function safe(address) {
  try {
    const url = new URL(address);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

function link(address, text = "") {
  const element = Object.assign(made("a", "", text), { href: address, title: address, target: "_blank" });
  element.rel = "noopener noreferrer";
  return element;
}

// Return for each run of backticks, by its place, the place of the next run of the same length.
function codeEnds(text) {
  const ends = new Map(), latest = new Map();
  for (const { 0: run, index } of text.matchAll(/`+/g)) {
    const before = latest.get(run.length);
    if (before !== undefined) ends.set(before, index);
    latest.set(run.length, index);
  }
  return ends;
}

// Append the nodes of a text without blocks. `out` is the list of nodes so far. `marks` are the
// openers in it that may still become emphasis or a link: each is put and removed once.
function inline(text, parent) {
  const out = [], marks = [], open = {}, ends = codeEnds(text);
  // A label that begins at a mark below `floor` contains a link, so that it cannot be one.
  let at = 0, floor = 0;
  const words = (part) => { if (part) out.push(document.createTextNode(part)); };
  const raise = (height) => {
    const last = marks[marks.length - 1];
    if (last) last.height = Math.max(last.height, height);
  };
  const mark = (kind, said = kind) => {
    floor = Math.min(floor, marks.length);
    marks.push({ kind, at: out.length, height: 0 });
    open[kind] = (open[kind] || 0) + 1;
    words(said);
  };
  // Remove marks down to the last one of a kind, and return it.
  const taken = (kind) => {
    for (;;) {
      const last = marks.pop();
      open[last.kind]--;
      if (last.kind === kind) return last;
      raise(last.height); // it stays text
    }
  };
  // Put what follows a mark into an element. Return whether the element is not nested too deeply.
  const wrap = (element, last) => {
    const isFlat = last.height < MOST_DEPTH;
    raise(last.height + (isFlat ? 1 : 0));
    if (!isFlat) return false;
    for (const node of out.splice(last.at).slice(1)) element.append(node);
    out.push(element);
    return true;
  };
  const close = (kind) => { if (!wrap(made(TAGS[kind]), taken(kind))) words(kind); };

  const emphasis = (run, index) => {
    const before = text[index - 1] || " ", after = text[index + run.length] || " ", each = run[0];
    let mayOpen = /\S/.test(after), mayClose = /\S/.test(before), left = run.length;
    if (each === "_") { mayOpen &&= !LETTER.test(before); mayClose &&= !LETTER.test(after); }
    if (each === "~") left = 1;
    if (left > MOST_MARKS) return words(run);
    while (mayClose && left) {
      const kinds = (each === "~" ? ["~~"] : left === 2 ? [each + each, each] : [each, each + each])
        .filter((kind) => open[kind] > 0 && (each === "~" || kind.length <= left));
      if (!kinds.length) break;
      const kind = left === 3 && kinds.length === 2 && isAbove(each + each, each) ? kinds[1] : kinds[0];
      close(kind);
      left -= each === "~" ? 1 : kind.length;
    }
    if (!left) return undefined;
    if (!mayOpen) return words(each === "~" ? run : each.repeat(left));
    if (each === "~") return mark("~~");
    if (left > 1) mark(each + each);
    if (left !== 2) mark(each);
    return undefined;
  };
  const isAbove = (kind, other) => {
    for (let i = marks.length - 1; ; i--) if (marks[i].kind === kind || marks[i].kind === other) return marks[i].kind === kind;
  };
  // Handle the end of a label. Return the length of what it used.
  const label = (index) => {
    if (!open["["]) { words("]"); return 1; }
    const last = taken("[");
    TARGET.lastIndex = index;
    const target = TARGET.exec(text), address = target && safe(target[1] ?? target[2]);
    const isImage = last.isImage, element = address && link(address);
    if (!element || (marks.length < floor && !isImage) || !wrap(element, last)) {
      raise(last.height);
      words("]");
      return 1;
    }
    // A link contains no other one: a label that looks like an address goes where the link goes.
    for (const inner of element.querySelectorAll("a")) inner.replaceWith(inner.textContent);
    if (isImage) element.prepend("Image: ");
    else floor = marks.length;
    return target[0].length;
  };

  for (;;) {
    SPECIAL.lastIndex = at;
    const found = SPECIAL.exec(text);
    words(text.slice(at, found ? found.index : text.length));
    if (!found) break;
    const { 0: token, index } = found;
    let used = token.length;
    if (token[0] === "\\") words(token[1]);
    else if (token[0] === "`") {
      const end = ends.get(index);
      if (end === undefined) words(token);
      else {
        const code = text.slice(index + used, end).replaceAll("\n", " ");
        const isPadded = code.startsWith(" ") && code.endsWith(" ") && code.trim();
        out.push(made("code", "", isPadded ? code.slice(1, -1) : code));
        used += end - index;
      }
    } else if (token === "]") used = label(index);
    else if (token.endsWith("[")) {
      mark("[", token);
      marks[marks.length - 1].isImage = token.length > 1;
    } else if (/^<br/i.test(token)) out.push(made("br"));
    else if (token[0] === "<" || /^h/i.test(token)) {
      const plain = token[0] === "<" ? token.slice(1, -1) : withoutEnd(token), address = safe(plain);
      used = token[0] === "<" ? used : plain.length;
      if (address) out.push(link(address, plain)); else words(text.slice(index, index + used));
    } else emphasis(token, index);
    at = index + used;
  }
  for (const node of out) parent.append(node);
}

// Return an address without the punctuation of the sentence around it.
function withoutEnd(address) {
  const isClosed = address.includes("("), ends = ".,;:!?'\"*_~|" + (isClosed ? "" : ")");
  let end = address.length;
  while (ends.includes(address[end - 1])) end--;
  return address.slice(0, end);
}
