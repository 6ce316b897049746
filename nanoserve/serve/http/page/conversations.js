// The conversations in this browser, newest first. Each has its own storage key, so that two tabs do
// not overwrite each other's conversations.
//
// A conversation: {id, title, isNamed, changed, messages, leaf}, with branches as in tree.js. A message:
// {role: "user", content, attachments}, or {role: "assistant", content, thinking, state, ...}; see chat.js.

import { checked } from "./checked.js";
import { forget, keysWith, load, save } from "./storage.js";

const PREFIX = "nanoserve.conversation.";
const LONGEST_TITLE = 60;

export class Conversations {
  #deleted = new Set();

  constructor() {
    this.all = keysWith(PREFIX).map(load).map(checkedOrNull).filter(Boolean);
    this.#sort();
  }

  create() {
    const title = "New conversation";
    const made = { id: newId(), title, isNamed: false, changed: Date.now(), messages: [], leaf: null };
    this.all.unshift(made);
    return made;
  }

  // Add imported conversations that are not here yet. Returns {numAdded, isStored}.
  takeIn(imported) {
    let [numAdded, isStored] = [0, true];
    for (const conversation of imported) {
      const known = this.all.find(({ id }) => id === conversation.id);
      if (!conversation.messages.length || (known && isSame(known, conversation))) continue;
      if (known || this.#deleted.has(conversation.id)) conversation.id = newId();
      this.all.push(conversation);
      isStored = this.write(conversation) && isStored;
      numAdded++;
    }
    this.#sort();
    return { numAdded, isStored };
  }

  // Save a changed conversation, unless it is empty.
  keep(conversation) {
    conversation.changed = Date.now();
    this.#sort();
    this.write(conversation);
  }

  // Return true if the conversation is stored.
  write(conversation) {
    if (this.#deleted.has(conversation.id) || !conversation.messages.length) return true;
    return save(PREFIX + conversation.id, conversation);
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
    if (conversation.isNamed) return;
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

// `randomUUID` is undefined on a plain http: address of another machine.
function newId() {
  return `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 10)}`;
}

function isSame(one, other) {
  const contents = ({ title, messages }) => JSON.stringify([title, messages]);
  return contents(checked(one)) === contents(other); // both with their members in the same order
}

// Other versions of this page, or other programs, may have stored other data there.
function checkedOrNull(found) {
  try {
    return checked(found);
  } catch {
    return null;
  }
}
