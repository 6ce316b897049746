// The conversation that is shown: its messages, the example questions, and the scroll position.

import { byId, element } from "./element.js";
import { AssistantMessage, UserMessage } from "./message.js";
import { pathOf, versionsOf } from "./tree.js";

const EXAMPLES = ["What is a KV cache?", "What is a block table?", "What is 27 + 45?"];
const NEAR = 60; // largest distance from the end, in pixels, that counts as the end

export class ConversationView {
  #shown = new Map(); // by message

  // `actions` are {ask({content}), edit(message), regenerate(message), proceed(message), step(message, by)}.
  constructor(actions) {
    this.actions = actions;
    this.log = byId("log");
    this.scroller = byId("scroller");
    this.follows = true; // scroll to the end while text arrives
    this.scroller.addEventListener("scroll", () => this.#scrolled());
    const observer = new ResizeObserver(() => this.follow());
    observer.observe(this.log, { box: "border-box" });
    observer.observe(this.scroller); // the field below may have become higher
    byId("to-end").addEventListener("click", () => this.toEnd());
    for (const question of EXAMPLES) {
      const button = element("button", { type: "button", onclick: () => actions.ask({ content: question }) }, question);
      byId("examples").append(button);
    }
  }

  // Show another conversation, or this one after its messages have changed.
  show(conversation) {
    const path = pathOf(conversation);
    this.#shown = new Map(path.map((message) => [message, this.#made(message)]));
    this.log.replaceChildren(...[...this.#shown.values()].map(({ node }) => node));
    for (const [message, { versions }] of this.#shown) {
      const all = versionsOf(conversation, message);
      versions.show(all.indexOf(message), all.length);
    }
    byId("welcome").hidden = path.length > 0;
    this.toEnd();
  }

  // Show another branch. The arrow that was used stays where it is on the screen, with the focus.
  showVersion(conversation, message, step) {
    const before = this.scroller.scrollTop;
    this.show(conversation);
    this.scroller.scrollTop = before;
    this.#scrolled();
    this.#shown.get(message)?.versions.focus(step);
  }

  update(message) {
    this.#shown.get(message)?.update();
  }

  #made(message) {
    const known = this.#shown.get(message);
    if (known) return known;
    const bound = Object.entries(this.actions).map(([name, action]) => [name, (by) => action(message, by)]);
    const actions = Object.fromEntries(bound);
    return message.role === "user" ? new UserMessage(message, actions) : new AssistantMessage(message, actions);
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
