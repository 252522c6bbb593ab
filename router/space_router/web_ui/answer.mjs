/** One streamed answer as it grows: tokens, the steps that gave them, when they came. Times are milliseconds. */

export const NUM_COLOURS = 5;

/** Steps take turns with the colours, so that two steps in a row never share one. */
export const colourOf = (step) => step % NUM_COLOURS;

export class Answer {
  tokens = []; // {text, id, step, draft, logprob, top}
  steps = []; // {number, first, size}: tokens [first, first + size) came with one step; number 0 is the prefill
  arrivals = []; // {at, from, to, pieces}: tokens [from, to) came at that moment
  text = "";
  finish = null; // "stop" or "length", once it is there
  statistics = null; // the server's own, from the last event
  usage = null;
  verified = 0; // drafts tried so far
  endedAt = null;

  constructor(startedAt) {
    this.startedAt = startedAt;
  }

  /** One event. What it adds to the page: pieces [{token, text}], where `token` is an index. */
  take(event, now) {
    if (event.usage) this.usage = event.usage;
    if (event.spaceserve?.steps !== undefined) this.statistics = event.spaceserve;
    const choice = event.choices?.[0];
    if (choice === undefined) return [];
    if (choice.finish_reason) this.finish = choice.finish_reason;
    const text = choice.text ?? choice.delta?.content ?? "";
    const arrived = event.spaceserve?.tokens ?? [];
    this.verified += event.spaceserve?.verified ?? 0;
    this.text += text;
    const from = this.tokens.length;
    const pieces = arrived.map((one, place) => {
      this.#add(one, choice, place);
      return { token: from + place, text: one.text };
    });
    const rest = text.slice(arrived.reduce((sum, one) => sum + one.text.length, 0));
    if (rest && this.tokens.length) {
      this.tokens.at(-1).text += rest; // what was held back of a token that is here already
      pieces.push({ token: this.tokens.length - 1, text: rest });
    }
    if (pieces.length) this.arrivals.push({ at: now, from, to: this.tokens.length, pieces });
    return pieces;
  }

  #add(one, choice, place) {
    const entry = choice.logprobs?.content?.[place];
    const token = {
      text: one.text,
      id: choice.token_ids?.[place] ?? null,
      step: one.step,
      draft: one.draft,
      logprob: entry?.logprob ?? choice.logprobs?.token_logprobs?.[place] ?? null,
      top: entry ? entry.top_logprobs.map((other) => [other.token, other.logprob]) : topOf(choice, place),
    };
    const last = this.steps.at(-1);
    if (last?.number === one.step) last.size += 1;
    else this.steps.push({ number: one.step, first: this.tokens.length, size: 1 });
    this.tokens.push(token);
  }

  end(now) {
    this.endedAt = now;
  }

  /** The step of a token, and which of its tokens it is (0 is the first). */
  placeOf(index) {
    const { step } = this.tokens[index];
    const found = this.steps.findLast((one) => one.first <= index && one.number === step);
    return { step: found, place: index - found.first };
  }

  get accepted() {
    return this.tokens.reduce((sum, token) => sum + token.draft, 0);
  }

  /** Tokens per decode step; the prefill's token is not counted. Null before the first. */
  get tokensPerStep() {
    const decoded = this.steps.filter((step) => step.number > 0);
    return decoded.length ? decoded.reduce((sum, step) => sum + step.size, 0) / decoded.length : null;
  }

  get firstTokenTime() {
    return this.arrivals.length ? this.arrivals[0].at - this.startedAt : null;
  }

  /** Milliseconds per token, from the first arrival to the last: reading the prompt is not counted. */
  get timePerToken() {
    const [first, last] = [this.arrivals[0], this.arrivals.at(-1)];
    const count = first ? this.tokens.length - first.to : 0;
    return count > 0 && last.at > first.at ? (last.at - first.at) / count : null;
  }

  get tokensPerSecond() {
    const time = this.timePerToken;
    return time === null ? null : 1000 / time;
  }
}

function topOf(choice, place) {
  const top = choice.logprobs?.top_logprobs?.[place];
  return top ? Object.entries(top).sort((one, other) => other[1] - one[1]) : [];
}

/** Whether two answers say the same: {equal, count}, `count` tokens into them. One that was stopped is compared as
 * far as it goes. Compared are ids, and the text where the server gave none. */
export function compare(one, other) {
  const count = Math.min(one.tokens.length, other.tokens.length);
  for (let place = 0; place < count; place += 1) {
    const [left, right] = [one.tokens[place], other.tokens[place]];
    const last = place === count - 1 && !(one.finish && other.finish); // its text may not have come whole
    const same = left.id === right.id && (last || left.text === right.text);
    if (!same) return { equal: false, count: place };
  }
  const whole = one.finish !== null && other.finish !== null;
  const equal = !whole || (one.text === other.text && one.tokens.length === other.tokens.length);
  return { equal, count };
}
