// A message on the page, updated while it is streaming.

import { fileList, withFiles } from "./attachments.js";
import { canContinue, splitThinking } from "./chat.js";
import { duration, element, icon, iconButton, plural } from "./element.js";
import { fenced } from "./fence.js";
import { setOut } from "./json.js";
import { copyText, showMarkdown } from "./markdown.js";

// Arrows between the versions of a question, or between the answers to one.
class Versions {
  // `step` is called with -1 or 1.
  constructor(what, step) {
    this.earlier = iconButton("earlier", `Earlier ${what}`, () => step(-1));
    this.later = iconButton("later", `Later ${what}`, () => step(1));
    this.number = element("span", { class: "number" });
    this.node = element("span", { class: "versions", hidden: true }, this.earlier, this.number, this.later);
  }

  show(index, count) {
    this.node.hidden = count < 2;
    this.number.textContent = `${index + 1} of ${count}`;
    this.earlier.disabled = index === 0;
    this.later.disabled = index === count - 1;
  }

  // Focus the arrow of the direction `step`, or at the end the other one.
  focus(step) {
    const [wanted, other] = step < 0 ? [this.earlier, this.later] : [this.later, this.earlier];
    (wanted.disabled ? other : wanted).focus();
  }
}

export class UserMessage {
  // `actions` are {edit, step}: edit the question and send it again, or show another version of it.
  constructor(message, { edit, step }) {
    const copy = iconButton("copy", "Copy the question", () => copyText(message.content || withFiles(message), copy));
    const again = iconButton("edit", "Edit and ask again", edit);
    const files = message.attachments?.length ? [fileList(message.attachments)] : [];
    const text = message.content ? [element("div", { class: "text" }, message.content)] : [];
    this.versions = new Versions("version of the question", step);
    this.node = element(
      "article",
      { class: "message user", "aria-label": "You" },
      element("div", { class: "bubble" }, files, text),
      element("div", { class: "actions" }, copy, again, this.versions.node),
    );
  }

  update() {}
}

export class AssistantMessage {
  #shown = []; // last result of showMarkdown
  #isScheduled = false;

  // `actions` are {regenerate, proceed, step}: request another answer to the same question, continue
  // this one, or show another one.
  constructor(message, { regenerate, proceed, step }) {
    this.message = message;
    this.text = element("div", { class: "markdown" });
    this.thinking = element("div", { class: "thought" });
    this.summary = element("span");
    this.thoughts = element(
      "details",
      { class: "thinking", hidden: true },
      element("summary", {}, icon("chevron"), this.summary),
      this.thinking,
    );
    this.waiting = element("p", { class: "waiting" }, element("i"), element("i"), element("i"));
    this.note = element("p", { class: "note", hidden: true });
    this.timing = element("span", { class: "timing" });
    const answer = () => splitThinking(message.content).answer.trim();
    const copy = iconButton("copy", "Copy the answer", () => copyText(answer(), copy));
    const again = iconButton("again", "Answer again", regenerate);
    this.proceed = iconButton("proceed", "Continue this answer", proceed);
    this.versions = new Versions("answer", step);
    this.actions = element(
      "div",
      { class: "actions" },
      copy,
      again,
      this.proceed,
      this.versions.node,
      this.timing,
    );
    this.node = element(
      "article",
      { class: "message assistant", "aria-label": "Answer" },
      this.thoughts,
      this.text,
      this.waiting,
      this.note,
      this.actions,
    );
    this.show();
  }

  // Tokens may arrive faster than the screen refreshes.
  update() {
    if (this.#isScheduled) return;
    this.#isScheduled = true;
    requestAnimationFrame(() => {
      this.#isScheduled = false;
      this.show();
    });
  }

  show() {
    const { message } = this;
    const { state } = message;
    const isComing = state === "waiting" || state === "streaming";
    const split = splitThinking(message.content);
    const thinking = (message.thinking || split.thinking).trim();
    const text = split.answer.replace(/^\s+/, "");
    const answer = message.format === "json" && text ? jsonBlock(text, isComing) : text;
    this.#shown = showMarkdown(this.text, answer, this.#shown);
    this.thoughts.hidden = !thinking;
    this.thinking.textContent = thinking;
    this.summary.textContent = isComing && !answer ? "Thinking…" : "Reasoning";
    this.node.classList.toggle("coming", isComing);
    this.node.setAttribute("aria-busy", String(isComing)); // screen readers wait until it is complete
    this.waiting.hidden = !(isComing && !answer && !thinking && !message.notice);
    this.actions.hidden = isComing;
    this.proceed.hidden = !canContinue(message);
    this.#showNote(isComing, answer);
    this.timing.textContent = timingText(message);
  }

  #showNote(isComing, answer) {
    const text = noteText(this.message, answer);
    this.note.hidden = !text;
    this.note.className = this.message.state === "error" ? "note error" : "note";
    if (this.note.textContent !== text) this.note.textContent = text;
    this.note.setAttribute("role", this.message.state === "error" ? "alert" : "status");
  }
}

// Return JSON as a code block: unchanged while streaming, indented once it is complete. A server
// without structured output may send any text.
function jsonBlock(text, isComing) {
  return fenced(isComing ? text : setOut(text), "json");
}

function noteText({ state, notice, error, reason, timing }, answer) {
  if (notice) return notice;
  if (state === "error") return error;
  if (state === "stopped") return answer ? "Stopped." : "Stopped before the first word.";
  if (state !== "done") return "";
  if (reason === "length") return `Cut off at the limit, after ${plural(timing?.tokens ?? 0, "token")}.`;
  return answer ? "" : "The model had nothing to say.";
}

function timingText({ timing }) {
  if (!timing) return "";
  const { tokens, isExact, first, seconds } = timing;
  const parts = [`${isExact ? "" : "about "}${plural(tokens, "token")}`];
  // The first token took `first`, and the later ones took `seconds`. If all tokens arrived at once,
  // the rate is unknown.
  if (tokens > 1 && seconds > 0.005) {
    parts.push(`${Math.round((tokens - 1) / seconds).toLocaleString("en")} tokens/s`);
  }
  if (first !== undefined) parts.push(`first after ${duration(first)}`);
  return parts.join(" · ");
}
