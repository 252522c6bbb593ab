// OpenAI's client for Node.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

// The packages are not beside this file: run.py installs them in a folder of their own and names it.
const require = createRequire(process.env.SPACESERVE_NODE_MODULES + "/");
const { default: OpenAI } = await import(pathToFileURL(require.resolve("openai")));

const { SPACESERVE_URL: url, SPACESERVE_NARROW_URL: narrowUrl, SPACESERVE_KEY: apiKey, SPACESERVE_MODEL: model } = process.env;
const prompt = "def fibonacci(n):";
const messages = [{ role: "user", content: "def add(a, b):" }];
const client = new OpenAI({ baseURL: url + "/v1", apiKey, maxRetries: 0 });
let failed = false;

const schema = {
  type: "object",
  properties: { city: { enum: ["Oslo", "Paris"] }, days: { type: "integer", minimum: 1, maximum: 9 } },
  required: ["city", "days"],
  additionalProperties: false,
};

function isAnswer(text) {
  const { city, days, ...rest } = JSON.parse(text);
  return ["Oslo", "Paris"].includes(city) && days >= 1 && days <= 9 && Object.keys(rest).length === 0;
}

const { VERSION } = await import(pathToFileURL(require.resolve("openai/version")));
console.log(`version\t${VERSION}`);

async function check(what, block) {
  try {
    await block();
    console.log(`ok\t${what}`);
  } catch (error) {
    console.error(error);
    console.log(`failed\t${what}`);
    failed = true;
  }
}

async function raises(kind, call) {
  try {
    await call();
  } catch (error) {
    assert.ok(error instanceof kind, `${error?.constructor?.name} is not ${kind.name}: ${error}`);
    return error;
  }
  assert.fail(`${kind.name} was not raised`);
}

async function all(stream) {
  const found = [];
  for await (const one of stream) found.push(one);
  return found;
}

async function until(holds, what) {
  const limit = Date.now() + 60_000;
  while (!(await holds())) {
    assert.ok(Date.now() < limit, `${what}: not within 60 s`);
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}

async function idle() {
  const answer = await fetch(url + "/load", { headers: { authorization: `Bearer ${apiKey}` } });
  return (await answer.json()).num_running === 0;
}

await check("completions: a stream joins to the whole answer, with its usage", async () => {
  const asked = { model, prompt, max_tokens: 40, temperature: 0.8, seed: 7 };
  const whole = await client.completions.create(asked);
  const chunks = await all(await client.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } }));
  const text = chunks.map((chunk) => chunk.choices[0]?.text ?? "").join("");
  assert.ok(text.length > 0);
  assert.equal(text, whole.choices[0].text);
  assert.deepEqual(chunks.at(-1).usage, whole.usage);
});

await check("chat: a stream joins to the whole answer; the client's own accumulator agrees", async () => {
  const asked = { model, messages, max_completion_tokens: 24, temperature: 0 };
  const whole = await client.chat.completions.create(asked);
  const parts = await all(await client.chat.completions.create({ ...asked, stream: true }));
  const text = parts.map((part) => part.choices[0].delta.content ?? "").join("");
  assert.ok(text.length > 0);
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(parts[0].choices[0].delta.role, "assistant");
  const final = await client.chat.completions.stream(asked).finalChatCompletion();
  assert.equal(final.choices[0].message.content, text);
  assert.equal(final.choices[0].finish_reason, whole.choices[0].finish_reason);
});

await check("log-probabilities belong to the tokens", async () => {
  const answer = await client.chat.completions.create({ model, messages, max_tokens: 12, temperature: 0, logprobs: true, top_logprobs: 2 });
  const { content } = answer.choices[0].logprobs;
  assert.equal(content.map((entry) => entry.token).join(""), answer.choices[0].message.content);
  assert.ok(content.every((entry) => entry.logprob === entry.top_logprobs[0].logprob && entry.logprob <= 0));
});

await check("structured outputs and tools: the client's own accumulator joins a streamed call", async () => {
  const asked = { model, messages, max_completion_tokens: 96, temperature: 0 };
  const format = { type: "json_schema", json_schema: { name: "trip", schema, strict: true } };
  const shaped = await client.chat.completions.parse({ ...asked, response_format: format });
  assert.ok(isAnswer(shaped.choices[0].message.content));
  const tools = [{ type: "function", function: { name: "forecast", parameters: schema } }];
  const calling = { ...asked, tools, tool_choice: "required", parallel_tool_calls: false, seed: 1 };
  const whole = (await client.chat.completions.create(calling)).choices[0];
  assert.equal(whole.finish_reason, "tool_calls");
  assert.equal(whole.message.tool_calls.length, 1);
  assert.ok(isAnswer(whole.message.tool_calls[0].function.arguments));
  const joined = (await client.chat.completions.stream(calling).finalChatCompletion()).choices[0].message.tool_calls;
  assert.deepEqual(joined.map((call) => [call.id, call.function.name, call.function.arguments]),
    whole.message.tool_calls.map((call) => [call.id, call.function.name, call.function.arguments]));
});

await check("responses: a stream ends with the whole answer", async () => {
  const asked = { model, input: messages[0].content, max_output_tokens: 24, temperature: 0, store: false };
  const whole = await client.responses.create(asked);
  const events = await all(await client.responses.create({ ...asked, stream: true }));
  const deltas = events.filter((event) => event.type === "response.output_text.delta").map((event) => event.delta);
  assert.ok(whole.output_text.length > 0);
  assert.equal(deltas.join(""), whole.output_text);
  assert.equal(events.at(-1).type, `response.${whole.status}`);
});

await check("models are listed", async () => {
  assert.deepEqual((await all(client.models.list())).map((card) => card.id), [model]);
});

await check("BadRequestError, NotFoundError, AuthenticationError", async () => {
  const wrong = await raises(OpenAI.BadRequestError, () => client.completions.create({ model, prompt, temperature: 3 }));
  assert.equal(wrong.param, "temperature");
  const refused = await raises(OpenAI.BadRequestError, () => client.completions.create({ model, prompt, top_p: 7, stream: true }));
  assert.equal(refused.param, "top_p");
  const missing = await raises(OpenAI.NotFoundError, () => client.completions.create({ model: "gpt-9", prompt }));
  assert.equal(missing.code, "model_not_found");
  await raises(OpenAI.AuthenticationError, () => client.withOptions({ apiKey: "wrong" }).models.list());
});

await check("RateLimitError says when to come back", async () => {
  const narrow = client.withOptions({ baseURL: narrowUrl + "/v1" });
  const busy = await narrow.completions.create({ model, prompt, max_tokens: 900, stream: true, ignore_eos: true });
  for await (const _ of busy) {
    const full = await raises(OpenAI.RateLimitError, () => narrow.completions.create({ model, prompt }));
    assert.equal(full.code, "queue_full");
    assert.match(full.headers.get("retry-after"), /^[0-9]+$/);
    break;
  }
});

await check("cancellation: an aborted stream ends; one cancelled by its id raises APIError", async () => {
  const endless = { model, prompt, max_tokens: 900, stream: true, ignore_eos: true };
  const left = await client.completions.create(endless);
  for await (const _ of left) break;
  await until(idle, "a stream that was left ends");
  const reported = await client.completions.create({ ...endless, n: 8, request_id: "mine" });
  const error = await raises(OpenAI.APIError, async () => {
    let begun = false;
    for await (const _ of reported) {
      if (!begun) await client.delete("/requests/mine");
      begun = true;
    }
  });
  assert.equal(error.code, "cancelled");
});

process.exit(failed ? 1 : 0);
