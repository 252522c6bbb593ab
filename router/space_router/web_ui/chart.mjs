/** A drawing: blocks for steps, curves for means, over the tokens of an answer. Redrawn at most once a frame. */

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
    this.svg.replaceChildren(drawn("title", {}, this.#description()), area);
  }

  /** The drawing in words. */
  #description() {
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

/** Mean tokens per step over the last `window` steps, at the end of each decode step. */
export function tokensPerStep(answer, window = 12) {
  const steps = answer.steps.filter((step) => step.number > 0);
  return steps.map((step, place) => {
    const recent = steps.slice(Math.max(0, place + 1 - window), place + 1);
    return [step.first + step.size, recent.reduce((sum, one) => sum + one.size, 0) / recent.length];
  });
}

/** Milliseconds per token over the last `window` arrivals; the first few say too little and are left out. */
export function timePerToken(answer, window = 12) {
  const points = [];
  answer.arrivals.forEach((arrival, place) => {
    const since = answer.arrivals[Math.max(0, place - window)];
    const count = arrival.to - since.to;
    if (place >= Math.min(window, 4) && count > 0) points.push([arrival.to, (arrival.at - since.at) / count]);
  });
  return points;
}

/** Where values fall in a drawing: x over tokens [0, most], y over [0, highest], the top of a drawing being 0. */
export class Scale {
  constructor(width, height, most, highest) {
    Object.assign(this, { width, height, most: Math.max(1, most), highest: highest > 0 ? highest : 1 });
  }

  x(tokens) {
    return round((tokens / this.most) * this.width);
  }

  y(value) {
    return round(this.height - (Math.min(value, this.highest) / this.highest) * this.height);
  }

  /** An SVG path through the points. */
  line(points) {
    return points.map(([tokens, value], place) => `${place ? "L" : "M"}${this.x(tokens)} ${this.y(value)}`).join("");
  }

  /** An SVG path of one block per step: as wide and as high as it has tokens. */
  blocks(steps) {
    return steps
      .map(({ first, size }) => {
        const [left, right, top] = [this.x(first), this.x(first + size), this.y(size)];
        return `M${left} ${this.height}V${top}H${right}V${this.height}Z`;
      })
      .join("");
  }
}

const round = (value) => Math.round(value * 100) / 100;

/** The marks of an axis that reaches `value`: at most four, at round numbers; the last is the axis' end. */
export function marks(value) {
  const least = Math.max(value, 1e-9) / 4;
  const unit = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * unit).find((one) => one >= least * 0.9999999);
  const count = Math.max(1, Math.ceil(value / step - 1e-7));
  return Array.from({ length: count }, (_, place) => Number(((place + 1) * step).toPrecision(6)));
}
