// Vercel's AI SDK with its provider for servers that speak OpenAI's language.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

// The packages are not beside this file: run.py installs them in a folder of their own and names it.
const folder = process.env.SPACESERVE_NODE_MODULES;
const require = createRequire(folder + "/");
const load = (name) => import(pathToFileURL(require.resolve(name)));
const { APICallError, generateObject, generateText, stepCountIs, streamObject, streamText, tool } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { z } = await load("zod");

const { SPACESERVE_URL: url, SPACESERVE_KEY: apiKey, SPACESERVE_MODEL: model } = process.env;
const messages = [{ role: "user", content: "def add(a, b):" }];
const provider = (key) =>
  createOpenAICompatible({
    name: "spaceserve",
    baseURL: url + "/v1",
    apiKey: key,
    supportsStructuredOutputs: true,
    includeUsage: true,
  });
const asked = { model: provider(apiKey)(model), messages, temperature: 0, maxOutputTokens: 24, maxRetries: 0 };
const schema = z.object({ city: z.enum(["Oslo", "Paris"]), days: z.int().min(1).max(9) });
let failed = false;

console.log(`version\t${JSON.parse(readFileSync(`${folder}/node_modules/ai/package.json`)).version}`);

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

await check("generateText and streamText give the same text, with usage", async () => {
  const whole = await generateText(asked);
  assert.ok(whole.text);
  const stream = streamText(asked);
  let text = "";
  for await (const part of stream.textStream) text += part;
  assert.equal(text, whole.text);
  assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
  assert.equal(await stream.finishReason, whole.finishReason);
});

await check("generateObject and streamObject: a zod schema is kept", async () => {
  const { object } = await generateObject({ ...asked, maxOutputTokens: 96, schema });
  schema.parse(object);
  const stream = streamObject({ ...asked, maxOutputTokens: 96, schema });
  for await (const part of stream.partialObjectStream) assert.ok(part);
  assert.deepEqual(await stream.object, object);
});

await check("tools: a required call is made and run, whole and streamed", async () => {
  const ran = [];
  const forecast = tool({
    description: "The weather.",
    inputSchema: schema,
    execute: async (input) => {
      ran.push(input);
      return "rain";
    },
  });
  const options = {
    ...asked, maxOutputTokens: 96, tools: { forecast }, toolChoice: "required", stopWhen: stepCountIs(1),
    providerOptions: { spaceserve: { parallel_tool_calls: false } },
  };
  const { toolCalls, finishReason } = await generateText(options);
  assert.equal(toolCalls[0].toolName, "forecast");
  assert.equal(finishReason, "tool-calls", JSON.stringify(toolCalls));
  schema.parse(ran[0]);
  const streamed = await streamText(options).toolCalls;
  assert.deepEqual(streamed[0].input, toolCalls[0].input);
  const more = await generateText({ ...asked, tools: { forecast }, messages: [
    ...messages,
    { role: "assistant", content: [{ ...toolCalls[0], type: "tool-call" }] },
    { role: "tool", content: [{ type: "tool-result", toolCallId: toolCalls[0].toolCallId, toolName: "forecast",
      output: { type: "text", value: "rain" } }] },
  ] });
  assert.ok(more.usage.outputTokens);
});

await check("APICallError for a wrong key and a wrong field, with the status", async () => {
  for (const [key, temperature, status] of [["wrong", 0, 401], [apiKey, 9, 400]]) {
    const error = await generateText({ ...asked, model: provider(key)(model), temperature }).catch((each) => each);
    assert.ok(APICallError.isInstance(error), String(error));
    assert.equal(error.statusCode, status);
  }
});

process.exit(failed ? 1 : 0);
