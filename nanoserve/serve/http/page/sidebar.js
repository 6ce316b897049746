// The list of conversations: choose, rename, delete, undo.

import { byId, element, iconButton } from "./element.js";
import { toast } from "./toast.js";

export class Sidebar {
  #renaming = null; // the input field of the new title, while a conversation is renamed
  #items = new WeakMap(); // by conversation

  // `actions` are {choose, removed}, each called with a conversation; `isRunning` returns true for
  // a conversation with a streaming answer.
  constructor(conversations, actions, isRunning) {
    this.conversations = conversations;
    this.actions = actions;
    this.isRunning = isRunning;
    this.current = null;
    this.list = byId("conversations");
  }

  // Existing items are moved only if necessary: one of them may have the focus.
  show(current = this.current) {
    this.current = current;
    if (this.#renaming) return; // the end of an answer must not discard a title being typed
    const shown = this.conversations.all.filter(({ messages }) => messages.length);
    const items = shown.map((conversation) => this.#item(conversation));
    const { children } = this.list;
    const isSame = items.length === children.length && items.every((item, i) => item === children[i]);
    if (!isSame) this.list.replaceChildren(...items);
    byId("no-conversations").hidden = shown.length > 0;
  }

  #item(conversation) {
    if (!this.#items.has(conversation)) this.#items.set(conversation, this.#made(conversation));
    const item = this.#items.get(conversation);
    const { title } = conversation;
    const [choose, rename, remove] = item.children;
    choose.textContent = choose.title = title;
    rename.setAttribute("aria-label", `Rename “${title}”`);
    remove.setAttribute("aria-label", `Delete “${title}”`);
    item.classList.toggle("running", this.isRunning(conversation));
    if (conversation === this.current) choose.setAttribute("aria-current", "true");
    else choose.removeAttribute("aria-current");
    return item;
  }

  #made(conversation) {
    const choose = element("button", {
      type: "button",
      class: "choose",
      onclick: () => this.actions.choose(conversation),
      ondblclick: () => this.#rename(conversation),
    });
    const rename = iconButton("edit", "Rename", () => this.#rename(conversation));
    const remove = iconButton("delete", "Delete", () => this.#remove(conversation));
    return element("li", {}, choose, rename, remove);
  }

  #rename(conversation) {
    const item = this.#items.get(conversation);
    const before = [...item.children];
    const input = element("input", { type: "text", maxlength: 60, "aria-label": "Title" });
    input.value = conversation.title;
    this.#renaming = input;
    const done = (isWanted) => {
      if (this.#renaming !== input) return; // already ended, as the field has lost the focus
      this.#renaming = null;
      item.replaceChildren(...before);
      if (isWanted) this.conversations.rename(conversation, input.value);
      this.show();
    };
    input.addEventListener("blur", () => done(true));
    input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.preventDefault();
      event.stopPropagation();
      done(event.key === "Enter");
    });
    item.replaceChildren(input);
    input.select();
  }

  #remove(conversation) {
    this.conversations.remove(conversation);
    this.actions.removed(conversation);
    toast(`“${conversation.title}” is deleted.`, "Undo", () => {
      this.conversations.restore(conversation);
      this.actions.choose(conversation);
    });
  }
}
