// Export of all conversations to a file, and import from one.

import { byId, element, plural } from "./element.js";
import { checked } from "./checked.js";
import { toast } from "./toast.js";

export const FORMAT = "nanoserve.conversations";
const VERSION = 1;
const MOST_BYTES = 20 * 2 ** 20; // a browser stores about 5 MB for a page

export class Exchange {
  // `added` is called after an import.
  constructor(conversations, added) {
    this.conversations = conversations;
    this.added = added;
    this.field = byId("import-file");
    byId("export").addEventListener("click", () => this.#save());
    byId("import").addEventListener("click", () => this.field.click());
    this.field.addEventListener("change", () => this.#load());
  }

  #save() {
    const kept = this.conversations.all.filter(({ messages }) => messages.length);
    if (!kept.length) return toast("There are no conversations to export.");
    const url = URL.createObjectURL(new Blob([exported(kept)], { type: "application/json" }));
    const day = new Date().toISOString().slice(0, 10);
    element("a", { href: url, download: `conversations-${day}.json` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  }

  async #load() {
    const [file] = this.field.files;
    this.field.value = ""; // the same file can be chosen again
    if (!file) return;
    try {
      if (file.size > MOST_BYTES) throw new Error("it has more than 20 MB");
      const { numAdded, isStored } = this.conversations.takeIn(imported(await file.text()));
      this.added();
      const done = `${plural(numAdded, "conversation")} imported`;
      if (!numAdded) toast("All of its conversations are here already.");
      else toast(isStored ? `${done}.` : `${done}, but the browser cannot store all of them.`);
    } catch (error) {
      toast(`“${file.name}” is not imported: ${error.message}.`);
    }
  }
}

export function exported(conversations) {
  return `${JSON.stringify({ format: FORMAT, version: VERSION, conversations }, null, 1)}\n`;
}

// Return the conversations of an exported text, or throw an `Error` that says what is wrong with it.
export function imported(text) {
  let found;
  try {
    found = JSON.parse(text);
  } catch {
    throw new Error("it is not JSON");
  }
  if (found?.format !== FORMAT) throw new Error(`its format is not "${FORMAT}"`);
  if (found.version !== VERSION) throw new Error(`its version is not ${VERSION}, the one of this page`);
  if (!Array.isArray(found.conversations)) throw new Error("conversations is not a list");
  return found.conversations.map((conversation, i) => {
    try {
      return checked(conversation);
    } catch (error) {
      throw new Error(`conversations[${i}]: ${error.message}`);
    }
  });
}
