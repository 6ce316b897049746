// The conversation that is shown: its messages, the example questions, and the scroll position.

import { byId, element } from "./element.js";
import { AssistantMessage, UserMessage } from "./message.js";

const EXAMPLES = ["What is a KV cache?", "What is a block table?", "What is 27 + 45?"];
const NEAR = 60; // largest distance from the end, in pixels, that counts as the end

export class ConversationView {
  #shown = new Map(); // by message

  // `actions` are {ask(text), edit(message), regenerate(message)}.
  constructor(actions) {
    this.actions = actions;
    this.log = byId("log");
    this.scroller = byId("scroller");
    this.follows = true; // scroll to the end while text arrives
    this.scroller.addEventListener("scroll", () => this.#scrolled());
    new ResizeObserver(() => this.follow()).observe(this.log);
    byId("to-end").addEventListener("click", () => this.toEnd());
    for (const question of EXAMPLES) {
      const button = element("button", { type: "button", onclick: () => actions.ask(question) }, question);
      byId("examples").append(button);
    }
  }

  // Show another conversation, or this one after its messages have changed.
  show(conversation) {
    this.#shown = new Map(conversation.messages.map((message) => [message, this.#made(message)]));
    this.log.replaceChildren(...[...this.#shown.values()].map(({ node }) => node));
    byId("welcome").hidden = conversation.messages.length > 0;
    this.toEnd();
  }

  update(message) {
    this.#shown.get(message)?.update();
  }

  #made(message) {
    const known = this.#shown.get(message);
    if (known) return known;
    const { edit, regenerate } = this.actions;
    if (message.role === "user") return new UserMessage(message, () => edit(message));
    return new AssistantMessage(message, () => regenerate(message));
  }

  follow() {
    if (this.follows) this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  toEnd() {
    this.follows = true;
    this.follow();
    this.#scrolled();
  }

  // After the user has scrolled up, the position is not changed.
  #scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    this.follows = scrollHeight - scrollTop - clientHeight < NEAR;
    byId("to-end").hidden = this.follows;
  }
}
