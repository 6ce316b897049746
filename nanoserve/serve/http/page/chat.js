// One answer, from the question to its last token.
//
// The message of an answer is {role: "assistant", content, thinking, state, ...}. `state` is
// "waiting" (nothing has come), "streaming", "done", "stopped" (by the reader) or "error" (with
// `error`, a text). `format` is "json" if it was asked for by a schema. `notice` says what is being
// waited for. `reason` is the server's finish reason, `timing` is {first, seconds, tokens, isExact}:
// seconds to the first token, from there to the last, and how many there were.

import { ApiError, ask } from "./api.js";
import { eventsOf } from "./sse.js";

const MOST_RETRIES = 3; // of a server that is busy
const LONGEST_WAIT = 60; // seconds; a server that asks for more is believed at once

export class Answer {
  #controller = new AbortController();
  #times = { sent: 0, first: 0, last: 0, pieces: 0 };

  // `changed` is called whenever the message has changed.
  constructor(message, changed) {
    this.message = message;
    this.changed = changed;
  }

  // Closing the connection is what ends a request on the server.
  stop() {
    this.#controller.abort();
  }

  // Resolves when it is over, however it ended; the message says how.
  async run(body) {
    const { message } = this;
    try {
      const response = await this.#send(body);
      message.notice = null;
      const isWhole = await this.#read(response.body);
      if (!isWhole) throw new ApiError("The server ended the answer before its end.");
      message.state = "done";
    } catch (error) {
      this.#fail(error);
    }
    this.#time();
    message.notice = null;
    this.changed();
  }

  // A server that is busy says when to come again.
  async #send(body) {
    const { signal } = this.#controller;
    for (let retries = 0; ; retries++) {
      try {
        this.#times.sent = performance.now();
        return await ask("v1/chat/completions", { body, signal });
      } catch (error) {
        const { status, retryAfter } = error;
        const canWait = Number.isFinite(retryAfter) && retryAfter <= LONGEST_WAIT;
        if (![429, 503].includes(status) || !canWait || retries === MOST_RETRIES) throw error;
        await this.#wait(error.message, Math.ceil(retryAfter));
      }
    }
  }

  async #wait(reason, seconds) {
    for (let left = seconds; left > 0; left--) {
      this.message.notice = `${reason} Trying again in ${left} s.`;
      this.changed();
      await sleep(1000, this.#controller.signal);
    }
    this.message.notice = `${reason} Trying again.`;
    this.changed();
  }

  // Whether the answer came to its end.
  async #read(body) {
    let isWhole = false; // reading on to the end leaves the connection for the next request
    for await (const { data } of eventsOf(body)) {
      if (data === "[DONE]") isWhole = true;
      else this.#take(JSON.parse(data));
    }
    return isWhole;
  }

  #take({ error, choices, usage }) {
    const { message } = this;
    if (error) throw new ApiError(error.message ?? String(error));
    const choice = choices?.[0];
    const content = choice?.delta?.content ?? "";
    const thinking = choice?.delta?.reasoning_content ?? choice?.delta?.reasoning ?? "";
    if (content || thinking) {
      this.#times.last = performance.now();
      this.#times.first ||= this.#times.last;
      this.#times.pieces++;
      message.state = "streaming";
      message.content += content;
      message.thinking += thinking;
    }
    if (choice?.finish_reason) message.reason = choice.finish_reason;
    if (usage) message.timing = { tokens: usage.completion_tokens, isExact: true };
    this.changed();
  }

  #fail(error) {
    const { message } = this;
    if (this.#controller.signal.aborted) {
      message.state = "stopped";
      return;
    }
    message.state = "error";
    const isOurs = error instanceof ApiError;
    message.error = isOurs ? error.message : "The connection to the server was lost.";
    if (!isOurs) console.warn(error);
  }

  // Without the server's count, the pieces that came are nearly as many as the tokens.
  #time() {
    const { sent, first, last, pieces } = this.#times;
    if (!first) return;
    const counted = this.message.timing ?? { tokens: pieces, isExact: false };
    this.message.timing = { ...counted, first: (first - sent) / 1000, seconds: (last - first) / 1000 };
  }
}

// The messages of a request. What a model has thought is not shown to it again, as the templates of
// the models that think have it; nor are answers in which nothing came.
export function messagesOf(conversation, system) {
  const said = ({ role, content }) => (role === "user" ? content : splitThinking(content).answer.trim());
  const told = conversation.messages
    .map((message) => ({ role: message.role, content: said(message) }))
    .filter(({ role, content }) => role === "user" || content);
  return system ? [{ role: "system", content: system }, ...told] : told;
}

// Some servers send what a model thinks as part of its text. A template may have written "<think>".
export function splitThinking(text) {
  const open = text.trimStart().startsWith("<think>");
  const end = text.indexOf("</think>");
  if (!open && end < 0) return { thinking: "", answer: text, isThinking: false };
  const start = open ? text.indexOf("<think>") + "<think>".length : 0;
  if (end < 0) return { thinking: text.slice(start), answer: "", isThinking: true };
  return { thinking: text.slice(start, end), answer: text.slice(end + "</think>".length), isThinking: false };
}

function sleep(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    if (signal.aborted) reject(signal.reason);
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    }, { once: true });
  });
}
