// A message on the page, updated while it is streaming.

import { splitThinking } from "./chat.js";
import { duration, element, icon, iconButton, plural } from "./element.js";
import { setOut } from "./json.js";
import { copyText, showMarkdown } from "./markdown.js";

export class UserMessage {
  // `edit` is called to edit the question and send it again.
  constructor(message, edit) {
    const copy = iconButton("copy", "Copy the question", () => copyText(message.content, copy));
    const again = iconButton("edit", "Edit and ask again", edit);
    this.node = element(
      "article",
      { class: "message user", "aria-label": "You" },
      element("div", { class: "bubble" }, message.content),
      element("div", { class: "actions" }, copy, again),
    );
  }

  update() {}
}

export class AssistantMessage {
  #shown = []; // last result of showMarkdown
  #isScheduled = false;

  // `regenerate` is called to request another answer to the same question.
  constructor(message, regenerate) {
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
    this.actions = element("div", { class: "actions" }, copy, again, this.timing);
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
// without structured output may send any text, so the fence is longer than any run of backticks.
function jsonBlock(text, isComing) {
  const runs = text.match(/`+/g) ?? [];
  const fence = "`".repeat(1 + runs.reduce((most, run) => Math.max(most, run.length), 2));
  return `${fence}json\n${isComing ? text : setOut(text)}\n${fence}`;
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
