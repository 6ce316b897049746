// How full the context of the model is, below the input field.

import { byId, plural } from "./element.js";

const NEARLY_FULL = 0.8;

// Return what is known after the last answer of `path` that the server has counted: {used, text, level},
// or null. `length` is the context length in tokens, or null.
export function contextOf(path, length) {
  const used = path.findLast(({ context }) => context)?.context;
  if (!used) return null;
  if (!length) return { used, level: "", text: `${plural(used, "token")} of context used` };
  const text = `${used.toLocaleString("en")} of ${plural(length, "token")} of context used`;
  if (used >= length) return { used, level: "full", text: `${text}: it is full. Begin a new conversation.` };
  const level = used >= NEARLY_FULL * length ? "nearly" : "";
  return { used, level, text: level ? `${text}: nearly full` : text };
}

export function showContext(path, length) {
  const found = contextOf(path, length);
  byId("context").hidden = !found;
  if (!found) return;
  byId("context").className = found.level;
  byId("context-text").textContent = found.text;
  const meter = byId("context-meter");
  meter.hidden = !length;
  meter.setAttribute("aria-valuemax", length ?? found.used);
  meter.setAttribute("aria-valuenow", Math.min(found.used, length ?? found.used));
  meter.firstElementChild.style.width = `${Math.min(100, (100 * found.used) / (length ?? 1))}%`;
}
