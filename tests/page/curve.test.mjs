import assert from "node:assert/strict";
import { test } from "node:test";

import { Scale, marks, timePerToken, tokensPerStep } from "../../router/space_router/web_ui/curve.mjs";

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
