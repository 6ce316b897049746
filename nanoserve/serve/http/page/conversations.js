// The conversations in this browser, newest first. Each has its own storage key, so that two tabs do
// not overwrite each other's conversations.
//
// A conversation: {id, title, isNamed, changed, messages}. A message: {role: "user", content}, or
// {role: "assistant", content, thinking, state, ...}; see chat.js.

import { forget, keysWith, load, save } from "./storage.js";

const PREFIX = "nanoserve.conversation.";
const LONGEST_TITLE = 60;

export class Conversations {
  #deleted = new Set();

  constructor() {
    this.all = keysWith(PREFIX).map(load).filter(isConversation);
    for (const { messages } of this.all) for (const message of messages) settle(message);
    this.#sort();
  }

  create() {
    // `randomUUID` is undefined on a plain http: address of another machine.
    const id = `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 10)}`;
    const made = { id, title: "New conversation", isNamed: false, changed: Date.now(), messages: [] };
    this.all.unshift(made);
    return made;
  }

  // Save a changed conversation, unless it is empty.
  keep(conversation) {
    conversation.changed = Date.now();
    this.#sort();
    this.write(conversation);
  }

  write(conversation) {
    if (this.#deleted.has(conversation.id) || !conversation.messages.length) return;
    save(PREFIX + conversation.id, conversation);
  }

  rename(conversation, title) {
    const wanted = title.trim().slice(0, LONGEST_TITLE);
    if (!wanted) return;
    conversation.title = wanted;
    conversation.isNamed = true;
    this.write(conversation);
  }

  // The first question is the title until the user renames the conversation.
  nameAfter(conversation, question) {
    if (conversation.isNamed || conversation.messages.length > 1) return;
    const line = question.trim().replace(/\s+/g, " ");
    conversation.title = line.length > LONGEST_TITLE ? `${line.slice(0, LONGEST_TITLE - 1)}…` : line;
  }

  remove(conversation) {
    this.#deleted.add(conversation.id);
    this.all = this.all.filter((other) => other !== conversation);
    forget(PREFIX + conversation.id);
  }

  restore(conversation) {
    this.#deleted.delete(conversation.id);
    this.all.push(conversation);
    this.#sort();
    this.write(conversation);
  }

  #sort() {
    this.all.sort((a, b) => b.changed - a.changed);
  }
}

// Other versions of this page, or other programs, may have stored other data there.
function isConversation(found) {
  const isMessage = (message) =>
    ["user", "assistant"].includes(message?.role) && typeof message.content === "string";
  return (
    typeof found?.id === "string" &&
    typeof found.title === "string" &&
    Array.isArray(found.messages) &&
    found.messages.every(isMessage)
  );
}

// An answer that was streaming when the page was closed has ended.
function settle(message) {
  if (["waiting", "streaming"].includes(message.state)) message.state = "stopped";
}
