/** Server-sent events out of bytes that may be cut anywhere, inside a character too. */

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
