/** What is sent to the server, the events of its answer, and what went wrong in words that help. */

const NUMBERS = ["max_tokens", "temperature", "top_p", "seed"];

/** {path, body} of the settings as they stand in the form; empty ones are left out. `before`: the messages that a chat
 * goes on from. Throws FieldError. */
export function requestOf(settings) {
  const chat = settings.mode === "chat";
  const body = {};
  if (settings.model) body.model = settings.model;
  if (chat) {
    const system = settings.system?.trim() ? [{ role: "system", content: settings.system }] : [];
    body.messages = [...system, ...(settings.before ?? []), { role: "user", content: settings.prompt }];
  } else {
    body.prompt = settings.prompt;
  }
  for (const name of NUMBERS) {
    const value = numberOf(name, settings[name] ?? "");
    if (value !== null) body[name] = value;
  }
  if (settings.logprobs) Object.assign(body, chat ? { logprobs: true, top_logprobs: 3 } : { logprobs: 3 });
  body.speculation = /^\d+$/.test(settings.speculation) ? Number(settings.speculation) : settings.speculation;
  body.stream = true;
  body.stream_options = { include_usage: true, include_steps: true };
  body.return_token_ids = true;
  return { path: chat ? "v1/chat/completions" : "v1/completions", body };
}

export class FieldError extends Error {
  /** A setting that cannot be sent; `field` names it. */
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

function numberOf(name, text) {
  if (text.trim() === "") return null;
  const value = Number(text);
  if (!Number.isFinite(value)) throw new FieldError(name, `\`${name}\` is ${JSON.stringify(text)}; it must be a number.`);
  if (name === "seed" && !Number.isSafeInteger(value))
    throw new FieldError(name, "`seed` must be a whole number below 2^53 here; a program may send up to 2^64 - 1.");
  return value;
}

/** A seed for those who gave none: both sides of a comparison, and the curl line, need the same one. */
export const freshSeed = () => crypto.getRandomValues(new Uint32Array(1))[0];

/** The request as a line for a shell; the key stays out of it. */
export function curlOf(base, { path, body }, withKey) {
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const key = withKey ? ` \\\n  -H "Authorization: Bearer $SPACESERVE_API_KEY"` : "";
  const url = new URL(path, base).href;
  return `curl -N ${quoted(url)} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d ${quoted(JSON.stringify(body))}`;
}

export class ServerError extends Error {
  /** A refusal, in the server's own words. */
  constructor(status, message, field) {
    super(message);
    this.status = status;
    this.field = field;
  }

  /** From the body of an answer, in OpenAI's shape or TGI's, or none of them. */
  static of(status, text) {
    let content = null;
    try {
      content = JSON.parse(text);
    } catch {
      // a proxy's page, or nothing
    }
    const error = content?.error;
    if (typeof error?.message === "string") return new ServerError(status, error.message, error.param ?? null);
    if (typeof error === "string") return new ServerError(status, error, null);
    return new ServerError(status, `The server answered ${status}, without saying why.`, null);
  }
}

export const headersOf = (key) => (key ? { Authorization: `Bearer ${key}` } : {});

/** A response that is not an error. Throws ServerError, or what fetch throws. */
export async function ask(path, { key, ...options } = {}) {
  const response = await fetch(path, { ...options, headers: { ...options.headers, ...headersOf(key) } });
  if (!response.ok) throw ServerError.of(response.status, await response.text());
  return response;
}

/** Post a request; the response whose body is the stream. */
export const post = ({ path, body }, key, signal) =>
  ask(path, {
    key,
    signal,
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });

export class BrokenStream extends Error {
  /** The stream ended before its `[DONE]`. */
}

export class EventReader {
  #decoder = new TextDecoder("utf-8");
  #rest = "";
  #data = [];

  /** The data of every event that is complete with these bytes. */
  push(bytes) {
    this.#rest += this.#decoder.decode(bytes, { stream: true });
    const found = [];
    for (;;) {
      const line = /^([^\r\n]*)(\r\n|\n|\r(?!$))/.exec(this.#rest); // a \r at the end may be half of \r\n
      if (line === null) return found;
      this.#rest = this.#rest.slice(line[0].length);
      this.#take(line[1], found);
    }
  }

  #take(line, found) {
    if (line === "") {
      if (this.#data.length) found.push(this.#data.join("\n"));
      this.#data = [];
    } else if (line.startsWith("data:")) {
      this.#data.push(line.slice(5).replace(/^ /, ""));
    } // comments, ids and names of events say nothing here
  }
}

/** Every event of a response's body, as JSON, up to `[DONE]`. Throws BrokenStream where that does not come. */
export async function* events(body) {
  const reader = new EventReader();
  const source = body.getReader();
  try {
    for (;;) {
      const { done, value } = await source.read();
      if (done) throw new BrokenStream("The connection ended in the middle of the answer.");
      for (const data of reader.push(value)) {
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } finally {
    source.cancel().catch(() => {}); // whoever stops reading early closes the connection
  }
}

/** `count`: the tokens that had come. */
export function wordsFor(error, count) {
  if (error instanceof ServerError || error instanceof FieldError) return error.message;
  if (error instanceof BrokenStream || (error instanceof TypeError && count)) {
    const tokens = `${count} token${count === 1 ? "" : "s"}`;
    return `The stream broke after ${tokens}: the connection to the server was lost. What is shown is not the whole answer.`;
  }
  if (error instanceof TypeError) return "The server cannot be reached. Is it still running?"; // fetch says no more
  return `${error.name}: ${error.message}`;
}

const NAMES = { messages: "prompt", max_completion_tokens: "max_tokens" };

/** The id of the field to look at; null where it is about none. */
export const fieldOf = (error) => NAMES[error.field] ?? error.field ?? null;
