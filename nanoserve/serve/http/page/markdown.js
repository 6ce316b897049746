// Markdown as DOM nodes: paragraphs, headings, lists, quotes, fenced code, tables, rules, formulas. Text
// arrives while it is shown, so only changed blocks are rendered again: the cost of an answer is not
// quadratic in its length, and selected text stays selected.

import { element, iconButton } from "./element.js";
import { coloured } from "./highlight.js";
import { inline } from "./inline.js";

const DEEPEST = 6; // levels of quotes and lists; deeper ones are text

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/;
const QUOTE = /^ {0,3}>/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +|$)/;
const DIVIDER = /^[ \t|:-]+$/;
const FORMULA = /^ {0,3}(\$\$|\\\[)(.*)$/;
const LONGEST_FORMULA = 40; // lines

// Show `text` in `container`. `keep` is the last result of this function for the container.
export function showMarkdown(container, text, keep = []) {
  const blocks = blocksOf(text.split("\n"));
  const isSame = (block, i) => block.source === keep[i]?.source && block.kind === keep[i].kind;
  const changed = blocks.findIndex((block, i) => !isSame(block, i));
  const first = changed < 0 ? blocks.length : changed;
  while (container.children.length > first) container.lastChild.remove();
  for (const block of blocks.slice(first)) container.append(nodeOf(block));
  return blocks.map(({ source, kind }) => ({ source, kind }));
}

// ---------------------------------------------------------------- lines to blocks

function blocksOf(lines, depth = 0) {
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (lines[at].trim() === "") {
      at++;
      continue;
    }
    const [block, end] = blockAt(lines, at, depth);
    blocks.push({ ...block, source: lines.slice(at, end).join("\n") });
    at = end;
  }
  return blocks;
}

// Return the block that begins at line `at`, and the number of the line after it.
function blockAt(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return codeAt(lines, at, fence);
  const formula = formulaEnd(lines, at);
  if (formula) return [{ kind: "paragraph", text: lines.slice(at, formula).join("\n") }, formula];
  const heading = HEADING.exec(line);
  if (heading) return [{ kind: "heading", level: heading[1].length, text: heading[2] ?? "" }, at + 1];
  if (isRule(line)) return [{ kind: "rule" }, at + 1];
  if (depth < DEEPEST && QUOTE.test(line)) return quoteAt(lines, at, depth);
  if (depth < DEEPEST && ITEM.test(line)) return listAt(lines, at, depth);
  if (line.includes("|") && isDivider(lines[at + 1])) return tableAt(lines, at);
  let end = at + 1;
  while (end < lines.length && !endsParagraph(lines, end, depth)) end++;
  return [{ kind: "paragraph", text: lines.slice(at, end).join("\n") }, end];
}

function endsParagraph(lines, at, depth) {
  const line = lines[at];
  if (line.trim() === "" || FENCE.test(line) || HEADING.test(line) || isRule(line)) return true;
  if (formulaEnd(lines, at)) return true;
  return depth < DEEPEST && (QUOTE.test(line) || ITEM.test(line));
}

function isRule(line) {
  const marks = line.replaceAll(" ", "");
  return marks.length > 2 && "-*_".includes(marks[0]) && marks === marks[0].repeat(marks.length);
}

// Return the number of the line after a formula of several lines, which may look like a list, or 0.
function formulaEnd(lines, at) {
  const [, opening, rest] = FORMULA.exec(lines[at]) ?? [];
  if (!opening) return 0;
  const closing = opening === "$$" ? "$$" : "\\]";
  if (rest.includes(closing)) return 0; // it is in one line
  const end = lines.slice(at + 1, at + LONGEST_FORMULA).findIndex((line) => line.includes(closing));
  return end < 0 ? 0 : at + 2 + end;
}

// An open fence contains all following lines: its end has not arrived yet.
function codeAt(lines, at, [, fence, info]) {
  let end = at + 1;
  const closes = (line) => line.trim().startsWith(fence) && line.trim().replaceAll(fence[0], "") === "";
  while (end < lines.length && !closes(lines[end])) end++;
  const code = lines.slice(at + 1, end).join("\n");
  return [{ kind: "code", code, language: info.trim().split(" ")[0] }, Math.min(end + 1, lines.length)];
}

function quoteAt(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end++;
  const inside = lines.slice(at, end).map((line) => line.replace(/^ {0,3}> ?/, ""));
  return [{ kind: "quote", blocks: blocksOf(inside, depth + 1) }, end];
}

