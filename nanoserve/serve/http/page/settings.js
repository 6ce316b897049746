// Parameters of a request. Empty fields are left out, so that the server's defaults apply.

import { byId } from "./element.js";
import { extraIn } from "./extra.js";
import { SchemaField } from "./schema.js";
import { load, save } from "./storage.js";

const KEY = "nanoserve.settings";
const PENALTIES = ["presence_penalty", "frequency_penalty", "repetition_penalty"];
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", ...PENALTIES];
const TEXTS = ["system", "stop", "schema", "extra"];

export class Settings {
  constructor() {
    this.dialog = byId("settings");
    this.form = this.dialog.querySelector("form");
    this.schemaField = new SchemaField(this.form.elements.schema);
    const kept = load(KEY) ?? {};
    for (const name of [...NUMBERS, ...TEXTS]) {
      if (typeof kept[name] === "string") this.form.elements[name].value = kept[name];
    }
    this.form.addEventListener("input", () => this.#keep());
    this.form.addEventListener("submit", (event) => {
      event.preventDefault(); // the browser has validated the fields; the form is not sent
      this.dialog.close();
    });
    byId("reset").addEventListener("click", () => {
      for (const name of [...NUMBERS, ...TEXTS]) this.form.elements[name].value = "";
      this.#keep();
    });
    byId("open-settings").addEventListener("click", () => this.dialog.showModal());
    this.#show();
  }

  // Return true if all fields are valid; otherwise show them with their errors.
  check() {
    if (this.form.checkValidity()) return true;
    if (!this.dialog.open) this.dialog.showModal();
    byId("more").open ||= Boolean(byId("more").querySelector(":invalid")); // a hidden field has no message
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
    const { schema } = this.schemaField;
    if (schema) found.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
    return { ...found, ...extraIn(this.form.elements.extra.value).fields };
  }

  #keep() {
    const values = [...NUMBERS, ...TEXTS].map((name) => [name, this.form.elements[name].value]);
    save(KEY, Object.fromEntries(values));
    this.#show();
  }

  // A dot on the button shows that a parameter differs from the server's default.
  #show() {
    const isChanged = [...NUMBERS, ...TEXTS].some((name) => this.form.elements[name].value !== "");
    byId("open-settings").classList.toggle("changed", isChanged);
    this.schemaField.show();
    this.#showExtra();
  }

  #showExtra() {
    const { extra } = this.form.elements;
    const wrong = extraIn(extra.value, (name) => this.#isSet(name)).wrong;
    extra.setCustomValidity(wrong);
    extra.setAttribute("aria-invalid", String(wrong !== ""));
    byId("wrong-extra").textContent = wrong;
  }

  // Return true if a field of the form sets this field of a request.
  #isSet(name) {
    const field = name === "response_format" ? "schema" : name;
    const isOurs = field !== "system" && [...NUMBERS, ...TEXTS].includes(field);
    return isOurs && this.form.elements[field].value !== "";
  }
}
