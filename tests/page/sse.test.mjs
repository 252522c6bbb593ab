import assert from "node:assert/strict";
import { test } from "node:test";

import { BrokenStream, EventReader, events } from "../../router/space_router/web_ui/sse.mjs";

const bytes = (text) => new TextEncoder().encode(text);

/** A body that arrives in these pieces. */
const body = (...pieces) =>
  new ReadableStream({
    start(controller) {
      for (const piece of pieces) controller.enqueue(piece);
      controller.close();
    },
  });

async function all(source) {
  const found = [];
  for await (const event of events(source)) found.push(event);
  return found;
}

test("events are the same wherever the bytes are cut, inside a character too", () => {
  const whole = bytes('data: {"text":"né 🙂"}\n\ndata: {"text":"漢"}\r\n\r\n: a comment\n\ndata: [DONE]\n\n');
  for (let cut = 0; cut <= whole.length; cut += 1) {
    const reader = new EventReader();
    const found = [...reader.push(whole.slice(0, cut)), ...reader.push(whole.slice(cut))];
    assert.deepEqual(found, ['{"text":"né 🙂"}', '{"text":"漢"}', "[DONE]"]);
  }
});

test("byte by byte is as good as at once", () => {
  const reader = new EventReader();
  const found = [...bytes('data: {"a":"é"}\r\n\r\ndata:x\rdata: y\r\r')].flatMap((byte) => reader.push(Uint8Array.of(byte)));
  found.push(...reader.push(bytes("\n")));
  assert.deepEqual(found, ['{"a":"é"}', "x\ny"]);
});

test("a stream ends at [DONE], and what is behind it is not read", async () => {
  assert.deepEqual(await all(body(bytes('data: {"n":1}\n\ndata: [DONE]\n\ndata: {"n":2}\n\n'))), [{ n: 1 }]);
});

test("a stream that ends without [DONE] is a broken one, after the events that came", async () => {
  const seen = [];
  const reading = async () => {
    for await (const event of events(body(bytes('data: {"n":1}\n\ndata: {"n":')))) seen.push(event);
  };
  await assert.rejects(reading, BrokenStream);
  assert.deepEqual(seen, [{ n: 1 }]);
});

test("whoever stops reading cancels the body", async () => {
  let cancelled = false;
  const endless = new ReadableStream({
    pull: (controller) => controller.enqueue(bytes('data: {"n":1}\n\n')),
    cancel: () => (cancelled = true),
  });
  for await (const event of events(endless)) if (event.n === 1) break;
  assert.equal(cancelled, true);
});
