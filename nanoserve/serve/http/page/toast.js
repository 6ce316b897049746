// A notice above the input field that disappears by itself.

import { byId, element } from "./element.js";

const SECONDS = 8;
let timer = null;

// Show a text with an optional action, such as "Undo".
export function toast(text, label = "", action = null) {
  const hide = () => (byId("toast").hidden = true);
  const button = action && element("button", { type: "button", onclick: () => (hide(), action()) }, label);
  byId("toast").replaceChildren(element("span", {}, text), ...(button ? [button] : []));
  byId("toast").hidden = false;
  clearTimeout(timer);
  timer = setTimeout(hide, SECONDS * 1000);
}
