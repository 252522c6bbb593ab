/** The numbers behind the drawings. A point is [tokens so far, value]. */

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
