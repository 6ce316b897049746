// Markdown within a paragraph: code, emphasis, links, formulas. One pass from left to right, without regular
// expressions that backtrack, so the time is linear in the length of any text.

import { element } from "./element.js";
import { formulaAt, formulaNode } from "./formula.js";

const TAGS = { 1: ["em"], 2: ["strong"], 3: ["strong", "em"] };
const LONGEST_URL = 2000;

const isSpace = (character) => character === undefined || character.trim() === "";
const isWord = (character) => character !== undefined && /[\p{L}\p{N}]/u.test(character);

// Return a fragment with the rendered `text`.
export function inline(text) {
  const reader = new InlineReader(text);
  reader.read();
  const fragment = document.createDocumentFragment();
  for (const node of reader.nodes) fragment.append(node);
  return fragment;
}

class InlineReader {
  // Delimiters are text nodes until a matching one is found.
  nodes = [];
  #open = new Map(); // open delimiters, with their positions in `nodes`
  #from = 0; // position in the text from which no node was made yet
  #backticks = null; // positions of runs of backticks, by length

  constructor(text) {
    this.text = text;
  }

  read() {
    const { text } = this;
    let at = 0;
    while (at < text.length) at = this.#step(at) ?? at + 1;
    this.#flush(text.length);
  }

  // Parse an element at `at`: return the position after it, or undefined if it is plain text.
  #step(at) {
    const { text } = this;
    switch (text[at]) {
      case "\\":
        return this.#formula(at) ?? this.#escape(at);
      case "$":
        return this.#formula(at);
      case "`":
        return this.#code(at);
      case "*":
      case "_":
      case "~":
        return this.#emphasis(at);
      case "[":
        this.#flush(at);
        this.#opener("[", at, at + 1);
        return at + 1;
      case "]":
        return this.#link(at);
      case "h":
        return this.#address(at);
    }
  }

  #flush(end) {
    if (end > this.#from) this.nodes.push(document.createTextNode(this.text.slice(this.#from, end)));
    this.#from = end;
  }

  #opener(kind, at, end) {
    this.#open.set(kind, this.nodes.length);
    this.nodes.push(document.createTextNode(this.text.slice(at, end)));
    this.#from = end;
  }

  #escape(at) {
    if (!/[!-/:-@[-`{-~]/.test(this.text[at + 1] ?? "")) return undefined;
    this.#flush(at);
    this.#from = at + 1;
    return at + 2;
  }

  #formula(at) {
    const found = formulaAt(this.text, at);
    if (!found) return undefined;
    this.#flush(at);
    this.nodes.push(formulaNode(found));
    this.#from = found.end;
    return found.end;
  }

  #code(at) {
    const end = this.#endOfRun(at);
    const closing = this.#nextBackticks(end - at, end);
    if (closing === undefined) return end;
    this.#flush(at);
    let code = this.text.slice(end, closing).replaceAll("\n", " ");
    if (code.trim() && code.startsWith(" ") && code.endsWith(" ")) code = code.slice(1, -1);
    this.nodes.push(element("code", {}, code));
    this.#from = closing + end - at;
    return this.#from;
  }

  // Each position is examined once: earlier ones are removed.
  #nextBackticks(length, from) {
    this.#backticks ??= this.#findBackticks();
    const places = this.#backticks.get(length);
    while (places.next < places.length && places[places.next] < from) places.next++;
    return places[places.next];
  }

  #findBackticks() {
    const found = new Map();
    for (let at = this.text.indexOf("`"); at >= 0; ) {
      const end = this.#endOfRun(at);
      if (!found.has(end - at)) found.set(end - at, Object.assign([], { next: 0 }));
      found.get(end - at).push(at);
      at = this.text.indexOf("`", end);
    }
    return found;
  }

  #endOfRun(at) {
    let end = at + 1;
    while (this.text[end] === this.text[at]) end++;
    return end;
  }

  #emphasis(at) {
    const { text } = this;
    const end = this.#endOfRun(at);
    const kind = text.slice(at, Math.min(end, at + 4));
    if (kind.length > 3 || (text[at] === "~" && kind !== "~~")) return end;
    const [before, after] = [text[at - 1], text[end]];
    const inWord = text[at] === "_" && isWord(before) && isWord(after);
    if (!isSpace(before) && !inWord && this.#close(kind, at, end)) return end;
    if (!isSpace(after) && !inWord && !this.#open.has(kind)) {
      this.#flush(at);
      this.#opener(kind, at, end);
    }
    return end;
  }

  #close(kind, at, end) {
    if (this.#open.has(kind)) {
      this.#flush(at);
      const tags = kind === "~~" ? ["del"] : TAGS[kind.length];
      this.#wrap(kind, () => tags.map((tag) => element(tag)));
    } else if (kind.length === 3 && this.#open.has(kind[0]) && this.#open.has(kind.slice(1))) {
      this.#flush(at);
      const inner = this.#open.get(kind[0]) > this.#open.get(kind.slice(1)) ? 1 : 2;
      for (const length of [inner, 3 - inner]) {
        this.#wrap(kind.slice(0, length), () => TAGS[length].map((tag) => element(tag)));
      }
    } else {
      return false;
    }
    this.#from = end;
    return true;
  }

  // All nodes after an opener move into the elements that replace it. The nesting is at most as deep
  // as there are kinds of openers.
  #wrap(kind, make) {
    const at = this.#open.get(kind);
    const inside = this.nodes.splice(at);
    const made = make();
    made.reduce((outer, inner) => (outer.append(inner), inner));
    for (const node of inside.slice(1)) made.at(-1).append(node);
    this.nodes.push(made[0]);
    for (const [other, place] of this.#open) if (place >= at) this.#open.delete(other);
  }

  #link(at) {
    if (!this.#open.has("[")) return undefined;
    const near = this.text.slice(at + 1, at + 1 + LONGEST_URL);
    const length = near.startsWith("(") ? near.indexOf(")") : -1;
    const url = length > 0 ? webAddress(near.slice(1, length).trim()) : null;
    if (!url) {
      this.#open.delete("[");
      return undefined;
    }
    this.#flush(at);
    this.#wrap("[", () => [anchor(url)]);
    this.#from = at + 2 + length;
    return this.#from;
  }

  // An address without brackets around it.
  #address(at) {
    if (isWord(this.text[at - 1]) || this.#open.has("[")) return undefined;
    const near = this.text.slice(at, at + 8);
    if (!near.startsWith("http://") && near !== "https://") return undefined;
    const [found] = this.text.slice(at, at + LONGEST_URL).match(/^[^\s<>"`*[\]{}|\\^]+/);
    const shown = found.replace(/[.,;:!?)'~_]$/, "");
    const url = webAddress(shown);
    if (!url) return undefined;
    this.#flush(at);
    const made = anchor(url);
    made.append(shown);
    this.nodes.push(made);
    this.#from = at + shown.length;
    return this.#from;
  }
}

// Only http(s) addresses become links: a `javascript:` or `data:` address stays text.
function webAddress(text) {
  if (!/^https?:\/\//i.test(text)) return null;
  try {
    return new URL(text).href;
  } catch {
    return null;
  }
}

function anchor(href) {
  return element("a", { href, target: "_blank", rel: "noopener noreferrer" });
}
