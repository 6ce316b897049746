// A trace has the changes of each step. This script reconstructs the state of any step from the
// changes, and draws it. Sections: the run, its state, drawing, hints, controls.

// ---------------------------------------------------------------- the run

const { header, steps, phases, chrome, closed, cut_off_line: cutOffLine } = JSON.parse(
  document.getElementById("data").textContent,
);
const blockSize = header.block_size;
const PARTS = ["schedule", "pack", "execute", "update"];
// Paul Tol's light colours: distinct with any colour vision, and black text is legible on them.
const PALETTE = [
  "#77aadd", "#ee8866", "#eedd88", "#ffaabb", "#44bb99", "#bbcc33", "#99ddff", "#aaaa00",
];

// By arrival number: the prompt, the generated tokens, and how the sequence ended.
const sequences = new Map();
steps.forEach((step, i) => {
  for (const arrival of step.arrived) {
    sequences.set(arrival.seq, { ...arrival, outputs: [], ending: null });
  }
  for (const row of step.rows) {
    for (const [token, text] of (row.guesses ?? []).slice(0, row.right)) {
      sequences.get(row.seq).outputs.push({ step: i, token, text });
    }
    if (row.yields) sequences.get(row.seq).outputs.push({ step: i, token: row.token, text: row.text });
  }
  for (const ended of step.aborted) sequences.get(ended.seq).ending = { ...ended, step: i - 1 };
  for (const ended of step.finished) sequences.get(ended.seq).ending = { ...ended, step: i };
});
const hasTexts = [...sequences.values()].some((sequence) => sequence.texts.some(Boolean));

// The token at a position of a sequence, in its prompt or its output.
function tokenAt(sequence, position) {
  const output = position - sequence.prompt.length;
  if (output >= 0) return sequence.outputs[output] ?? { token: null, text: "" };
  return { token: sequence.prompt[position], text: sequence.texts[position] };
}

// The text of a span of tokens, or their ids if there was no tokenizer.
function textOf(sequence, first, end) {
  const tokens = [];
  for (let position = first; position < end; position++) tokens.push(tokenAt(sequence, position));
  return hasTexts
    ? tokens.map((token) => token.text).join("")
    : tokens.map((token) => token.token ?? "?").join(" ");
}

// ---------------------------------------------------------------- the state in a step

// tables: the blocks of each running sequence. cached: the blocks in the prefix cache.
// computed: the number of tokens of each sequence with K and V. contents: the sequence whose tokens
// were written to a block, and its index in that sequence's table; kept when the block is freed.
function emptyState() {
  return { tables: new Map(), cached: new Set(), computed: new Map(), contents: new Map() };
}

function copyOf(state) {
  // Tables are replaced, never modified, so that copies can share them.
  return {
    tables: new Map(state.tables),
    cached: new Set(state.cached),
    computed: new Map(state.computed),
    contents: new Map(state.contents),
  };
}

// Advance from the step `before` to the state during `step`: a sequence that finishes in a step
// keeps its blocks until the next one.
function advance(state, step, before) {
  const gone = [...(before?.finished ?? []), ...step.aborted].map((ended) => ended.seq);
  for (const seq of [...gone, ...step.undone, ...step.preempted]) state.tables.delete(seq);
  for (const block of step.evicted) state.cached.delete(block);
  for (const block of step.from_host ?? []) state.contents.delete(block);
  for (const row of step.rows) {
    const table = state.tables.get(row.seq) ?? [];
    row.blocks.forEach((block, i) => {
      // A hit has a content already, unless it has just come from the host.
      const isHit = i < row.hits;
      if (isHit && state.contents.has(block)) return;
      state.contents.set(block, { seq: row.seq, index: table.length + i, isHit });
    });
    state.tables.set(row.seq, table.concat(row.blocks));
    state.computed.set(row.seq, row.computed + row.new - numRejected(row));
  }
  for (const block of step.published) state.cached.add(block);
}

// The number of rejected draft tokens, whose K and V are not used.
function numRejected(row) {
  return row.guesses ? row.guesses.length - row.right : 0;
}

// The sequences that use each block.
function ownersIn(state) {
  const owners = new Map();
  for (const [seq, table] of state.tables) {
    for (const block of table) {
      if (owners.has(block)) owners.get(block).push(seq);
      else owners.set(block, [seq]);
    }
  }
  return owners;
}

