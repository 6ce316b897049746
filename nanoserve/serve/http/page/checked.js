// Conversations from outside of this page: from the browser's storage, where another version or another
// program may have written, and from files. Only known members of the right type are taken over.

import { grow, wrongTree } from "./tree.js";

const ROLES = ["user", "assistant"];
const STATES = ["done", "stopped", "error"];

const isText = (value) => typeof value === "string";
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const isCount = (value) => Number.isFinite(value) && value >= 0;

// Return a copy of a conversation, or throw an `Error` that says what is wrong with it.
export function checked(found) {
  if (!isObject(found)) throw new Error("it is not an object");
  for (const name of ["id", "title"]) if (!isText(found[name])) throw new Error(`${name} is not a text`);
  if (!Array.isArray(found.messages)) throw new Error("messages is not a list");
  const messages = found.messages.map((message, i) => checkedMessage(message, `messages[${i}]`));
  const { id, title, leaf = null } = found;
  const changed = isCount(found.changed) ? found.changed : 0;
  const copy = grow({ id, title, isNamed: found.isNamed === true, changed, messages, leaf });
  const wrong = wrongTree(copy);
  if (wrong) throw new Error(wrong);
  return copy;
}

function checkedMessage(message, where) {
  if (!isObject(message)) throw new Error(`${where} is not an object`);
  if (!ROLES.includes(message.role)) throw new Error(`${where}.role is neither user nor assistant`);
  if (!isText(message.content)) throw new Error(`${where}.content is not a text`);
  const { role, content, id, parent } = message;
  const own = role === "user" ? question(message, where) : answer(message);
  return { role, content, ...(id === undefined ? {} : { id, parent: parent ?? null }), ...own };
}

function question({ attachments }, where) {
  if (attachments === undefined) return {};
  const isFile = (file) => isObject(file) && isText(file.name) && isText(file.text);
  if (!Array.isArray(attachments) || !attachments.every(isFile)) {
    throw new Error(`${where}.attachments is not a list of {name, text}`);
  }
  return { attachments: attachments.map(({ name, text }) => ({ name, text })) };
}

// What is only shown beside an answer is left out if it has another form.
function answer(message) {
  const { state, reason, error, format, timing, context } = message;
  const own = { thinking: isText(message.thinking) ? message.thinking : "" };
  own.state = STATES.includes(state) ? state : "stopped"; // an answer that was coming has ended
  if (isText(reason)) own.reason = reason;
  if (isText(error)) own.error = error;
  if (format === "json") own.format = format;
  if (isCount(context)) own.context = context;
  if (isObject(timing) && isCount(timing.tokens)) {
    own.timing = { tokens: timing.tokens, isExact: timing.isExact === true };
    for (const name of ["first", "seconds"]) if (isCount(timing[name])) own.timing[name] = timing[name];
  }
  return own;
}
