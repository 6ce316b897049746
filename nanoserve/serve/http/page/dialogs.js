// The dialog for the API key.

import { onKeyNeeded } from "./api.js";
import { byId } from "./element.js";

export function prepareKeyDialog() {
  const dialog = byId("key");
  const form = dialog.querySelector("form");
  let answer = () => {};
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    answer(form.elements.key.value.trim() || null);
    dialog.close();
  });
  byId("no-key").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => answer(null));
  onKeyNeeded((wasWrong) => {
    byId("wrong-key").hidden = !wasWrong;
    form.elements.key.value = "";
    dialog.showModal();
    return new Promise((resolve) => (answer = resolve));
  });
}
