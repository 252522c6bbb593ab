/** A drawing: blocks for steps, curves for means, over the tokens of an answer. Redrawn at most once a frame. */

import { Scale, marks } from "./curve.mjs";
import { NUM_COLOURS, colourOf } from "./answer.mjs";

const [LEFT, RIGHT, TOP, BOTTOM] = [30, 4, 8, 20];

function drawn(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

export class Chart {
  #height = 150;
  #series = [];
  #most = 1;

  /** `unit` is what the vertical axis counts; it reaches `least` at least. */
  constructor(title, explanation, unit, least) {
    Object.assign(this, { unit, least });
    this.svg = drawn("svg", { class: "chart", role: "img", "aria-label": title });
    this.root = document.createElement("figure");
    const caption = document.createElement("figcaption");
    caption.append(title, Object.assign(document.createElement("span"), { textContent: explanation }));
    this.root.append(caption, this.svg);
    new ResizeObserver(() => this.#draw()).observe(this.root);
  }

  /** `series`: [{name, plain, points, steps}], steps only where blocks are wanted; `most`: tokens that may come. */
  show(series, most) {
    this.#series = series;
    this.#most = most;
    this.#draw();
  }

  #draw() {
    const width = this.svg.clientWidth;
    if (width === 0) return;
    const [inner, tall] = [width - LEFT - RIGHT, this.#height - TOP - BOTTOM];
    const values = marks(Math.max(this.least, ...this.#series.map(({ points, steps }) => highestOf(points, steps))));
    const scale = new Scale(inner, tall, this.#most, values.at(-1));
    const area = drawn("g", { transform: `translate(${LEFT} ${TOP})` });
    for (const value of values) {
      area.append(
        drawn("path", { class: "grid", d: `M0 ${scale.y(value)}H${inner}` }),
        drawn("text", { x: -7, y: scale.y(value) + 4, "text-anchor": "end" }, label(value)),
      );
    }
    for (const { steps } of this.#series) {
      for (let colour = 0; steps && colour < NUM_COLOURS; colour += 1) {
        const blocks = steps.filter((step) => colourOf(step.number) === colour);
        area.append(drawn("path", { class: `block c${colour}`, d: scale.blocks(blocks) }));
      }
    }
    area.append(
      drawn("path", { class: "axis", d: `M0 ${tall}H${inner}` }),
      drawn("text", { x: 0, y: tall + 15 }, "0"),
      drawn("text", { x: inner, y: tall + 15, "text-anchor": "end" }, `${this.#most} tokens`),
    );
    for (const { points, plain } of this.#series) {
      area.append(drawn("path", { class: plain ? "curve plain" : "curve", d: scale.line(points) }));
    }
    this.svg.replaceChildren(drawn("title", {}, this.#told()), area);
  }

  /** The drawing in words. */
  #told() {
    return this.#series
      .filter(({ points }) => points.length)
      .map(({ name, points }) => `${name}: ${label(points.at(-1)[1])} ${this.unit} at token ${points.at(-1)[0]}`)
      .join("; ");
  }
}

function highestOf(points, steps) {
  const blocks = steps ? Math.max(0, ...steps.map((step) => step.size)) : 0;
  return points.reduce((most, [, value]) => Math.max(most, value), blocks);
}

const label = (value) => (Number.isInteger(value) ? String(value) : value.toFixed(value < 10 ? 1 : 0));