// To go back, replay from the previous keyframe. The counts are for the chart of the whole run.
const KEYFRAME_INTERVAL = 32;
const keyframes = [];
const numUsed = [];
const numCached = []; // cached and not in use
{
  const state = emptyState();
  steps.forEach((step, i) => {
    advance(state, step, steps[i - 1]);
    if (i % KEYFRAME_INTERVAL === 0) keyframes.push(copyOf(state));
    const owners = ownersIn(state);
    numUsed.push(owners.size);
    numCached.push([...state.cached].filter((block) => !owners.has(block)).length);
  });
}

function stateAt(i) {
  const keyframe = Math.floor(i / KEYFRAME_INTERVAL);
  const state = copyOf(keyframes[keyframe]);
  for (let k = keyframe * KEYFRAME_INTERVAL + 1; k <= i; k++) advance(state, steps[k], steps[k - 1]);
  return state;
}

// ---------------------------------------------------------------- drawing

const byId = (id) => document.getElementById(id);

function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

function colour(made, seq) {
  made.style.setProperty("--owner", PALETTE[(seq - 1) % PALETTE.length]);
  return made;
}

const plural = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;
const names = (seqs) => seqs.map((seq) => `#${seq}`).join(", ");
const milliseconds = (seconds) => `${(seconds * 1000).toFixed(seconds < 0.01 ? 2 : 1)} ms`;
const percent = (i) => `${(100 * i) / steps.length}%`;

let current = 0; // the index of the selected step, its state, and the sequences of each block
let state = emptyState();
let owners = new Map();

function describeRun() {
  const parts = [
    plural(steps.length, "step"),
    plural(sequences.size, "sequence"),
    `${header.num_kv_blocks} KV blocks of ${blockSize}`,
    `at most ${header.max_num_seqs} running, ${header.max_num_batched_tokens} tokens per step`,
    header.scheduling_policy,
  ];
  if (!header.enable_prefix_caching) parts.push("no prefix caching");
  if (cutOffLine) parts.push(`line ${cutOffLine} was cut off`);
  if (!closed) parts.push("the engine was not closed");
  byId("about").textContent = parts.join(" · ");
}

// Draw a lane for each sequence and a column for each step, once.
function drawLanes() {
  for (const seq of sequences.keys()) {
    const track = element("div", "track");
    for (const span of phases[seq].filter((span) => span.first <= span.last)) {
      const bar = element("i", `bar ${span.phase}`);
      bar.style.left = percent(span.first);
      bar.style.width = percent(span.last - span.first + 1);
      track.append(bar);
    }
    const lane = element("div", "lane");
    lane.dataset.seq = seq;
    lane.append(element("b", "", `#${seq}`), track);
    byId("lanes").append(lane);
  }
  document.body.style.setProperty("--step", 1 / steps.length);
}

// Draw stacked areas; a layer is a colour and a value for every step.
function drawChart(name, title, layers, limit) {
  let below = steps.map(() => 0);
  const polygons = layers.map(({ colour, values }) => {
    const above = below.map((value, i) => value + values[i]);
    const y = (value) => (100 * (1 - Math.min(1, value / limit))).toFixed(1);
    const there = above.map((value, i) => `${i},${y(value)} ${i + 1},${y(value)}`);
    const back = below.map((value, i) => `${i + 1},${y(value)} ${i},${y(value)}`).reverse();
    below = above;
    return `<polygon fill="var(--${colour})" points="${there.join(" ")} ${back.join(" ")}"/>`;
  });
  const chart = element("div", "chart");
  const view = `viewBox="0 0 ${steps.length} 100" preserveAspectRatio="none"`;
  chart.title = title;
  chart.innerHTML = `<b>${name}</b><svg ${view} class="track">${polygons.join("")}</svg>`;
  byId("charts").append(chart);
}

