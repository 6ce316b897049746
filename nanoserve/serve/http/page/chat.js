// An answer, from the request to its last token.
//
// The message of an answer is {role: "assistant", content, thinking, state, ...}. `state` is
// "waiting" (nothing was received), "streaming", "done", "stopped" (by the user) or "error" (with
// `error`, a string). `format` is "json" if a schema was set. `notice` describes a wait, if any.
// `reason` is the server's finish reason, `timing` is {first, seconds, tokens, isExact}: seconds to
// the first token, seconds from there to the last token, and the number of tokens. `context` is the
// number of tokens of prompt and answer together, as the server counts them.

import { ApiError, ask } from "./api.js";
import { withFiles } from "./attachments.js";
import { eventsOf } from "./sse.js";

const MOST_RETRIES = 3; // of a server that is busy
const LONGEST_WAIT = 60; // seconds; after a longer Retry-After the request fails at once

export class Answer {
  #controller = new AbortController();
  #times = { sent: 0, first: 0, last: 0, pieces: 0 };

  // `changed` is called after every change of the message. An answer that has text is continued.
  constructor(message, changed) {
    this.message = message;
    this.changed = changed;
    this.before = message.timing ?? { tokens: 0, seconds: 0, isExact: true };
    this.counted = null; // tokens of this part, if the server counts them
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
    if (usage) {
      this.counted = usage.completion_tokens;
      message.context = usage.prompt_tokens + usage.completion_tokens;
    }
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
    const { before } = this;
    const { sent, first, last, pieces } = this.#times;
    if (!first) return;
    this.message.timing = {
      tokens: before.tokens + (this.counted ?? pieces),
      isExact: before.isExact && this.counted !== null,
      first: before.first ?? (first - sent) / 1000,
      seconds: (before.seconds ?? 0) + (last - first) / 1000,
    };
  }
}

// Return the messages of a request for an answer to the last one of `path`. Reasoning is left out, as
// in the templates of reasoning models, and so are empty answers.
export function messagesOf(path, system) {
  const said = (message) =>
    message.role === "user" ? withFiles(message) : splitThinking(message.content).answer.trim();
  const messages = path
    .map((message) => ({ role: message.role, content: said(message) }))
    .filter(({ role, content }) => role === "user" || content);
  return system ? [{ role: "system", content: system }, ...messages] : messages;
}

// Return the members of a request that continues the last message of `path`, an answer, as it is.
export function continuationOf(path, system) {
  const answer = { role: "assistant", content: path.at(-1).content };
  const messages = [...messagesOf(path.slice(0, -1), system), answer];
  return { messages, continue_final_message: true, add_generation_prompt: false };
}

// An answer can be continued if it is a plain text that ended too early. A continued reasoning or JSON
// would begin anew: the server does not see what it has of it.
export function canContinue({ state, reason, content, thinking, format }) {
  const isCut = state === "stopped" || state === "error" || (state === "done" && reason === "length");
  return isCut && content.trim() !== "" && !thinking && !format && !content.includes("think>");
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
