import assert from "node:assert/strict";
import { test } from "node:test";

import { Answer, NUM_COLOURS, colourOf, compare } from "../../router/space_router/web_ui/answer.mjs";
import { Scale, marks, timePerToken, tokensPerStep } from "../../router/space_router/web_ui/chart.mjs";

/** An event of a completion: tokens are [text, step, draft], ids count on from `id`. */
function event(tokens, { id = 0, verified = 0, finish = null, rest = "", ...more } = {}) {
  const text = tokens.map(([one]) => one).join("") + rest;
  return {
    choices: [{ index: 0, text, finish_reason: finish, token_ids: tokens.map((_, place) => id + place), ...more }],
    spaceserve: { tokens: tokens.map(([one, step, draft]) => ({ text: one, step, draft })), verified },
  };
}

function answerOf(...timed) {
  const answer = new Answer(0);
  for (const [now, one] of timed) answer.take(one, now);
  return answer;
}

const RUN = [
  [100, event([["a", 0, false]])],
  [120, event([["b", 1, true], ["c", 1, true], ["d", 1, false]], { id: 1, verified: 3 })],
  [130, event([["e", 2, false]], { id: 4, verified: 3 })],
  [150, event([["f", 3, true], ["g", 3, false]], { id: 5, verified: 1, finish: "length" })],
];

test("tokens of one event share a step, and their place in it is known", () => {
  const answer = answerOf(...RUN);
  assert.equal(answer.text, "abcdefg");
  assert.deepEqual(answer.steps, [
    { number: 0, first: 0, size: 1 },
    { number: 1, first: 1, size: 3 },
    { number: 2, first: 4, size: 1 },
    { number: 3, first: 5, size: 2 },
  ]);
  assert.deepEqual(answer.placeOf(3), { step: answer.steps[1], place: 2 });
  assert.deepEqual(answer.tokens.map((token) => token.draft), [false, true, true, false, false, true, false]);
});

test("the figures count decode steps, and time from the first arrival on", () => {
  const answer = answerOf(...RUN);
  assert.equal(answer.tokensPerStep, 2); // 6 tokens in 3 steps; the prompt's own is not counted
  assert.equal(answer.firstTokenTime, 100);
  assert.equal(answer.timePerToken, 50 / 6);
  assert.equal(Math.round(answer.tokensPerSecond), 120);
  assert.deepEqual([answer.accepted, answer.verified], [3, 7]);
});

test("before anything came there are no figures", () => {
  const answer = answerOf(RUN[0]);
  assert.deepEqual([answer.tokensPerStep, answer.timePerToken, answer.tokensPerSecond], [null, null, null]);
  assert.equal(new Answer(0).firstTokenTime, null);
});

test("neighbouring steps never share a colour", () => {
  for (let step = 0; step < 3 * NUM_COLOURS; step += 1) assert.notEqual(colourOf(step), colourOf(step + 1));
});

test("tokens of several steps in one event, after text was held back, keep their steps", () => {
  const answer = answerOf([10, event([["a", 0, false]])], [30, event([["", 1, false], ["é", 2, false]])]);
  assert.deepEqual(answer.steps.map(({ number, size }) => [number, size]), [[0, 1], [1, 1], [2, 1]]);
});

test("text that comes after its token is added to it", () => {
  const answer = answerOf([10, event([["S", 0, false]])]);
  const pieces = answer.take(event([], { rest: "TO" }), 20);
  assert.deepEqual(pieces, [{ token: 0, text: "TO" }]);
  assert.equal(answer.tokens[0].text, "STO");
  assert.equal(answer.text, "STO");
});

test("pieces say which token each text belongs to", () => {
  const answer = new Answer(0);
  answer.take(RUN[0][1], 1);
  assert.deepEqual(answer.take(RUN[1][1], 2), [{ token: 1, text: "b" }, { token: 2, text: "c" }, { token: 3, text: "d" }]);
});

test("log-probabilities are read in both of OpenAI's shapes", () => {
  const lists = { tokens: ["a"], token_logprobs: [-0.5], top_logprobs: [{ b: -2, a: -0.5 }] };
  const entry = { token: "a", logprob: -0.5, top_logprobs: [{ token: "a", logprob: -0.5 }, { token: "b", logprob: -2 }] };
  for (const logprobs of [lists, { content: [entry] }]) {
    const [token] = answerOf([1, event([["a", 0, false]], { logprobs })]).tokens;
    assert.equal(token.logprob, -0.5);
    assert.deepEqual(token.top, [["a", -0.5], ["b", -2]]);
  }
});

