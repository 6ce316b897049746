// The input field: the text of a question, its files, and the question that is edited, if any.

import { Attachments } from "./attachments.js";
import { byId, focusIfKeys } from "./element.js";

export class Composer {
  editing = null; // the question of which another version is written

  // `send` is called with {content, attachments} and the edited question or null; it returns true if
  // the question is on its way.
  constructor(send) {
    this.send = send;
    this.form = byId("composer");
    this.input = this.form.elements.question;
    this.attachments = new Attachments(() => this.#fit());
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    this.input.addEventListener("input", () => this.#fit());
    this.input.addEventListener("keydown", (event) => {
      // While a word is being composed, for example in Chinese, Enter selects it.
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#submit();
    });
    byId("cancel-edit").addEventListener("click", () => this.stopEditing());
    this.#takeFiles();
    // What lies above the field, such as the toast, moves with its height.
    const note = () => document.body.style.setProperty("--composer", `${this.form.offsetHeight}px`);
    new ResizeObserver(note).observe(this.form);
    this.#fit();
  }

  // Copy a question to the field. It is kept, beside the version that will be sent.
  edit(message) {
    this.editing = message;
    this.#set(message.content, message.attachments ?? []);
    this.input.focus();
  }

  stopEditing() {
    if (this.editing) this.#set("", []);
  }

  focus() {
    focusIfKeys(this.input);
  }

  showRunning(isRunning) {
    this.form.classList.toggle("running", isRunning);
    byId("send").hidden = isRunning;
    byId("stop").hidden = !isRunning;
  }

  #set(text, files) {
    if (!text && !files.length) this.editing = null;
    this.input.value = text;
    this.attachments.files = files;
  }

  #submit() {
    const question = { content: this.input.value.trim(), attachments: this.attachments.files };
    if (this.#isEmpty || !this.send(question, this.editing)) return;
    this.#set("", []);
  }

  get #isEmpty() {
    return !this.input.value.trim() && !this.attachments.files.length;
  }

  // Make the field as high as its text, up to the maximum of the style sheet.
  #fit() {
    if (!this.attachments) return; // being constructed
    this.input.style.height = "auto";
    this.input.style.height = `${this.input.scrollHeight}px`;
    byId("send").disabled = this.#isEmpty;
    this.form.classList.toggle("editing", this.editing !== null);
  }

  // Files can also be dropped on the conversation, or pasted.
  #takeFiles() {
    const place = byId("chat");
    const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
    const mark = (isOver) => place.classList.toggle("dropping", isOver);
    place.addEventListener("dragover", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      mark(true);
    });
    place.addEventListener("dragleave", (event) => place.contains(event.relatedTarget) || mark(false));
    place.addEventListener("drop", (event) => {
      mark(false);
      if (!hasFiles(event)) return;
      event.preventDefault();
      this.attachments.add([...event.dataTransfer.files]);
    });
    this.input.addEventListener("paste", (event) => {
      const files = [...event.clipboardData.files];
      if (!files.length || event.clipboardData.types.includes("text/plain")) return;
      event.preventDefault();
      this.attachments.add(files);
    });
  }
}
