import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { test } from "node:test";

import { BrokenStream, EventReader, FieldError, ServerError, curlOf, events, fieldOf, requestOf, wordsFor } from "../../router/space_router/web_ui/request.mjs";

const settings = (changes) => ({ mode: "completion", prompt: "def f():", max_tokens: "8", temperature: "", top_p: "",
  seed: "", speculation: "auto", model: "", logprobs: false, ...changes });

test("settings that are empty are the server's to choose", () => {
  const { path, body } = requestOf(settings());
  assert.equal(path, "v1/completions");
  assert.deepEqual(Object.keys(body), ["prompt", "max_tokens", "speculation", "stream", "stream_options", "return_token_ids"]);
});

test("a chat has messages, with a system message where one is written", () => {
  const { path, body } = requestOf(settings({ mode: "chat", system: " ", prompt: "Hi" }));
  assert.equal(path, "v1/chat/completions");
  assert.deepEqual(body.messages, [{ role: "user", content: "Hi" }]);
  const reported = requestOf(settings({ mode: "chat", system: "Be brief.", prompt: "Hi", logprobs: true })).body;
  assert.deepEqual(reported.messages[0], { role: "system", content: "Be brief." });
  assert.deepEqual([reported.logprobs, reported.top_logprobs], [true, 3]);
});

test("a chat goes on from what was said before, and a completion does not", () => {
  const before = [{ role: "user", content: "One" }, { role: "assistant", content: "1" }];
  const { body } = requestOf(settings({ mode: "chat", system: "S", prompt: "Two", before }));
  assert.deepEqual(body.messages.map(({ content }) => content), ["S", "One", "1", "Two"]);
  assert.equal(requestOf(settings({ before })).body.messages, undefined);
});

test("a bound on the drafts is a number, and zero is one", () => {
  assert.equal(requestOf(settings({ speculation: "3" })).body.speculation, 3);
  assert.equal(requestOf(settings({ speculation: "off" })).body.speculation, "off");
  assert.equal(requestOf(settings({ seed: "0", temperature: "0" })).body.seed, 0);
});

test("what is no number is said before anything is sent, naming the field", () => {
  assert.throws(() => requestOf(settings({ temperature: "warm" })), (error) => error instanceof FieldError && error.field === "temperature");
  assert.throws(() => requestOf(settings({ seed: "12345678901234567890" })), (error) => error.field === "seed");
});

test("the curl line is one for a shell, whatever the prompt", () => {
  const prompt = `it's "$HOME" \`x\` \\n 漢\n!`;
  const line = curlOf("http://host:8080/", requestOf(settings({ prompt })), true);
  const words = JSON.parse(execFileSync("bash", ["-c", `curl() { node -e 'console.log(JSON.stringify(process.argv.slice(1)))' -- "$@"; }\nSPACESERVE_API_KEY=k3y\n${line}`]));
  assert.equal(words[1], "http://host:8080/v1/completions");
  assert.equal(words[words.lastIndexOf("-H") + 1], "Authorization: Bearer k3y");
  assert.equal(JSON.parse(words.at(-1)).prompt, prompt);
});

test("behind a proxy the path goes on from the page's own", () => {
  assert.match(curlOf("https://host/model/", requestOf(settings()), false), /'https:\/\/host\/model\/v1\/completions'/);
});

test("a refusal is reported in the server's words, in OpenAI's shape, in TGI's, and in none", () => {
  const openai = ServerError.of(400, '{"error":{"message":"`n` must be …","param":"n"}}');
  assert.deepEqual([openai.message, openai.field, openai.status], ["`n` must be …", "n", 400]);
  assert.equal(ServerError.of(422, '{"error":"Input validation error","error_type":"validation"}').message, "Input validation error");
  assert.match(ServerError.of(502, "<html>bad gateway").message, /502/);
});

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

test("a refusal speaks for itself", () => {
  assert.equal(wordsFor(new ServerError(400, "`n` must be 1.", "n"), 3), "`n` must be 1.");
  assert.equal(wordsFor(new FieldError("seed", "`seed` is none."), 0), "`seed` is none.");
});

test("a stream that broke says how far it came, whether it ended early or the network failed", () => {
  assert.match(wordsFor(new BrokenStream(""), 34), /^The stream broke after 34 tokens: /);
  assert.match(wordsFor(new TypeError("network error"), 1), /^The stream broke after 1 token: /);
});

test("without a token it is the server that cannot be reached", () => {
  assert.match(wordsFor(new TypeError("Failed to fetch"), 0), /^The server cannot be reached/);
});

test("the field to look at is the page's own, whatever the server calls it", () => {
  assert.equal(fieldOf(new ServerError(400, "", "max_completion_tokens")), "max_tokens");
  assert.equal(fieldOf(new ServerError(400, "", "messages")), "prompt");
  assert.equal(fieldOf(new ServerError(400, "", "top_p")), "top_p");
  assert.equal(fieldOf(new BrokenStream("")), null);
});