test("a chat's events are read like a completion's", () => {
  const reported = { tokens: [{ text: "Hi", step: 0, draft: false }], verified: 0 };
  const answer = answerOf([1, { choices: [{ delta: { role: "assistant", content: "Hi" }, token_ids: [5] }], spaceserve: reported }]);
  assert.deepEqual([answer.text, answer.tokens[0].id], ["Hi", 5]);
});

test("the server's own statistics come with the last events", () => {
  const answer = answerOf(...RUN);
  assert.equal(answer.statistics, null);
  answer.take({ choices: [], usage: { completion_tokens: 7 }, spaceserve: { steps: 3, tokens_per_step: 2 } }, 160);
  assert.equal(answer.statistics.tokens_per_step, 2);
  assert.equal(answer.usage.completion_tokens, 7);
  assert.equal(answer.arrivals.length, 4); // an event without text is no arrival
});

test("two answers are equal when ids and texts are, whatever the steps", () => {
  const plain = answerOf(...[..."abcdefg"].map((letter, place) => [
    place, event([[letter, place, false]], { id: place, finish: place === 6 ? "length" : null }),
  ]));
  assert.deepEqual(compare(plain, answerOf(...RUN)), { equal: true, count: 7 });
});

test("the first token that differs is named", () => {
  const other = answerOf(...RUN);
  other.tokens[4] = { ...other.tokens[4], id: 99 };
  assert.deepEqual(compare(answerOf(...RUN), other), { equal: false, count: 4 });
  const shorter = answerOf(RUN[0], [120, event([["b", 1, false]], { id: 1, finish: "stop" })]);
  assert.deepEqual(compare(answerOf(...RUN), shorter), { equal: false, count: 2 });
});

test("an answer that was stopped is compared as far as it goes", () => {
  assert.deepEqual(compare(answerOf(...RUN), answerOf(...RUN.slice(0, 2))), { equal: true, count: 4 });
});

const steps = [
  { number: 0, first: 0, size: 1 },
  { number: 1, first: 1, size: 3 },
  { number: 2, first: 4, size: 1 },
  { number: 3, first: 5, size: 2 },
];
const arrivals = [
  { at: 100, from: 0, to: 1 },
  { at: 120, from: 1, to: 4 },
  { at: 130, from: 4, to: 5 },
  { at: 150, from: 5, to: 7 },
];

test("tokens per step: the mean of the last steps, at the end of each; the prompt's step is none", () => {
  assert.deepEqual(tokensPerStep({ steps }, 2), [[4, 3], [5, 2], [7, 1.5]]);
  assert.deepEqual(tokensPerStep({ steps: [] }), []);
});

test("time per token: from an earlier arrival to this one, over the tokens between", () => {
  assert.deepEqual(timePerToken({ arrivals }, 1), [[4, 20 / 3], [5, 10], [7, 10]]);
  assert.deepEqual(timePerToken({ arrivals: [...arrivals, { at: 160, from: 7, to: 9 }] }, 9), [[9, 60 / 8]]);
  assert.deepEqual(timePerToken({ arrivals }), []); // too few to say anything
});

test("a drawing begins at its lower left and ends at its upper right", () => {
  const scale = new Scale(200, 100, 10, 5);
  assert.equal(scale.line([[0, 0], [5, 2.5], [10, 5]]), "M0 100L100 50L200 0");
  assert.equal(scale.line([]), "");
  assert.equal(scale.y(7), 0); // nothing is drawn outside
});

test("a step is as wide and as high as it has tokens", () => {
  const scale = new Scale(70, 30, 7, 3);
  assert.equal(scale.blocks([steps[1], steps[3]]), "M10 30V0H40V30ZM50 30V10H70V30Z");
});

test("an axis has at most four marks, at round numbers, and reaches the value", () => {
  assert.deepEqual(marks(4), [1, 2, 3, 4]);
  assert.deepEqual(marks(4.1), [2, 4, 6]);
  assert.deepEqual(marks(33), [10, 20, 30, 40]);
  assert.deepEqual(marks(0.25), [0.1, 0.2, 0.3]);
  for (let value = 0.01; value < 5000; value *= 1.07) {
    const found = marks(value);
    assert.ok(found.length <= 4 && found.at(-1) >= value * 0.999999, `${value}: ${found}`);
  }
});
