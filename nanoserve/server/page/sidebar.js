// The list of conversations: choose, rename, delete, undo.

import { byId, element, iconButton } from "./element.js";

const UNDO_SECONDS = 8;

export class Sidebar {
  #renaming = null;

  // `actions` are {choose, removed}, each called with a conversation; `isRunning` says of one
  // whether an answer is coming in it.
  constructor(conversations, actions, isRunning) {
    this.conversations = conversations;
    this.actions = actions;
    this.isRunning = isRunning;
    this.current = null;
    this.list = byId("conversations");
  }

  show(current = this.current) {
    this.current = current;
    if (this.#renaming) return; // what is being typed must not be lost to an answer that ends
    const shown = this.conversations.all.filter(({ messages }) => messages.length);
    this.list.replaceChildren(...shown.map((conversation) => this.#item(conversation)));
    byId("no-conversations").hidden = shown.length > 0;
  }

  #item(conversation) {
    const isCurrent = conversation === this.current;
    const choose = element(
      "button",
      {
        type: "button",
        class: "choose",
        title: conversation.title,
        "aria-current": isCurrent ? "true" : null,
        onclick: () => this.actions.choose(conversation),
        ondblclick: () => this.#rename(conversation, item),
      },
      conversation.title,
    );
    const rename = iconButton("edit", `Rename “${conversation.title}”`, () => this.#rename(conversation, item));
    const remove = iconButton("delete", `Delete “${conversation.title}”`, () => this.#remove(conversation));
    const item = element("li", { class: this.isRunning(conversation) ? "running" : "" }, choose, rename, remove);
    return item;
  }

  #rename(conversation, item) {
    const input = element("input", { type: "text", maxlength: 60, "aria-label": "Title" });
    input.value = conversation.title;
    this.#renaming = input;
    const done = (isWanted) => {
      if (this.#renaming !== input) return; // leaving the field ends it, too
      this.#renaming = null;
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

let timer = null;

// A line at the bottom that goes away by itself, with something to do about it.
export function toast(text, label = "", action = null) {
  const hide = () => (byId("toast").hidden = true);
  const button = action && element("button", { type: "button", onclick: () => (hide(), action()) }, label);
  byId("toast").replaceChildren(element("span", {}, text), ...(button ? [button] : []));
  byId("toast").hidden = false;
  clearTimeout(timer);
  timer = setTimeout(hide, UNDO_SECONDS * 1000);
}
