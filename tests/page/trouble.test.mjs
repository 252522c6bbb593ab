import assert from "node:assert/strict";
import { test } from "node:test";

import { FieldError, ServerError } from "../../router/space_router/web_ui/request.mjs";
import { BrokenStream } from "../../router/space_router/web_ui/sse.mjs";
import { fieldOf, wordsFor } from "../../router/space_router/web_ui/trouble.mjs";

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
