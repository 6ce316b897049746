// The JSON schema that answers are to follow: where it is written, and where it is told that one is
// set, by the line that questions are written in.

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
      focusIfKeys(field); // the button is gone
      field.scrollTop = 0;
    });
  }

  // A schema, or null: free text, or something that is no schema, with which nothing is sent.
  get schema() {
    return this.isSet ? schemaIn(this.field.value).schema : null;
  }

  get isSet() {
    return this.field.value.trim() !== "";
  }

  // As if it had been typed: whoever listens to the form hears of it.
  set(text) {
    this.field.value = text;
    this.field.dispatchEvent(new Event("input", { bubbles: true }));
  }

  // The text that was there.
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
    byId("example-schema").hidden = isSet; // it would overwrite what somebody has written
    byId("has-schema").hidden = !isSet;
    byId("has-schema").classList.toggle("wrong", wrong !== "");
    byId("schema-note").textContent = isSet ? noteText(wrong) : "";
  }
}

function noteText(wrong) {
  return wrong ? "The schema in the parameters is no JSON object." : "The answer will be JSON, by your schema.";
}
