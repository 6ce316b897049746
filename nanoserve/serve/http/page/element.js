// Creation of DOM nodes, with text always as text. Nothing on the page parses a string as HTML, so
// that text from a model or from other people cannot become markup or a script.

export const byId = (id) => document.getElementById(id);

// `attributes` may hold listeners (onclick: ...) and flags (disabled: true); children may be
// strings, and lists of children.
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null) made.setAttribute(name, value);
  }
  for (const child of children.flat()) made.append(child);
  return made;
}

// One of the symbols in index.html.
export function icon(name) {
  const namespace = "http://www.w3.org/2000/svg";
  const made = document.createElementNS(namespace, "svg");
  made.setAttribute("class", "icon");
  made.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(namespace, "use");
  use.setAttribute("href", `#icon-${name}`);
  made.append(use);
  return made;
}

// A button with an icon, and with a label for screen readers.
export function iconButton(name, label, onclick) {
  const attributes = { type: "button", class: "quiet", "aria-label": label, title: label, onclick };
  return element("button", attributes, icon(name));
}

// Focus an element unless that would open an on-screen keyboard.
export function focusIfKeys(node) {
  if (matchMedia("(hover: hover)").matches) node.focus();
}

export const plural = (n, what) => `${n.toLocaleString("en")} ${what}${n === 1 ? "" : "s"}`;

export function duration(seconds) {
  if (seconds >= 10) return `${seconds.toFixed(0)} s`;
  if (seconds >= 1) return `${seconds.toFixed(1)} s`;
  const milliseconds = seconds * 1000;
  return `${milliseconds.toFixed(milliseconds < 10 ? 1 : 0)} ms`;
}
