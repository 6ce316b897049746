// The menu of models, and the dialog with the details of the chosen one.

import { ask } from "./api.js";
import { byId, element, plural } from "./element.js";
import { load, save } from "./storage.js";
import { toast } from "./toast.js";

const KEY = "nanoserve.model";

export class Models {
  #cards = [];

  // `changed` is called when another model was chosen, or when the models have become known.
  constructor(changed) {
    this.changed = changed;
    this.menu = byId("model");
    this.menu.addEventListener("change", () => {
      save(KEY, this.name);
      this.#show();
    });
    for (const button of ["about-model", "about-model-small"]) {
      byId(button).addEventListener("click", () => byId("model-details").showModal());
    }
  }

  get name() {
    return this.menu.value;
  }

  get card() {
    return this.#cards.find(({ id }) => id === this.name) ?? {};
  }

  // The context length in tokens; null if the server does not say.
  get contextLength() {
    return this.card.max_model_len ?? null;
  }

  async load() {
    try {
      const { data } = await (await ask("v1/models")).json();
      const wanted = this.name || load(KEY);
      this.#cards = data;
      this.menu.replaceChildren(...data.map(({ id }) => element("option", { value: id }, id)));
      if (data.some(({ id }) => id === wanted)) this.menu.value = wanted;
      this.#show();
    } catch (error) {
      toast(error.message, "Try again", () => this.load());
    }
  }

  #show() {
    document.title = `${this.name} · nanoserve`;
    byId("about-model").disabled = !this.name;
    const rows = factsOf(this.card).map(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]);
    byId("model-facts").replaceChildren(...rows.flat());
    byId("model-limits").replaceChildren(...limitsOf(this.card).map((text) => element("li", {}, text)));
    this.changed();
  }
}

// Return [name, value] of what the server says about a model.
export function factsOf({ id, root, max_model_len: length, dtype, kv_cache_dtype: cache, quantization, architecture }) {
  const facts = [
    ["Name", id],
    ["Model", root === id ? null : root],
    ["Architecture", architecture],
    ["Context length", length && plural(length, "token")],
    ["Data type", dtype],
    ["Quantization", quantization],
    ["Data type of the KV cache", cache === dtype ? null : cache],
  ];
  return facts.filter(([, value]) => value);
}

// Return what cannot be done here, in sentences.
export function limitsOf({ capabilities = {} }) {
  const { function_calling: calls, reasoning, completion_chat: chats, vision } = capabilities;
  const reader = vision === false ? "the model reads" : "this page sends";
  const limits = [`Images, sound and files other than text: ${reader} only text.`];
  if (calls === false) limits.push("Tools: the model's chat template has none, and neither has this page.");
  else limits.push(`Tools: this page has none.${calls ? " Over the API, the model can call tools." : ""}`);
  if (reasoning === false) limits.push("Reasoning before the answer: the model's chat template has none.");
  if (chats === false) limits.push("Conversations: the model has no chat template.");
  return limits;
}
