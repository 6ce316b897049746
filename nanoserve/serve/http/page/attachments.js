// Text files that are attached to a question: shown as chips, and sent as text before the question.

import { byId, element, icon, iconButton } from "./element.js";
import { fenced } from "./fence.js";
import { toast } from "./toast.js";

const MOST_BYTES = 256 * 1024; // of all files of a question; a context of 32k tokens holds half of that

// Return a question as the model reads it, with its files first.
export function withFiles({ content, attachments = [] }) {
  const files = attachments.map(({ name, text }) => `File “${name}”:\n\n${fenced(text)}`);
  return [...files, ...(content ? [content] : [])].join("\n\n");
}

// Return {name, text}, or throw an `Error` that says why the file cannot be attached.
export async function readFile(file) {
  if (file.size > MOST_BYTES) throw new Error(`“${file.name}” has ${sizeText(file.size)}; ${LIMIT}`);
  const bytes = new Uint8Array(await file.arrayBuffer());
  let text;
  try {
    text = new TextDecoder(encodingOf(bytes), { fatal: true }).decode(bytes);
  } catch {
    text = "\0";
  }
  if (text.includes("\0")) throw new Error(`“${file.name}” is not a text file, and the model reads only text.`);
  if (!text.trim()) throw new Error(`“${file.name}” is empty.`);
  return { name: file.name, text: text.replace(/\r\n?/g, "\n") };
}

// UTF-8, unless the file begins with the mark of UTF-16.
function encodingOf([first, second]) {
  if (first === 0xff && second === 0xfe) return "utf-16le";
  return first === 0xfe && second === 0xff ? "utf-16be" : "utf-8";
}

const LIMIT = `the files of a question have at most ${sizeText(MOST_BYTES)}.`;

export function sizeText(bytes) {
  if (bytes < 1000) return `${bytes} B`;
  return bytes < 1024 * 1000 ? `${(bytes / 1024).toFixed(bytes < 10_240 ? 1 : 0)} KB` : `${(bytes / 2 ** 20).toFixed(1)} MB`;
}

const bytesOf = (text) => new TextEncoder().encode(text).length;

// The files in the input field.
export class Attachments {
  #files = [];

  // `changed` is called when a file was added or removed.
  constructor(changed) {
    this.changed = changed;
    this.list = byId("attachments");
    this.field = byId("attach-file");
    byId("attach").addEventListener("click", () => this.field.click());
    this.field.addEventListener("change", async () => {
      const chosen = [...this.field.files];
      this.field.value = ""; // the same file can be chosen again
      await this.add(chosen);
    });
  }

  get files() {
    return this.#files;
  }

  set files(files) {
    this.#files = files;
    this.#show();
  }

  async add(chosen) {
    for (const file of chosen) {
      try {
        const read = await readFile(file);
        const total = [...this.#files, read].reduce((sum, { text }) => sum + bytesOf(text), 0);
        if (total > MOST_BYTES) throw new Error(`“${file.name}” does not fit: ${LIMIT}`);
        this.files = [...this.#files, read];
      } catch (error) {
        toast(error.message);
      }
    }
  }

  #show() {
    this.list.replaceChildren(...this.#files.map((file, i) => this.#chip(file, i)));
    this.list.hidden = !this.#files.length;
    this.changed();
  }

  #chip({ name, text }, i) {
    const drop = iconButton("close", `Remove ${name}`, () => {
      this.files = this.#files.filter((_, other) => other !== i);
      byId("attach").focus(); // the button with the focus was removed
    });
    const size = element("span", { class: "size" }, sizeText(bytesOf(text)));
    return element("li", {}, icon("file"), element("span", { class: "name" }, name), size, drop);
  }
}

// The files of a question that was sent. Their text is shown when they are opened.
export function fileList(attachments) {
  const items = attachments.map(({ name, text }) => {
    const size = element("span", { class: "size" }, sizeText(bytesOf(text)));
    const summary = element("summary", {}, icon("file"), element("span", { class: "name" }, name), size);
    return element("details", { class: "file" }, summary, element("pre", { tabindex: "0" }, text));
  });
  return element("div", { class: "files" }, items);
}
