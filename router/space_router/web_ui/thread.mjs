/** What was said before in a chat: goes along with the next message until it is forgotten. */

import { element } from "./pane.mjs";

export class Thread {
  messages = [];

  /** Shown in `root`; `changed` is called after each change. */
  constructor(root, changed) {
    Object.assign(this, { root, changed });
  }

  add(question, answer) {
    this.messages.push({ role: "user", content: question }, { role: "assistant", content: answer });
    this.#show();
    this.changed();
  }

  clear() {
    this.messages = [];
    this.#show();
    this.changed();
  }

  #show() {
    this.root.hidden = this.messages.length === 0;
    const list = element("ol", { tabindex: "0", "aria-label": "What was said before" });
    list.append(...this.messages.map(({ role, content }) => element("li", { class: role }, content)));
    const forget = element("button", { type: "button", class: "quiet" }, "Start over");
    forget.addEventListener("click", () => this.clear());
    this.root.replaceChildren(list, forget);
    list.scrollTop = list.scrollHeight;
  }
}
