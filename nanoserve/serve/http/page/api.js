// Requests to the server of this page, and its error messages.

import { apiKey, setApiKey } from "./storage.js";

export class ApiError extends Error {
  // retryAfter: seconds, if the server has sent them.
  constructor(message, status = 0, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

let askForKey = async () => null;
let asking = null;

// `ask(wasWrong)` resolves with a key, or with null if the user enters none.
export function onKeyNeeded(ask) {
  askForKey = ask;
}

// Return the response, or throw its error. Paths are relative, so the page works behind a prefix.
export async function ask(path, options = {}) {
  for (;;) {
    const key = apiKey();
    const response = await send(path, options, key);
    if (response.ok) return response;
    const error = await errorOf(response);
    if (response.status !== 401 || !(await newKey(key, options.signal))) throw error;
  }
}

async function send(path, { body, signal }, key) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  if (body) headers["Content-Type"] = "application/json";
  const method = body ? "POST" : "GET";
  try {
    const content = body && JSON.stringify(body);
    return await fetch(path, { method, headers, signal, body: content, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Is it still running?");
  }
}

// Return true if there is another key to try. Concurrent requests share one dialog.
async function newKey(refused, signal) {
  if (apiKey() !== refused) return true;
  asking ??= askForKey(Boolean(refused)).finally(() => (asking = null));
  const key = await asking;
  if (!key || signal?.aborted) return false;
  setApiKey(key);
  return true;
}

async function errorOf(response) {
  const text = await response.text().catch(() => "");
  const seconds = Number.parseFloat(response.headers.get("Retry-After"));
  return new ApiError(messageIn(text) ?? `The server answers with status ${response.status}.`,
    response.status, Number.isFinite(seconds) ? Math.max(0, seconds) : null);
}

// Return the message in OpenAI's format, {"error": {"message": ...}}, or another one in the body.
function messageIn(text) {
  try {
    const { error, detail } = JSON.parse(text);
    const message = error?.message ?? error ?? detail;
    return typeof message === "string" ? message : null;
  } catch {
    return null;
  }
}
