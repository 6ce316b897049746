// The JSON schema for answers: its input field, and the note next to the question field that one is
// set.

import { byId, focusIfKeys } from "./element.js";
import { schemaIn } from "./json.js";

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

export class SchemaField {
  constructor(field) {
    this.field = field;
    byId("example-schema").addEventListener("click", () => {
      this.set(JSON.stringify(EXAMPLE, null, 2));
      focusIfKeys(field); // the button with the focus was removed
      field.scrollTop = 0;
    });
  }

  // The schema, or null: for free text, or for an invalid schema, with which nothing is sent.
  get schema() {
    return this.isSet ? schemaIn(this.field.value).schema : null;
  }

  get isSet() {
    return this.field.value.trim() !== "";
  }

  // Set the text as if it had been typed, so that listeners of the form are notified.
  set(text) {
    this.field.value = text;
    this.field.dispatchEvent(new Event("input", { bubbles: true }));
  }

  // Clear the field and return its text.
  clear() {
    const { value } = this.field;
    this.set("");
    return value;
  }

  show() {
    const { field, isSet } = this;
    const wrong = isSet ? schemaIn(field.value).wrong : "";
    field.setCustomValidity(wrong);
    field.setAttribute("aria-invalid", String(wrong !== ""));
    byId("wrong-schema").textContent = wrong;
    byId("example-schema").hidden = isSet; // it would overwrite the user's text
    byId("has-schema").hidden = !isSet;
    byId("has-schema").classList.toggle("wrong", wrong !== "");
    byId("schema-note").textContent = isSet ? noteText(wrong) : "";
  }
}

function noteText(wrong) {
  return wrong ? "The schema in the parameters is not a JSON object." : "The answer will be JSON that follows your schema.";
}