function drawCharts() {
  const blocks = [{ colour: "decode", values: numUsed }, { colour: "waiting", values: numCached }];
  drawChart("blocks", "in use; free and cached", blocks, numBlocksShown());
  const times = PARTS.map((part) => ({ colour: part, values: steps.map((step) => step.times[part]) }));
  const totals = steps.map((step) => sum(Object.values(step.times))).sort((a, b) => a - b);
  // A first step that compiles would dwarf all others, so the highest values may be cut off.
  drawChart("time", PARTS.join(", "), times, 1.2 * totals[Math.floor(0.97 * (totals.length - 1))]);
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

// Most of a large pool may never be used: show blocks up to the last one that was.
function numBlocksShown() {
  const all = header.num_kv_blocks;
  if (all <= 128) return all;
  const touched = steps.flatMap((step) => step.rows.flatMap((row) => row.blocks));
  const last = touched.reduce((most, block) => Math.max(most, block), 1);
  return Math.min(all, 4096, Math.ceil(last / 32) * 32);
}

function drawEmptyPool() {
  const shown = numBlocksShown();
  const size = shown <= 160 ? 26 : shown <= 400 ? 20 : shown <= 1024 ? 12 : 8;
  byId("blocks").style.setProperty("--cell", `${size}px`);
  byId("blocks").classList.toggle("small", size < 20);
  for (let block = 1; block <= shown; block++) {
    const cell = element("i", "block free");
    cell.dataset.block = block;
    byId("blocks").append(cell);
  }
}

function drawPool(step) {
  const marks = new Map(step.evicted.map((block) => [block, "evicted"]));
  for (const row of step.rows) {
    row.blocks.forEach((block, i) => {
      if (!marks.has(block)) marks.set(block, i < row.hits ? "hit" : "new");
    });
  }
  for (const cell of byId("blocks").children) {
    const block = Number(cell.dataset.block);
    const held = owners.get(block) ?? [];
    const isCached = state.cached.has(block);
    const kind = held.length > 1 ? "shared" : held.length ? "owned" : isCached ? "cached" : "free";
    const published = held.length && isCached ? "published" : "";
    cell.className = `block ${kind} ${published} ${marks.get(block) ?? ""}`;
    cell.textContent = held.length > 1 ? `×${held.length}` : (held[0] ?? "");
    if (held.length) colour(cell, held[0]);
    cell.style.setProperty("--fill", `${(100 * numFilled(block)) / blockSize}%`);
  }
  const free = header.num_kv_blocks - owners.size;
  const hidden = header.num_kv_blocks - byId("blocks").children.length;
  byId("counts").textContent =
    `${owners.size} in use, ${free} free (${numCached[current]} of them cached)` +
    (hidden ? `; the last ${hidden} are not shown` : "");
}

// The number of tokens with K and V in a block, which are the same for all of its sequences.
function numFilled(block) {
  const held = owners.get(block);
  if (!held) return state.cached.has(block) ? blockSize : 0;
  const start = state.tables.get(held[0]).indexOf(block) * blockSize;
  return Math.max(0, Math.min(blockSize, state.computed.get(held[0]) - start));
}

const MOST_TOKENS = 40; // drawn of a row: the first ones and the last ones

function drawBatch(step) {
  const { num_tokens, num_rows, num_decode_rows, num_outputs, max_query_len } = step.batch;
  byId("layout").textContent =
    `${plural(num_tokens, "token")} in ${plural(num_rows, "row")}, without padding; decode rows ` +
    `first (${num_decode_rows}), longest row ${max_query_len}; ` +
    `${plural(num_outputs, "token")} with logits, longest context ${step.batch.max_context_len}`;
  byId("packed").replaceChildren(...step.rows.map(drawRow));
}

function drawRow(row) {
  const made = colour(element("div", "row"), row.seq);
  const end = row.computed + row.new - (row.guesses ?? []).length;
  const what = row.kind === "decode" ? "decode" : `prefill ${row.new}`;
  const title = element("b", "", `#${row.seq} ${what}, context ${end}`);
  title.dataset.seq = row.seq;
  made.append(title);
  const numLast = row.new > MOST_TOKENS ? 8 : 0;
  const cut = Math.min(end, row.computed + MOST_TOKENS - numLast);
  for (let position = row.computed; position < cut; position++) {
    made.append(drawToken(row.seq, position));
  }
  if (numLast) {
    made.append(element("span", "token more", `… ${end - numLast - cut} more …`));
    for (let position = end - numLast; position < end; position++) {
      made.append(drawToken(row.seq, position));
    }
  }
  (row.guesses ?? []).forEach(([token, text], i) => {
    const kind = i < row.right ? "accepted" : "rejected";
    const draft = element("span", `token draft ${kind}`, visible(token, text));
    draft.title = `draft token, ${kind}`;
    made.append(draft);
  });
  if (row.yields) {
    const yielded = element("span", "token yielded", `→ ${visible(row.token, row.text)}`);
    yielded.dataset.yielded = row.seq;
    made.append(yielded);
  }
  return made;
}

function drawToken(seq, position) {
  const { token, text } = tokenAt(sequences.get(seq), position);
  const made = element("span", "token", visible(token, text));
  made.dataset.of = seq;
  made.dataset.position = position;
  return made;
}

// A token's text in one line; it is empty if its bytes are only part of a character.
function visible(token, text) {
  if (!hasTexts) return String(token ?? "end");
  if (token === null) return "end";
  return text === "" ? "…" : text.replaceAll("\n", "⏎").replaceAll("\t", "⇥");
}

function drawQueues(step) {
  const lists = {
    waiting: step.waiting,
    running: step.running,
    preempted: step.preempted,
    finished: step.finished.map((ended) => ended.seq),
  };
  const lines = Object.entries(lists).flatMap(([name, seqs]) => {
    const list = element("dd", "", seqs.length ? "" : "none");
    list.append(
      ...seqs.map((seq) => {
        const chip = colour(element("span", "chip", `#${seq}`), seq);
        chip.dataset.seq = seq;
        return chip;
      }),
    );
    return [element("dt", "", seqs.length ? `${name} (${seqs.length})` : name), list];
  });
  byId("lists").replaceChildren(...lines);
}

function drawTimes(step) {
  const total = sum(Object.values(step.times));
  const bars = [];
  const labels = [element("span", "", `total ${milliseconds(total)}`)];
  for (const part of PARTS) {
    const bar = element("i");
    bar.style.flexGrow = step.times[part] / total;
    const label = element("span", "", ` ${part} ${milliseconds(step.times[part])}`);
    const key = element("i");
    for (const made of [bar, key]) made.style.setProperty("--part", `var(--${part})`);
    label.prepend(key);
    bars.push(bar);
    labels.push(label);
  }
  byId("parts").replaceChildren(...bars);
  byId("seconds").replaceChildren(...labels);
}

// A description of the step in sentences.
function storyOf(step) {
  const count = (kind) => step.rows.filter((row) => row.kind === kind).length;
  const parts = [];
  if (step.aborted.length) parts.push(`Aborted before it: ${names(step.aborted.map((e) => e.seq))}.`);
  if (step.undone.length) parts.push(`A previous step failed: ${names(step.undone)} lost their blocks.`);
  if (step.preempted.length) parts.push(`No block was free; preempted: ${names(step.preempted)}.`);
  for (const row of step.rows.filter((row) => step.admitted.includes(row.seq))) {
    const loaded = row.blocks.slice(0, row.hits).filter((block) => step.from_host?.includes(block)).length;
    const found = [
      [row.hits - loaded, "the prefix cache"],
      [loaded, "the host"],
    ].filter(([count]) => count);
    const words = found.map(([count, where]) => `${plural(count * blockSize, "token")} from ${where}`);
    const hits = words.length ? `, with ${words.join(" and ")}` : "";
    const again = phases[row.seq].some((span) => span.phase === "preempted" && span.first <= current);
    parts.push(`#${row.seq} starts${again ? " again" : ""}${hits}.`);
  }
  parts.push(`${count("decode")} decode, ${count("prefill")} prefill.`);
  if (step.evicted.length) parts.push(`Evicted from the cache: ${plural(step.evicted.length, "block")}.`);
  if (step.to_host?.length) parts.push(`Copied to the host: ${plural(step.to_host.length, "block")}.`);
  if (step.from_host?.length) parts.push(`Filled from the host: ${plural(step.from_host.length, "block")}.`);
  for (const ended of step.finished) parts.push(`#${ended.seq} finishes (${ended.reason}).`);
  return parts.join(" ");
}

function show(i) {
  current = Math.max(0, Math.min(steps.length - 1, i));
  const step = steps[current];
  state = stateAt(current);
  owners = ownersIn(state);
  byId("slider").value = current;
  byId("position").textContent = `step ${step.step} of ${steps.at(-1).step} · ${step.time.toFixed(3)} s`;
  byId("story").textContent = storyOf(step);
  document.body.style.setProperty("--at", current / steps.length);
  drawPool(step);
  drawBatch(step);
  drawQueues(step);
  drawTimes(step);
  followLanes(step);
  refreshHint();
}

// Keep the lanes of running sequences visible.
function followLanes(step) {
  const planned = new Set(step.rows.map((row) => row.seq));
  let first = null;
  for (const lane of document.querySelectorAll(".lane")) {
    const runs = planned.has(Number(lane.dataset.seq));
    lane.classList.toggle("runs", runs);
    if (runs) first ??= lane;
  }
  const scroll = document.querySelector(".scroll");
  const height = scroll.clientHeight - byId("charts").offsetHeight; // the charts stay visible
  const isSeen =
    first.offsetTop >= scroll.scrollTop &&
    first.offsetTop + first.offsetHeight <= scroll.scrollTop + height;
  if (!isSeen) scroll.scrollTop = first.offsetTop - first.offsetHeight;
}

// ---------------------------------------------------------------- hints

const MOST_CHARACTERS = 400;
const quoted = (text) =>
  text.length > MOST_CHARACTERS ? `“…${text.slice(-MOST_CHARACTERS)}”` : `“${text}”`;

function describeBlock(block) {
  const held = owners.get(block) ?? [];
  const lines = [`Block ${block}, slots ${block * blockSize} to ${(block + 1) * blockSize - 1}`];
  if (held.length) lines.push(`used by ${names(held)}: reference count ${held.length}`);
  else lines.push("free");
  if (state.cached.has(block)) lines.push("in the prefix cache");
  if (steps[current].evicted.includes(block)) lines.push("evicted from the cache in this step");
  if (steps[current].to_host?.includes(block)) lines.push("its previous content was copied to the host");
  if (steps[current].from_host?.includes(block)) lines.push("filled from the host in this step");
  const filled = numFilled(block);
  lines.push(`K and V of ${filled} of ${blockSize} tokens`);
  const content = state.contents.get(block);
  if (filled && content) {
    const first = content.index * blockSize;
    lines.push(`positions ${first} to ${first + filled - 1}, ${content.isHit ? "from the host, for" : "computed by"} #${content.seq}:`);
    lines.push(quoted(textOf(sequences.get(content.seq), first, first + filled)));
  }
  return lines.join("\n");
}

function describeSequence(seq) {
  const sequence = sequences.get(seq);
  const isOver = sequence.ending !== null && sequence.ending.step < current;
  const span = phases[seq].find((span) => span.first <= current && current <= span.last);
  const numOutputs = sequence.outputs.filter((output) => output.step <= current).length;
  const numPrompt = sequence.prompt.length;
  const completion = sequence.index ? `, completion ${sequence.index}` : "";
  const phase = isOver ? `ended (${sequence.ending.reason})` : (span?.phase ?? "not arrived yet");
  const lines = [`#${seq}, request ${sequence.request}${completion}: ${phase}`];
  const table = state.tables.get(seq);
  if (table) lines.push(`${state.computed.get(seq)} tokens computed; block table [${table.join(", ")}]`);
  lines.push(`${plural(numPrompt, "token")} of prompt: ${quoted(textOf(sequence, 0, numPrompt))}`);
  const answer = textOf(sequence, numPrompt, numPrompt + numOutputs);
  lines.push(`${plural(numOutputs, "token")} of output: ${quoted(answer)}`);
  return lines.join("\n");
}

function describeToken(seq, position) {
  const { token } = tokenAt(sequences.get(seq), position);
  const table = state.tables.get(seq);
  const index = Math.floor(position / blockSize);
  const offset = position % blockSize;
  const slot = table[index] * blockSize + offset;
  return [
    `Token ${token} at position ${position} of #${seq}`,
    `K and V go to slot ${slot}: entry ${index} of the block table is block ${table[index]}, ` +
      `and ${table[index]} × ${blockSize} + ${offset} = ${slot}`,
  ].join("\n");
}

function describeYielded(seq) {
  const row = steps[current].rows.find((row) => row.seq === seq);
  const token = row.token === null ? "an end-of-sequence token" : `token ${row.token}`;
  return `All tokens of #${seq} are computed: ${token} was sampled from the logits of the last one`;
}

function hintFor(target) {
  const { block, seq, of, position, yielded } = target.dataset;
  if (block) return describeBlock(Number(block));
  if (of) return describeToken(Number(of), Number(position));
  if (yielded) return describeYielded(Number(yielded));
  return describeSequence(Number(seq));
}

let hinted = null; // the element under the pointer

function showHint(event) {
  hinted = event.target.closest?.("[data-block], [data-of], [data-yielded], [data-seq]");
  refreshHint();
  if (!hinted) return;
  // Next to the pointer, but inside the window.
  const { width, height } = byId("hint").getBoundingClientRect();
  const below = event.clientY + 14;
  const isLow = below + height > innerHeight;
  const left = Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 4));
  byId("hint").style.left = `${left}px`;
  byId("hint").style.top = `${isLow ? Math.max(4, event.clientY - height - 10) : below}px`;
}

