// Formulas in LaTeX. Temml (temml.min.js, version 0.13.5 as published, temml.LICENSE) converts them to
// MathML, which browsers display; it is loaded with the first formula. Until a formula is converted, and
// if it cannot be, its source is shown. The nodes are made here: no attribute of a formula can load, link
// or run anything.

import { element } from "./element.js";

const LONGEST = 2000; // characters of a formula; longer ones stay text
const LONGEST_INLINE = 400; // between two single $, which may also be currency
const MOST_KEPT = 500; // converted formulas
const TURN = 8; // milliseconds of conversion between which the page can do other things
const OPTIONS = { throwOnError: true, trust: false, maxExpand: 200, maxSize: [20, 200] };

const MATHML = "http://www.w3.org/1998/Math/MathML";
const TAG = /^(?:m[a-z]{1,14}|none|semantics)$/;
const ATTRIBUTES = new Set(
  ("accent accentunder align columnalign columnlines columnspacing columnspan depth dir display displaystyle fence form " +
    "height largeop linebreak linethickness lspace mathbackground mathcolor mathsize mathvariant maxsize minsize " +
    "movablelimits notation rowlines rowspacing rowspan rspace scriptlevel separator stretchy symmetric voffset width").split(" "),
);

const kept = new Map(); // converted formulas by source, oldest first; null if one cannot be converted
const waiting = []; // nodes whose formulas are not converted yet
let library = null; // a promise
let isScheduled = false;

// Find a formula at `at`: return {source, isDisplay, end}, or null.
export function formulaAt(text, at) {
  const two = text.slice(at, at + 2);
  const closing = { "\\(": "\\)", "\\[": "\\]", $$: "$$" }[two];
  if (closing) {
    const end = closingAt(text, closing, at + 2, at + LONGEST);
    return end < 0 ? null : { source: text.slice(at + 2, end).trim(), isDisplay: two !== "\\(", end: end + 2 };
  }
  return two[0] === "$" ? dollarAt(text, at) : null;
}

function closingAt(text, closing, from, most) {
  const end = text.slice(from, most).indexOf(closing);
  return end < 0 || !text.slice(from, from + end).trim() ? -1 : from + end;
}

// Between single dollars, as in "$x + 1$", but not in "from $5 to $6" or "$HOME/$USER".
function dollarAt(text, at) {
  if (/[\w$\\]/.test(text[at - 1] ?? "") || /[\s$]/.test(text[at + 1] ?? " ")) return null;
  const line = text.slice(at + 1, at + LONGEST_INLINE).split("\n", 1)[0];
  const length = line.search(/(?<!\\)\$/); // LaTeX has no $ within a formula
  const isEnd = length > 0 && !/\s/.test(line[length - 1]) && !/[\w$]/.test(text[at + 2 + length] ?? "");
  return isEnd ? { source: line.slice(0, length), isDisplay: false, end: at + 2 + length } : null;
}

// Return an element with the formula, at once if it is known.
export function formulaNode({ source, isDisplay }) {
  const node = element("span", { class: isDisplay ? "formula display" : "formula" });
  const known = kept.get(keyOf(source, isDisplay));
  if (known) {
    node.append(known.cloneNode(true));
    return node;
  }
  node.append(element("code", {}, source));
  if (known === undefined) {
    waiting.push([node, source, isDisplay]);
    schedule();
  }
  return node;
}

const keyOf = (source, isDisplay) => `${isDisplay ? "block" : "inline"} ${source}`;

function schedule() {
  if (isScheduled) return;
  isScheduled = true;
  library ??= loaded();
  library.then((temml) => setTimeout(convert, 0, temml), () => (waiting.length = 0));
}

function loaded() {
  const script = element("script", { src: new URL("temml.min.js", import.meta.url).href });
  const made = new Promise((resolve, reject) => {
    script.addEventListener("load", () => resolve(window.temml));
    script.addEventListener("error", reject);
  });
  document.head.append(script);
  return made;
}

function convert(temml) {
  isScheduled = false;
  const end = performance.now() + TURN;
  while (waiting.length && performance.now() < end) {
    const [node, source, isDisplay] = waiting.shift();
    if (!node.isConnected) continue; // replaced by a newer one, while the text was coming
    const key = keyOf(source, isDisplay);
    if (!kept.has(key)) keep(key, converted(temml, source, isDisplay));
    const known = kept.get(key);
    if (known) node.replaceChildren(known.cloneNode(true));
  }
  if (waiting.length) schedule();
}

function keep(key, node) {
  kept.set(key, node);
  if (kept.size > MOST_KEPT) kept.delete(kept.keys().next().value);
}

function converted(temml, source, displayMode) {
  try {
    return nodeOf(temml.__renderToMathMLTree(source, { ...OPTIONS, displayMode }));
  } catch {
    return null; // not LaTeX, or not all of it yet
  }
}

function nodeOf({ type, text, children = [], attributes = {}, classes = [], style = {} }) {
  if (typeof text === "string") return document.createTextNode(text);
  const isElement = TAG.test(type ?? "");
  const made = isElement ? document.createElementNS(MATHML, type) : document.createDocumentFragment();
  for (const child of children) made.append(nodeOf(child));
  if (!isElement) return made;
  for (const [name, value] of Object.entries(attributes)) {
    if (ATTRIBUTES.has(name)) made.setAttribute(name, value);
    else if (name === "style") made.style.cssText = harmless(value);
  }
  for (const [name, value] of Object.entries(style)) made.style[name] = harmless(value);
  if (classes.length) made.setAttribute("class", classes.filter(Boolean).join(" "));
  return made;
}

const harmless = (value) => (/url|@|\\/i.test(value) ? "" : value);
