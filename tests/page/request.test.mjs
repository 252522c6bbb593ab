import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { test } from "node:test";

import { FieldError, ServerError, curlOf, requestOf } from "../../router/space_router/web_ui/request.mjs";

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
  const told = requestOf(settings({ mode: "chat", system: "Be brief.", prompt: "Hi", logprobs: true })).body;
  assert.deepEqual(told.messages[0], { role: "system", content: "Be brief." });
  assert.deepEqual([told.logprobs, told.top_logprobs], [true, 3]);
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

test("a refusal is told in the server's words, in OpenAI's shape, in TGI's, and in none", () => {
  const openai = ServerError.of(400, '{"error":{"message":"`n` must be …","param":"n"}}');
  assert.deepEqual([openai.message, openai.field, openai.status], ["`n` must be …", "n", 400]);
  assert.equal(ServerError.of(422, '{"error":"Input validation error","error_type":"validation"}').message, "Input validation error");
  assert.match(ServerError.of(502, "<html>bad gateway").message, /502/);
});
