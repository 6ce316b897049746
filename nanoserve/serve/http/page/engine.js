// Live view of the engine: numbers, requests, the KV cache. Reads /live while it is visible.

import { ask } from "./api.js";
import { captionOf } from "./caption.js";
import { byId, duration, element, plural } from "./element.js";
import { Pool } from "./pool.js";
import { colourOf, PoolCanvas } from "./pool_canvas.js";
import { drawBars, drawLine, Rates } from "./rates.js";
import { eventsOf } from "./sse.js";
import { load, save } from "./storage.js";

const MOST_REQUESTS = 12; // listed requests of each kind
const HOW_TO_ASK = "Point at a block or a request to see who holds what.";
const FIRST_PAUSE = 1; // seconds before the next attempt to connect; doubled each time
const LONGEST_PAUSE = 30;

export class EnginePanel {
  #controller = null; // of the connection, while there is one
  #state = null; // {requests, waiting, numbers}, of the last event
  #isScheduled = false;
  #hint = null; // position of the pointer on the canvas: {x, y}
  #replica = null; // number of the chosen replica, if there are several

  constructor() {
    this.pool = new Pool();
    this.canvas = new PoolCanvas(byId("pool"), this.pool);
    this.rates = new Rates();
    document.body.classList.toggle("no-engine", load("nanoserve.engine") === "hidden");
    byId("toggle-engine").addEventListener("click", () => this.#toggle());
    for (const tab of document.querySelectorAll("[data-tab]")) {
      tab.addEventListener("click", () => this.#tab(tab));
    }
    document.addEventListener("visibilitychange", () => this.#watchIfSeen());
    document.documentElement.addEventListener("themechange", () => this.#schedule());
    new ResizeObserver(() => (this.#watchIfSeen(), this.#schedule())).observe(byId("engine"));
    this.#listen();
    setInterval(() => this.#controller && this.#schedule(), 1000); // rates change without events, too
    this.#watchIfSeen();
  }

  // ---------------------------------------------------------------- visibility

  #toggle() {
    const isHidden = document.body.classList.toggle("no-engine");
    save("nanoserve.engine", isHidden ? "hidden" : "shown");
    this.#watchIfSeen();
  }

  #tab(chosen) {
    document.body.dataset.shown = chosen.dataset.tab;
    for (const tab of document.querySelectorAll("[data-tab]")) {
      tab.setAttribute("aria-pressed", String(tab === chosen));
    }
    this.#watchIfSeen();
  }

  // Connect only while the view is visible, so that the engine is not observed otherwise.
  #watchIfSeen() {
    const isSeen = !document.hidden && byId("engine").offsetParent !== null;
    byId("toggle-engine").setAttribute("aria-pressed", String(byId("engine").offsetParent !== null));
    if (isSeen && !this.#controller) this.#watch();
    if (!isSeen) this.#controller?.abort();
    if (!isSeen) this.#controller = null;
  }

  async #watch() {
    const controller = (this.#controller = new AbortController());
    const { signal } = controller;
    for (let pause = FIRST_PAUSE; !signal.aborted; pause = Math.min(LONGEST_PAUSE, 2 * pause)) {
      try {
        const path = this.#replica === null ? "live" : `live?replica=${this.#replica}`;
        const response = await ask(path, { signal });
        for await (const event of eventsOf(response.body)) {
          if (signal.aborted) return;
          pause = FIRST_PAUSE;
          this.#take(event);
        }
        this.#tell("The connection has ended. Trying again …");
      } catch (error) {
        if (signal.aborted) return;
        if (error.status === 404 && this.#replica !== null) {
          this.#replica = null; // it has terminated: show any other one
          continue;
        }
        this.#tell(error.status === 404 ? "This server has no live view." : error.message);
        if (error.status === 404) return;
      }
      await new Promise((resolve) => setTimeout(resolve, pause * 1000));
    }
  }

  #tell(text) {
    byId("engine-note").textContent = text;
    byId("engine-note").hidden = !text;
    byId("engine").classList.toggle("silent", Boolean(text));
  }

  // ---------------------------------------------------------------- following

  #take({ name, data }) {
    const event = JSON.parse(data);
    if (name === "replicas") return this.#offer(event);
    if (name === "snapshot") this.pool.load(event);
    else if (name === "change") this.pool.apply(event);
    else return;
    if (name === "snapshot") this.settings = event.pool;
    this.#state = event;
    this.rates.add(event.numbers);
    this.#tell("");
    this.#schedule();
  }

  // With several engines, one of them is shown at a time.
  #offer({ replicas, shown }) {
    const options = replicas.map((number) => element("option", { value: number, selected: number === shown }, `${number}`));
    byId("replica").replaceChildren(...options);
    byId("choose-replica").hidden = replicas.length < 2;
  }

  #chooseReplica() {
    this.#replica = byId("replica").value;
    this.rates = new Rates();
    this.#controller?.abort();
    this.#watch();
  }

  #schedule() {
    if (this.#isScheduled) return;
    this.#isScheduled = true;
    requestAnimationFrame(() => {
      this.#isScheduled = false;
      if (this.#state && byId("engine").offsetParent !== null) this.#draw();
    });
  }

  #draw() {
    this.#drawNumbers();
    this.#drawRequests();
    this.canvas.draw(inks());
    this.#drawCounts();
    this.#drawHint();
    const caption = captionOf(this.#state, this.pool);
    if (byId("caption").textContent !== caption) byId("caption").textContent = caption;
  }

  #drawNumbers() {
    const { numbers, requests } = this.#state;
    const { rate, stepSeconds } = this.rates.now();
    byId("rate").textContent = Math.round(rate).toLocaleString("en");
    byId("num-running").textContent = requests.length;
    byId("num-waiting").textContent = numbers.num_waiting + numbers.num_held;
    byId("step-time").textContent = stepSeconds === null ? "–" : duration(stepSeconds);
    const { ttfts, prefix_cache_queries: queried, prefix_cache_hits: hits } = numbers;
    byId("ttft").textContent = ttfts.length ? duration(ttfts.at(-1)) : "–";
    byId("hit-rate").textContent = queried ? `${Math.round((100 * hits) / queried)} %` : "–";
    byId("hit-rate").title = `${plural(hits, "token")} of ${plural(queried, "prompt token")} were cached`;
    const style = getComputedStyle(byId("rate-line"));
    drawLine(byId("rate-line"), this.rates.lastMinute(), style.color);
    drawBars(byId("ttft-bars"), ttfts, style.color);
  }

  #drawRequests() {
    const { requests, waiting, numbers } = this.#state;
    const rows = [
      ...requests.slice(0, MOST_REQUESTS).map((request) => this.#requestRow(request, true)),
      ...waiting.slice(0, MOST_REQUESTS).map((request) => this.#requestRow(request, false)),
    ];
    const numMore = requests.length + numbers.num_waiting - rows.length;
    if (numMore > 0) rows.push(element("li", { class: "more" }, `and ${numMore} more`));
    // An element that has the focus, or is about to be clicked, must keep its place.
    reconcile(byId("requests"), rows);
    byId("no-requests").hidden = rows.length > 0;
  }

  #requestRow([seq, prompt, cached, computed, output], isRunning) {
    const progress = computed < prompt ? `prefill ${computed} of ${prompt}` : plural(output, "token");
    const what = isRunning ? progress : "waits";
    const label = element("span", { class: "what" }, what);
    const about = `${prompt} prompt${cached ? `, ${cached} cached` : ""}`;
    const context = element("span", { class: "context" }, about);
    const chip = element("b", { class: "chip" }, `#${seq}`);
    const attributes = { "data-seq": seq, tabindex: "0", class: isRunning ? "runs" : "waits" };
    const row = element("li", attributes, chip, label, context);
    chip.style.setProperty("--owner", colourOf(seq));
    row.classList.toggle("chosen", this.canvas.chosen === seq);
    return row;
  }

  #drawCounts() {
    const { pool, canvas } = this;
    const numFree = pool.numBlocks - pool.numUsed - pool.numCachedFree;
    byId("num-used").textContent = pool.numUsed.toLocaleString("en");
    byId("num-shared").textContent = pool.numShared.toLocaleString("en");
    byId("num-cached").textContent = pool.numCachedFree.toLocaleString("en");
    byId("num-free").textContent = numFree.toLocaleString("en");
    const several = canvas.perCell > 1 ? ` Each square shows ${canvas.perCell} blocks.` : "";
    const each = canvas.selected ? " Squares show those with content, in order." : several;
    const size = `${plural(pool.numBlocks, "block")} of ${plural(pool.blockSize, "token")}.`;
    byId("pool-about").textContent = size + each;
    byId("pool").setAttribute("aria-label",
      `KV cache: ${pool.numUsed} blocks in use, ${pool.numCachedFree} free but cached, ${numFree} empty`);
  }

