/** One answer on the page: its title, its figures, its text in the colours of its steps. */

import { colourOf } from "./answer.mjs";

const FIGURES = [
  ["tokens/s", (answer) => fixed(answer.tokensPerSecond, 1)],
  ["tokens per step", (answer) => fixed(answer.statistics?.tokens_per_step ?? answer.tokensPerStep, 2)],
  ["ms per token", (answer) => fixed(answer.timePerToken, 1)],
  ["accepted drafts", (answer) => (answer.verified ? `${answer.accepted} of ${answer.verified}` : "–")],
];

const fixed = (value, digits) => (value === null || value === undefined ? "–" : value.toFixed(digits));

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export class Pane {
  #tokens = []; // elements
  #current = null; // index of the token that is looked at
  #figures;

  /** `inspect(pane, index)` is called for the token that is pointed at, or reached with the arrow keys; null: none. */
  constructor(title, { plain, prompt, inspect }) {
    this.answer = null;
    this.inspect = inspect;
    this.prompt = prompt;
    this.state = element("span", { class: "state" });
    const heading = element("h2", {}, element("i"), title, this.state);
    this.#figures = FIGURES.map(() => element("dd", {}, "–"));
    const figures = FIGURES.map(([name], place) => element("div", {}, element("dt", {}, name), this.#figures[place]));
    this.text = element("div", {
      class: "text", tabindex: "0", role: "group", "aria-label": `Answer: ${title}. Arrow keys go through its tokens.`,
    });
    this.root = element("article", { class: plain ? "pane plain" : "pane" }, heading, element("dl", { class: "figures" }, ...figures), this.text);
    this.text.addEventListener("pointerover", (event) => this.#pointed(event));
    this.text.addEventListener("pointerleave", () => this.look(null));
    this.text.addEventListener("keydown", (event) => this.#pressed(event));
    this.text.addEventListener("blur", () => this.look(null));
    this.clear();
  }

  /** Show `answer` from its beginning. */
  begin(answer) {
    this.clear();
    this.answer = answer;
    this.root.classList.add("running");
    this.say("");
  }

  clear() {
    this.#tokens = [];
    this.#current = null;
    this.text.replaceChildren(element("span", { class: "prompt" }, this.prompt));
    for (const cell of this.#figures) cell.textContent = "–";
  }

  /** Pieces of text, in the colours of their tokens. */
  add(pieces) {
    const follow = this.text.scrollHeight - this.text.scrollTop - this.text.clientHeight < 40;
    for (const { token, text } of pieces) {
      const made = this.#tokens[token] ?? this.#make(token);
      made.append(...written(text, this.answer.tokens[token]));
    }
    if (follow) this.text.scrollTop = this.text.scrollHeight;
  }

  #make(index) {
    const { step, draft } = this.answer.tokens[index];
    const before = this.#tokens[index - 1];
    const first = index === 0 || this.answer.tokens[index - 1].step !== step;
    const made = element("span", { class: `token c${colourOf(step)} last`, "data-token": index });
    made.classList.toggle("draft", draft);
    made.classList.toggle("first", first);
    if (!first) before.classList.remove("last");
    this.#tokens[index] = made;
    this.text.append(made);
    return made;
  }

  /** The figures as they stand; `answer` may be one that is shown in part. */
  count(answer = this.answer) {
    FIGURES.forEach(([, of], place) => {
      const text = of(answer);
      if (this.#figures[place].textContent !== text) this.#figures[place].textContent = text;
    });
  }

  end() {
    this.root.classList.remove("running");
  }

  say(state) {
    this.state.textContent = state;
  }

  #pointed(event) {
    const token = event.target.closest("[data-token]");
    if (token !== null) this.look(Number(token.dataset.token));
  }

  #pressed(event) {
    const target = this.#target(event.key);
    if (target === null || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.look(target);
    this.#tokens[target].scrollIntoView({ block: "nearest" });
  }

  /** The token that a key leads to; null for keys that lead nowhere. */
  #target(key) {
    const last = this.#tokens.length - 1;
    if (last < 0) return null;
    if (key === "Home") return 0;
    if (key === "End") return last;
    if (!["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown"].includes(key)) return null;
    if (this.#current === null) return 0;
    const { step } = this.answer.placeOf(this.#current);
    const [before, behind] = [step.first - 1, step.first + step.size];
    const to = {
      ArrowLeft: this.#current - 1,
      ArrowRight: this.#current + 1,
      ArrowUp: before < 0 ? 0 : this.answer.placeOf(before).step.first,
      ArrowDown: behind,
    };
    return Math.min(last, Math.max(0, to[key]));
  }

  /** Mark a token and the others of its step; null: none. */
  look(index) {
    if (index === this.#current) return;
    for (const one of this.text.querySelectorAll(".lit")) one.classList.remove("lit");
    this.#current = index;
    this.mark(index);
    this.inspect(this, index);
    if (index === null) return;
    const { step } = this.answer.placeOf(index);
    for (let place = step.first; place < step.first + step.size; place += 1) this.#tokens[place]?.classList.add("lit");
  }

  /** Put a frame around one token; null: around none. */
  mark(index) {
    this.text.querySelector(".now")?.classList.remove("now");
    this.#tokens[index]?.classList.add("now");
  }
}

/** Text with its line ends made visible; a token without text is the end of the text, or a special one. */
function written(text, token) {
  if (text === "" && token.text === "") return [element("span", { class: "end" })];
  return text.split(/(\n)/).filter(Boolean).map((part) => (part === "\n" ? element("span", { class: "newline" }, "\n") : part));
}

const ORDINALS = ["1st", "2nd", "3rd"];

/** What is known of a token, as nodes. */
export function description(answer, index) {
  const token = answer.tokens[index];
  const { step, place } = answer.placeOf(index);
  const shown = (text) => element("code", {}, text === "" ? "no text" : JSON.stringify(text).slice(1, -1));
  const parts = [shown(token.text), ` token ${index + 1} of ${answer.tokens.length}`, token.id === null ? "" : `, id ${token.id}`, " · "];
  if (token.step === 0) parts.push(element("b", {}, "the prompt's step"));
  else parts.push(element("b", {}, `step ${token.step}`));
  if (step.size > 1) parts.push(`, ${ORDINALS[place] ?? `${place + 1}th`} of its ${step.size} tokens`);
  if (token.step > 0) parts.push(token.draft ? ", an accepted draft" : ", the step's own token");
  if (token.logprob !== null) {
    parts.push(` · logprob ${token.logprob.toFixed(3)} (${percent(token.logprob)})`);
    const others = token.top.filter(([text]) => text !== token.text);
    others.forEach(([text, logprob], number) => parts.push(number ? ", " : " · else ", shown(text), ` ${percent(logprob)}`));
  }
  return parts;
}

const percent = (logprob) => {
  const value = 100 * Math.exp(logprob);
  return `${value >= 99.95 || value === 0 ? value.toFixed(0) : value.toPrecision(value >= 10 ? 3 : 2)} %`;
};
