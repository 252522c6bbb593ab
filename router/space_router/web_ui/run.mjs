/** One request from its first byte to its last, with everything that came and when, so that it can be shown again. */

import { Answer } from "./answer.mjs";
import { ServerError, events, post } from "./request.mjs";

/** Stream an answer. `begun(answer)` is called when the request is sent, `came(pieces)` at each event that adds to it.
 * Resolves to {answer, record}. Throws ServerError, BrokenStream, or what fetch throws; the answer stays as it is. */
export async function stream(request, { key, signal, begun, came }) {
  const answer = new Answer(performance.now());
  const record = [];
  begun(answer, record);
  try {
    const response = await post(request, key, signal);
    for await (const event of events(response.body)) {
      const now = performance.now();
      if (event.error) throw ServerError.of(response.status, JSON.stringify(event));
      record.push({ event, at: now - answer.startedAt });
      came(answer.take(event, now));
    }
  } finally {
    answer.end(performance.now());
  }
  return { answer, record };
}

/** Show a record again, as fast as it came. `came(answer, pieces)`; resolves to false where `signal` ended it. */
export async function replay(record, { signal, begun, came }) {
  const answer = new Answer(0);
  begun(answer);
  const since = performance.now();
  for (const { event, at } of record) {
    while (performance.now() - since < at) {
      await new Promise(requestAnimationFrame);
      if (signal.aborted) return false;
    }
    came(answer.take(event, at));
  }
  return true;
}
