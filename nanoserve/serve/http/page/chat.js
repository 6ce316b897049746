// An answer, from the request to its last token.
//
// The message of an answer is {role: "assistant", content, thinking, state, ...}. `state` is
// "waiting" (nothing was received), "streaming", "done", "stopped" (by the user) or "error" (with
// `error`, a string). `format` is "json" if a schema was set. `notice` describes a wait, if any.
// `reason` is the server's finish reason, `timing` is {first, seconds, tokens, isExact}: seconds to
// the first token, seconds from there to the last token, and the number of tokens.

import { ApiError, ask } from "./api.js";
import { eventsOf } from "./sse.js";

const MOST_RETRIES = 3; // of a server that is busy
const LONGEST_WAIT = 60; // seconds; after a longer Retry-After the request fails at once

export class Answer {
  #controller = new AbortController();
  #times = { sent: 0, first: 0, last: 0, pieces: 0 };

  // `changed` is called after every change of the message.
  constructor(message, changed) {
    this.message = message;
    this.changed = changed;
  }

  // Closing the connection aborts the request on the server.
  stop() {
    this.#controller.abort();
  }

  // Resolves at the end of the answer, also after an error, which the message then contains.
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

  // A busy server sends the time after which to try again.
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

  // Resolves with true if the answer is complete.
  async #read(body) {
    let isWhole = false; // read to the end, so that the connection can be reused
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

  // Without the server's count, use the number of events, which is close to that of tokens.
  #time() {
    const { sent, first, last, pieces } = this.#times;
    if (!first) return;
    const counted = this.message.timing ?? { tokens: pieces, isExact: false };
    this.message.timing = { ...counted, first: (first - sent) / 1000, seconds: (last - first) / 1000 };
  }
}

// Return the messages of a request. Reasoning is left out, as in the templates of reasoning models,
// and so are empty answers.
export function messagesOf(conversation, system) {
  const said = ({ role, content }) => (role === "user" ? content : splitThinking(content).answer.trim());
  const messages = conversation.messages
    .map((message) => ({ role: message.role, content: said(message) }))
    .filter(({ role, content }) => role === "user" || content);
  return system ? [{ role: "system", content: system }, ...messages] : messages;
}

// Some servers send reasoning as part of the text. The template may have opened "<think>" already.
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
