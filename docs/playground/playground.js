// Draws the runs of runs.js, which are recorded from the engine's own scheduler. Nothing is decided
// here: each step is drawn from its record, whose fields are described in runs.py.

"use strict";

(() => {
  const root = document.getElementById("playground");
  if (!root || typeof RUNS === "undefined") return;

  const LABELS = {
    requests: "requests",
    budget: "token budget of a step",
    slots: "slots (max_num_seqs)",
    pool: "pool, in KV slots",
    block_size: "block size, in tokens",
    threshold: "long_prefill_token_threshold",
    policy: "policy",
    prefix_caching: "prefix cache",
  };
  const TOTALS = {
    steps: "steps",
    largest: "tokens of the largest step",
    preemptions: "preemptions",
    computed: "tokens computed",
    found: "tokens found in the prefix cache",
    to_first: "mean steps from arrival to the first token",
    to_last: "mean steps from arrival to the end",
  };
  const NAMES = "ABCDEF";
  const PAUSE = 700; // milliseconds between two steps while playing

  const setting = { ...RUNS.defaults };
  let before = null; // the setting before the last change
  let steps = []; // of the run that is shown
  let now = 0;
  let timer = null;

  // ---- Reading a run ----------------------------------------------------------------------

  function numberOfRun(wanted) {
    let place = 0;
    for (const [name, values] of Object.entries(RUNS.options)) {
      place = place * values.length + values.indexOf(wanted[name]);
    }
    return RUNS.index[place];
  }

  function pairs(field, pattern) {
    return [...field.matchAll(pattern)].map((match) => match.slice(1));
  }

  // Each step with its fields, and with the state that results from all changes up to it.
  function read(text) {
    const blocks = new Map();
    for (let number = 1; number <= setting.pool / setting.block_size; number++) {
      blocks.set(number, { owners: "", cached: false });
    }
    let running = [];
    const again = new Set(); // requests that were preempted at least once
    return text.split(" ").map((step) => {
      const fields = step.split(";");
      const rows = pairs(fields[0], /([A-F])([dpbt])(\d+)/g);
      const admitted = pairs(fields[2], /([A-F])(\d+)/g);
      const preempted = pairs(fields[3], /([A-F])([A-F])/g);
      for (const [number, owners, mark] of pairs(fields[6], /(\d+)([A-F]+|-)(\*?)/g)) {
        blocks.set(Number(number), { owners: owners === "-" ? "" : owners, cached: mark === "*" });
      }
      for (const [victim] of preempted) again.add(victim);
      running = running.filter((name) => !preempted.some(([victim]) => victim === name));
      running.push(...admitted.map(([name]) => name));
      const found = {
        rows: rows.map(([name, kind, n]) => ({ name, kind, n: Number(n), again: again.has(name) })),
        waiting: [...fields[1]],
        admitted: admitted.map(([name, hits]) => ({ name, hits: Number(hits) })),
        preempted: preempted.map(([victim, cause]) => ({ victim, cause })),
        ended: [...fields[4]],
        why: fields[5],
        running: [...running],
        blocks: [...blocks.entries()],
      };
      running = running.filter((name) => !found.ended.includes(name));
      return found;
    });
  }

  // ---- Words ------------------------------------------------------------------------------

  function list(names) {
    if (names.length < 2) return names.join("");
    return `${names.slice(0, -1).join(", ")} and ${names.at(-1)}`;
  }

  function verb(names, one, many) {
    return `${list(names)} ${names.length === 1 ? one : many}`;
  }

  function tokens(n) {
    return n === 1 ? "1 token" : `${n} tokens`;
  }

  function whyWaiting(why) {
    if (why === "p") return "no request is admitted in a step with a preemption";
    if (why === "b") return "the budget is used up";
    if (why === "s") return "all slots are in use";
    const [needed, free] = why.slice(1).split("/");
    return `it needs ${needed} blocks for all its tokens, and ${free} are free`;
  }

  function words(step) {
    const said = [];
    for (const { victim, cause } of step.preempted) {
      said.push(
        victim === cause
          ? `${victim} is preempted: it needs a block, none is free, and it is the last of the running requests.`
          : `${victim} is preempted: ${cause} needs a block, none is free, ` +
              `and ${victim} is the last of the running requests.`,
      );
    }
    for (const { name, hits } of step.admitted) {
      const found = hits ? `; the prefix cache has its first ${hits} tokens` : "";
      said.push(`${name} is admitted${found}.`);
    }
    const decoding = step.rows.filter((row) => row.kind === "d").map((row) => row.name);
    if (decoding.length) said.push(`${verb(decoding, "decodes", "decode")}.`);
    for (const { name, kind, n, again } of step.rows) {
      const what = `${name} computes ${tokens(n)}${again ? " again" : ""}`;
      if (kind === "p") said.push(`${what}, all that was left, and gets a token.`);
      if (kind === "b") said.push(`${what}, cut by the budget of ${setting.budget}.`);
      if (kind === "t") said.push(`${what}, cut by the threshold of ${setting.threshold}.`);
    }
    const idle = step.running.filter((name) => !step.rows.some((row) => row.name === name));
    if (idle.length) said.push(`${verb(idle, "gets", "get")} nothing: the budget is used up.`);
    if (step.waiting.length) {
      const [head, ...others] = step.waiting;
      const behind = others.length ? ` ${verb(others, "waits", "wait")} behind it.` : "";
      said.push(`${head} waits: ${whyWaiting(step.why)}.${behind}`);
    }
    if (step.ended.length) said.push(`${verb(step.ended, "ends", "end")} with this step.`);
    return said.join(" ") || "There are no requests.";
  }

  function wordsOf(value) {
    if (typeof value === "boolean") return value ? "on" : "off";
    return value === 0 ? "off" : String(value);
  }

  // ---- Drawing ----------------------------------------------------------------------------

  function element(tag, className, text = "") {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== "") made.textContent = text;
    return made;
  }

  function colour(name) {
    return `var(--pg-${NAMES.indexOf(name)})`;
  }

  const parts = {};

  function build() {
    root.textContent = "";
    root.classList.add("pg");
    root.tabIndex = 0;
    root.setAttribute("role", "group");
    root.setAttribute("aria-label", "The playground: the left and right arrow keys go through the steps");
    parts.options = element("div", "pg-options");
    for (const [name, values] of Object.entries(RUNS.options)) {
      parts.options.append(choice(name, values));
    }
    const bar = element("div", "pg-bar");
    parts.first = button("|◀", "first step", () => go(0));
    parts.back = button("◀", "one step back", () => go(now - 1));
    parts.play = button("play", "play the steps", toggle);
    parts.next = button("▶", "one step forward", () => go(now + 1));
    parts.slider = element("input", "pg-slider");
    Object.assign(parts.slider, { type: "range", min: 1 });
    parts.slider.setAttribute("aria-label", "step");
    parts.slider.addEventListener("input", () => go(Number(parts.slider.value) - 1));
    parts.count = element("span", "pg-count");
    bar.append(parts.first, parts.back, parts.play, parts.next, parts.slider, parts.count);
    parts.words = element("p", "pg-words");
    parts.lines = element("div", "pg-lines");
    parts.lines.addEventListener("click", (event) => {
      const cell = event.target.closest("[data-step]");
      if (cell) go(Number(cell.dataset.step));
    });
    parts.budget = element("div", "pg-budget");
    parts.pool = element("div", "pg-pool");
    parts.totals = element("div", "pg-totals");
    root.append(parts.options, bar, parts.words, parts.lines, legend());
    root.append(parts.budget, parts.pool, parts.totals);
    root.addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!move || ["SELECT", "INPUT"].includes(event.target.tagName)) return;
      event.preventDefault();
      go(now + move);
    });
  }

  function button(text, title, action) {
    const made = element("button", "pg-button", text);
    Object.assign(made, { type: "button", title });
    made.setAttribute("aria-label", title);
    made.addEventListener("click", action);
    return made;
  }

  // A list for many or long values, otherwise buttons of which one is pressed.
  function choice(name, values) {
    const field = element("div", "pg-choice");
    field.setAttribute("role", "group");
    field.setAttribute("aria-label", LABELS[name]);
    field.append(element("span", "pg-label", LABELS[name]));
    if (name === "requests") {
      const select = element("select", "pg-select");
      select.setAttribute("aria-label", LABELS[name]);
      for (const value of values) select.append(element("option", "", value));
      select.addEventListener("change", () => change({ [name]: select.value }));
      field.append(select);
      return field;
    }
    const row = element("div", "pg-values");
    for (const value of values) {
      const text = wordsOf(value);
      const made = button(text, `${LABELS[name]}: ${text}`, () => change({ [name]: value }));
      made.dataset.option = name;
      made.dataset.value = String(value);
      row.append(made);
    }
    field.append(row);
    return field;
  }

  function legend() {
    const box = element("div", "pg-legend");
    const kinds = [
      ["pg-wait", "", "waits"],
      ["pg-chunk", "16", "computes this many tokens"],
      ["pg-chunk pg-again", "16", "computes them again"],
      ["pg-decode", "1", "decodes"],
      ["pg-idle", "", "runs, but gets nothing"],
      ["pg-wait pg-victim", "×", "is preempted"],
      ["pg-decode pg-end", "1", "ends"],
    ];
    for (const [className, text, meaning] of kinds) {
      const item = element("span", "pg-item");
      const cell = element("span", `pg-cell ${className}`, text);
      cell.style.setProperty("--c", colour("A"));
      item.append(cell, ` ${meaning}`);
      box.append(item);
    }
    return box;
  }

  function drawLines() {
    parts.lines.textContent = "";
    const requests = RUNS.requests[setting.requests];
    const lines = requests.map(([prompt, output, , priority], i) => {
      const line = element("div", "pg-line");
      const name = element("span", "pg-name", NAMES[i]);
      const first = setting.policy === "priority" && priority === 0 ? " first" : "";
      name.append(element("small", "", ` ${prompt}+${output}${first}`));
      name.title = `${NAMES[i]}: a prompt of ${prompt} tokens, ${output} tokens of output`;
      name.style.setProperty("--c", colour(NAMES[i]));
      line.append(name);
      return line;
    });
    const head = element("div", "pg-line pg-head");
    head.append(element("span", "pg-name", "step"));
    steps.forEach((step, number) => {
      const isTick = number === 0 || number % 5 === 4;
      const top = element("span", isTick ? "pg-cell pg-tick" : "pg-cell", String(number + 1));
      top.dataset.step = number;
      head.append(top);
      requests.forEach((_, i) => lines[i].append(cellOf(step, NAMES[i], number)));
    });
    parts.lines.append(head, ...lines);
  }

  function cellOf(step, name, number) {
    const row = step.rows.find((one) => one.name === name);
    const cell = element("span", "pg-cell");
    cell.dataset.step = number;
    cell.style.setProperty("--c", colour(name));
    if (row) {
      cell.classList.add(row.kind === "d" ? "pg-decode" : "pg-chunk");
      if (row.kind !== "d" && row.again) cell.classList.add("pg-again");
      if (step.ended.includes(name)) cell.classList.add("pg-end");
      cell.textContent = row.n;
    } else if (step.waiting.includes(name)) {
      cell.classList.add("pg-wait");
      if (step.preempted.some(({ victim }) => victim === name)) {
        cell.classList.add("pg-victim");
        cell.textContent = "×";
      }
    } else if (step.running.includes(name)) {
      cell.classList.add("pg-idle");
    }
    return cell;
  }

  function drawBudget(step) {
    parts.budget.textContent = "";
    const used = step.rows.reduce((sum, row) => sum + row.n, 0);
    const label = element("p", "pg-caption");
    label.textContent =
      `Tokens in this step: ${used} of ${setting.budget}. ` +
      `Slots: ${step.running.length} of ${setting.slots}.`;
    const bar = element("div", "pg-fill");
    for (const row of step.rows) {
      const hasRoom = row.n / setting.budget > 0.03;
      const piece = element("span", "pg-piece", hasRoom ? row.name : "");
      piece.style.setProperty("--c", colour(row.name));
      piece.style.width = `${(100 * row.n) / setting.budget}%`;
      piece.title = `${row.name}: ${tokens(row.n)}`;
      bar.append(piece);
    }
    parts.budget.append(label, bar);
  }

  function drawPool(step) {
    parts.pool.textContent = "";
    const free = step.blocks.filter(([, { owners }]) => !owners);
    const cached = free.filter(([, block]) => block.cached).length;
    const label = element("p", "pg-caption");
    const known = setting.prefix_caching ? `, ${cached} of them cached` : "";
    const marks = setting.prefix_caching
      ? " A star: cached; a dashed block: cached but not in use, and evicted when it is allocated."
      : "";
    label.textContent =
      `The pool: ${step.blocks.length} blocks of ${setting.block_size} tokens, ` +
      `${free.length} free${known}.${marks}`;
    const grid = element("div", "pg-blocks");
    for (const [number, { owners, cached: isCached }] of step.blocks) {
      const block = element("span", "pg-block");
      block.append(element("small", "", String(number)), owners + (isCached ? "*" : ""));
      if (owners) {
        block.classList.add("pg-held");
        block.style.setProperty("--c", colour(owners[0]));
        block.style.setProperty("--d", colour(owners.at(-1)));
      } else if (isCached) {
        block.classList.add("pg-cached");
      }
      block.title = owners ? `block ${number}: ${list([...owners])}` : `block ${number}: free`;
      grid.append(block);
    }
    parts.pool.append(label, grid);
  }

  function drawTotals() {
    parts.totals.textContent = "";
    const run = RUNS.totals[numberOfRun(setting)];
    const old = before && RUNS.totals[numberOfRun(before)];
    const grid = element("div", "pg-table");
    const changed = before && Object.keys(setting).filter((name) => setting[name] !== before[name]);
    grid.append(element("b", "", "The whole run"), element("b", "", "now"));
    grid.append(element("b", "", old ? "before" : ""));
    RUNS.totalNames.forEach((name, i) => {
      grid.append(element("span", "", TOTALS[name]), element("span", "pg-number", run[i]));
      grid.append(element("span", "pg-number", old ? old[i] : ""));
    });
    parts.totals.append(grid);
    if (changed && changed.length) {
      const said = changed.map((name) => `${LABELS[name]} ${wordsOf(before[name])}`).join(", ");
      parts.totals.append(element("p", "pg-caption", `Before: ${said}.`));
    }
  }

  function drawSetting() {
    for (const made of parts.options.querySelectorAll("[data-option]")) {
      const isChosen = String(setting[made.dataset.option]) === made.dataset.value;
      made.setAttribute("aria-pressed", isChosen);
    }
    parts.options.querySelector("select").value = setting.requests;
  }

  // ---- What the reader does ---------------------------------------------------------------

  function change(some) {
    const old = { ...setting };
    Object.assign(setting, some);
    if (Object.keys(setting).some((name) => setting[name] !== old[name])) before = old;
    show();
  }

  function show() {
    stop();
    steps = read(RUNS.runs[numberOfRun(setting)]);
    parts.slider.max = steps.length;
    drawSetting();
    drawLines();
    drawTotals();
    go(0);
  }

  function go(number) {
    now = Math.max(0, Math.min(number, steps.length - 1));
    const step = steps[now];
    parts.slider.value = now + 1;
    parts.count.textContent = `step ${now + 1} of ${steps.length}`;
    parts.words.textContent = words(step);
    for (const cell of parts.lines.querySelectorAll(".pg-now")) cell.classList.remove("pg-now");
    const column = parts.lines.querySelectorAll(`[data-step="${now}"]`);
    for (const cell of column) cell.classList.add("pg-now");
    const name = parts.lines.querySelector(".pg-name").offsetWidth;
    const { offsetLeft, offsetWidth } = column[0];
    const seen = parts.lines.clientWidth;
    const left = offsetLeft - parts.lines.scrollLeft;
    if (left < name || left + offsetWidth > seen) {
      parts.lines.scrollLeft = offsetLeft - name - (seen - name) / 3;
    }
    drawBudget(step);
    drawPool(step);
    parts.back.disabled = parts.first.disabled = now === 0;
    parts.next.disabled = now === steps.length - 1;
    if (now === steps.length - 1) stop();
  }

  function toggle() {
    if (timer) {
      stop();
      return;
    }
    if (now === steps.length - 1) go(0);
    parts.play.textContent = "pause";
    parts.words.setAttribute("aria-live", "off");
    timer = setInterval(() => go(now + 1), PAUSE);
  }

  function stop() {
    clearInterval(timer);
    timer = null;
    parts.play.textContent = "play";
    parts.words.setAttribute("aria-live", "polite");
  }

  // The setting of a button on the page: `data-set="requests=two long prompts&budget=32"`. Options
  // that it does not name have their defaults.
  function asked(text) {
    const wanted = { ...RUNS.defaults };
    for (const [name, value] of new URLSearchParams(text)) {
      wanted[name] = RUNS.options[name].find((one) => String(one) === value);
    }
    return wanted;
  }

  for (const made of document.querySelectorAll("button[data-set]")) {
    made.hidden = false;
    made.textContent = "Set it up";
    made.addEventListener("click", () => {
      change(asked(made.dataset.set));
      root.scrollIntoView({ block: "start" });
      root.focus({ preventScroll: true });
    });
  }
  build();
  show();
})();