function listAt(lines, at, depth) {
  const isOrdered = /^ *\d/.test(lines[at]);
  const indent = ITEM.exec(lines[at])[1].length;
  const items = [];
  let isLoose = false;
  let end = at;
  while (end < lines.length) {
    const mark = ITEM.exec(lines[end]);
    if (!mark || mark[1].length < indent || mark[1].length > indent + 3) break;
    if (/^ *\d/.test(lines[end]) !== isOrdered || isRule(lines[end])) break;
    const [inside, next] = itemAt(lines, end, mark, depth);
    items.push(blocksOf(inside, depth + 1));
    isLoose ||= next < lines.length && lines[next - 1].trim() === "" && ITEM.test(lines[next]);
    end = next;
  }
  const start = isOrdered ? Number.parseInt(lines[at].trim(), 10) : null;
  return [{ kind: "list", isOrdered, isLoose, start, items }, end];
}

// Return the lines of one item, without their indentation, and the number of the line after it.
function itemAt(lines, at, mark, depth) {
  const width = mark[0].trim() === mark[0].trimEnd() ? mark[0].length : mark[0].trimEnd().length + 1;
  const inside = [lines[at].slice(width)];
  let end = at + 1;
  for (; end < lines.length; end++) {
    const line = lines[end];
    const indent = line.length - line.trimStart().length;
    const follows = lines[end - 1].trim() !== "" && !endsParagraph(lines, end, depth);
    if (line.trim() !== "" && indent <= mark[1].length && !follows) break;
    inside.push(line.slice(Math.min(indent, width)));
  }
  return [inside, end];
}

function isDivider(line) {
  return line !== undefined && line.includes("-") && line.includes("|") && DIVIDER.test(line);
}

function tableAt(lines, at) {
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end++;
  const [head, divider, ...body] = lines.slice(at, end).map(cellsOf);
  const sideOf = (cell) => (cell.startsWith(":") ? "center" : "right");
  const sides = divider.map((cell) => (cell.endsWith(":") ? sideOf(cell) : "left"));
  return [{ kind: "table", head, sides, body }, end];
}

function cellsOf(line) {
  const cells = line.trim().split("|").map((cell) => cell.trim());
  if (cells[0] === "") cells.shift();
  if (cells.at(-1) === "") cells.pop();
  return cells;
}

// ---------------------------------------------------------------- blocks to nodes

function nodeOf(block) {
  switch (block.kind) {
    case "heading":
      return element(`h${Math.min(6, block.level + 1)}`, {}, inline(block.text)); // the page has an h1
    case "rule":
      return element("hr");
    case "code":
      return codeNode(block);
    case "quote":
      return element("blockquote", {}, block.blocks.map(nodeOf));
    case "list":
      return listNode(block);
    case "table":
      return tableNode(block);
    default:
      return element("p", {}, inline(block.text));
  }
}

function listNode({ isOrdered, isLoose, start, items }) {
  const made = element(isOrdered ? "ol" : "ul", isOrdered && start !== 1 ? { start } : {});
  const isTight = (block) => !isLoose && block.kind === "paragraph";
  for (const blocks of items) {
    const nodes = blocks.map((block) => (isTight(block) ? inline(block.text) : nodeOf(block)));
    made.append(element("li", {}, nodes));
  }
  return made;
}

function tableNode({ head, sides, body }) {
  const row = (cells, tag) =>
    element("tr", {}, cells.map((cell, i) => element(tag, { class: sides[i] ?? "left" }, inline(cell))));
  const rows = body.map((cells) => row(cells, "td"));
  const table = element("table", {}, element("thead", {}, row(head, "th")), element("tbody", {}, rows));
  return element("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "Table" }, table);
}

function codeNode({ code, language }) {
  const copy = iconButton("copy", "Copy this code", () => copyText(code, copy));
  const head = element("div", { class: "code-head" }, element("span", {}, language || "text"), copy);
  const pre = element("pre", { tabindex: "0" }, element("code", {}, coloured(code, language)));
  return element("div", { class: "code" }, head, pre);
}

// Copy `text` to the clipboard; the button shows the result.
export async function copyText(text, button) {
  const before = button.getAttribute("aria-label");
  let result = "Copied";
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    result = "The browser did not allow it";
  }
  button.dataset.result = result;
  button.setAttribute("aria-label", result);
  setTimeout(() => {
    delete button.dataset.result;
    button.setAttribute("aria-label", before);
  }, 1500);
}