  // ---------------------------------------------------------------- holders of a block

  #listen() {
    byId("replica").addEventListener("change", () => this.#chooseReplica());
    const canvas = byId("pool");
    const at = (event) => {
      this.#hint = { x: event.offsetX, y: event.offsetY };
      this.#schedule();
    };
    canvas.addEventListener("pointermove", at);
    canvas.addEventListener("pointerdown", at);
    canvas.addEventListener("pointerleave", (event) => {
      if (event.pointerType !== "mouse") return; // a block chosen by touch stays chosen
      this.#hint = null;
      this.#choose(null);
    });
    const requests = byId("requests");
    const seqOf = (event) => Number(event.target.closest("li")?.dataset.seq) || null;
    for (const kind of ["pointerover", "focusin"]) {
      requests.addEventListener(kind, (event) => this.#choose(seqOf(event)));
    }
    for (const kind of ["pointerleave", "focusout"]) {
      requests.addEventListener(kind, () => this.#choose(null));
    }
  }

  #choose(seq) {
    this.canvas.chosen = seq;
    this.#schedule();
  }

  #drawHint() {
    const found = this.#hint && this.canvas.blocksAt(this.#hint.x, this.#hint.y);
    byId("hint").textContent = found ? this.#about(found) : HOW_TO_ASK;
    if (!this.#hint) return;
    const chosen = found ? (this.pool.holders.get(found[0])?.[0] ?? null) : null;
    if (chosen !== this.canvas.chosen) this.#choose(chosen);
  }

  #about([first, last]) {
    const { pool } = this;
    if (first !== last) {
      let [used, cached] = [0, 0];
      for (let block = first; block <= last; block++) {
        if (pool.holders.has(block)) used++;
        else if (pool.cached.has(block)) cached++;
      }
      return `Blocks ${first} to ${last}: ${used} in use, ${cached} free but cached.`;
    }
    const holders = pool.holders.get(first) ?? [];
    const isCached = pool.cached.has(first);
    if (!holders.length && isCached) return `Block ${first} is free, and its content is still cached.`;
    if (!holders.length) return `Block ${first} is free.`;
    const place = pool.tables.get(holders[0]).indexOf(first);
    const who = holders.slice(0, 5).map((seq) => `#${seq}`).join(", ");
    const others = holders.length > 5 ? ` and ${holders.length - 5} others` : "";
    const cached = isCached ? "; it is in the prefix cache" : "";
    return `Block ${first} is number ${place} in the table of ${who}${others}${cached}.`;
  }
}

// Update `list` to `rows`, and keep existing rows.
function reconcile(list, rows) {
  rows.forEach((row, i) => {
    const there = list.children[i];
    if (!there) list.append(row);
    else if (there.dataset.seq !== row.dataset.seq) there.replaceWith(row);
    else if (!there.isEqualNode(row)) {
      there.className = row.className;
      there.replaceChildren(...row.childNodes);
    }
  });
  while (list.children.length > rows.length) list.lastChild.remove();
}

// The colours of the legend, as computed by the browser from the style sheet.
function inks() {
  const colour = (id) => getComputedStyle(byId(id)).backgroundColor;
  const ink = getComputedStyle(byId("engine")).color;
  return { free: colour("key-free"), cached: colour("key-cached"), fresh: ink };
}