// Also called when the step changes under a resting pointer: some elements are then new.
function refreshHint() {
  if (!hinted?.isConnected) hinted = null;
  byId("hint").hidden = hinted === null;
  if (hinted) byId("hint").textContent = hintFor(hinted);
  chooseBlocks(state.tables.get(Number(hinted?.dataset.seq)) ?? []);
}

function chooseBlocks(blocks) {
  const chosen = new Set(blocks.map(String));
  for (const cell of byId("blocks").children) {
    cell.classList.toggle("chosen", chosen.has(cell.dataset.block));
  }
}

// ---------------------------------------------------------------- controls

let timer = null;

function play(isOn) {
  clearInterval(timer);
  timer = isOn ? setInterval(playOn, 1000 / Number(byId("speed").value)) : null;
  byId("play").textContent = isOn ? "❚❚ pause" : "▶︎ play";
}

function playOn() {
  if (current === steps.length - 1) play(false);
  else show(current + 1);
}

// Go to a step by hand, which stops playback.
function go(i) {
  play(false);
  show(i);
}

function goToNextEvent() {
  const isEvent = (step) =>
    step.preempted.length + step.undone.length + step.aborted.length + step.evicted.length > 0 ||
    step.rows.some((row) => row.hits > 0);
  const next = steps.findIndex((step, i) => i > current && isEvent(step));
  if (next >= 0) go(next);
}

