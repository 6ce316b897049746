// What a request asks for. A field that is left empty is left out, and the server's default counts.

import { byId } from "./element.js";
import { load, save } from "./storage.js";

const KEY = "nanoserve.settings";
const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
const TEXTS = ["system", "stop", "schema"];
const EXAMPLE = {
  type: "object",
  properties: {
    term: { type: "string", maxLength: 30 },
    difficulty: { enum: ["easy", "medium", "hard"] },
    is_about_memory: { type: "boolean" },
  },
  required: ["term", "difficulty", "is_about_memory"],
  additionalProperties: false,
};

export class Settings {
  constructor() {
    this.dialog = byId("settings");
    this.form = this.dialog.querySelector("form");
    const kept = load(KEY) ?? {};
    for (const name of [...NUMBERS, ...TEXTS]) {
      if (typeof kept[name] === "string") this.form.elements[name].value = kept[name];
    }
    this.form.addEventListener("input", () => this.#keep());
    this.form.addEventListener("submit", (event) => {
      event.preventDefault(); // it has checked the fields; there is nowhere to send them to
      this.dialog.close();
    });
    byId("reset").addEventListener("click", () => {
      for (const name of [...NUMBERS, ...TEXTS]) this.form.elements[name].value = "";
      this.#keep();
    });
    byId("example-schema").addEventListener("click", () => this.#setSchema(JSON.stringify(EXAMPLE, null, 2)));
    byId("drop-schema").addEventListener("click", () => this.#setSchema(""));
    byId("open-settings").addEventListener("click", () => this.dialog.showModal());
    this.#show();
  }

  // Whether all fields are in range; if not, they are shown, with what is wrong.
  check() {
    if (this.form.checkValidity()) return true;
    if (!this.dialog.open) this.dialog.showModal();
    this.form.reportValidity();
    return false;
  }

  get system() {
    return this.form.elements.system.value.trim();
  }

  // The fields of a request.
  parameters() {
    const found = {};
    for (const name of NUMBERS) {
      const { value } = this.form.elements[name];
      if (value !== "") found[name] = Number(value);
    }
    const stop = this.form.elements.stop.value.split("\n").filter((line) => line !== "");
    if (stop.length) found.stop = stop;
    const { schema } = this;
    if (schema) {
      const described = { name: "answer", schema };
      found.response_format = { type: "json_schema", json_schema: described };
    }
    return found;
  }

  // What answers must look like, or null: free text.
  get schema() {
    const text = this.form.elements.schema.value.trim();
    return text === "" ? null : objectIn(text);
  }

  #setSchema(text) {
    this.form.elements.schema.value = text;
    this.#keep();
  }

  #keep() {
    const values = [...NUMBERS, ...TEXTS].map((name) => [name, this.form.elements[name].value]);
    save(KEY, Object.fromEntries(values));
    this.#show();
  }

  // A dot on the button says that something here is not as the server would have it.
  #show() {
    const isChanged = [...NUMBERS, ...TEXTS].some((name) => this.form.elements[name].value !== "");
    byId("open-settings").classList.toggle("changed", isChanged);
    const field = this.form.elements.schema;
    const isSet = field.value.trim() !== "";
    const isGood = !isSet || this.schema !== null;
    field.setCustomValidity(isGood ? "" : "This is no JSON object, which a schema is.");
    byId("has-schema").hidden = !isSet;
  }
}

function objectIn(text) {
  try {
    const value = JSON.parse(text);
    return value && typeof value === "object" && !Array.isArray(value) ? value : null;
  } catch {
    return null;
  }
}