function startPlaying() {
  if (timer === null && current === steps.length - 1) show(0);
  play(timer === null);
}

// `page.html#step=12` opens at that step.
function goToAddress() {
  const number = Number(/^#step=(\d+)$/.exec(location.hash)?.[1] ?? 0);
  const i = steps.findIndex((step) => step.step >= number);
  show(i < 0 ? steps.length - 1 : i);
}

const KEYS = {
  ArrowLeft: () => go(current - 1),
  ArrowRight: () => go(current + 1),
  Home: () => go(0),
  End: () => go(steps.length - 1),
  e: goToNextEvent,
  " ": startPlaying,
};

function onKey(event) {
  const isOurs = event.key in KEYS && !event.ctrlKey && !event.metaKey && !event.altKey;
  // A button or a list with the focus handles its own keys.
  const takesKey = { BUTTON: [" "], SELECT: Object.keys(KEYS) }[event.target.tagName] ?? [];
  if (!isOurs || takesKey.includes(event.key)) return;
  event.preventDefault();
  KEYS[event.key]();
}

// A click on a lane or a chart selects the step under the pointer.
function onClick(event) {
  const track = event.target.closest(".lane, .chart")?.querySelector(".track");
  if (track) {
    const { left, width } = track.getBoundingClientRect();
    const share = (event.clientX - left) / width;
    if (share >= 0) go(Math.floor(share * steps.length));
  }
  showHint(event); // touch screens have no pointer that hovers
}

function saveChromeTrace() {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(chrome)], { type: "application/json" }));
  link.download = "trace.json";
  link.click();
  URL.revokeObjectURL(link.href);
}

function start() {
  describeRun();
  byId("chrome").onclick = saveChromeTrace;
  if (steps.length === 0) {
    byId("story").textContent = "The engine ran no step.";
    return;
  }
  drawLanes();
  drawCharts();
  drawEmptyPool();
  byId("slider").max = steps.length - 1;
  byId("slider").oninput = () => go(Number(byId("slider").value));
  byId("first").onclick = () => go(0);
  byId("previous").onclick = () => go(current - 1);
  byId("next").onclick = () => go(current + 1);
  byId("last").onclick = () => go(steps.length - 1);
  byId("play").onclick = startPlaying;
  byId("event").onclick = goToNextEvent;
  byId("speed").onchange = () => play(timer !== null);
  document.addEventListener("keydown", onKey);
  document.addEventListener("click", onClick);
  document.addEventListener("pointerover", showHint);
  addEventListener("hashchange", goToAddress);
  goToAddress();
}

start();
