/** The page: settings in, one or two answers out, and what can be seen in them. */

import { compare } from "./answer.mjs";
import { Chart, timePerToken, tokensPerStep } from "./chart.mjs";
import { draftOptions, factsLine, offer, watch } from "./facts.mjs";
import { remembered, theme } from "./theme.mjs";
import { Pane, description, element } from "./pane.mjs";
import { ServerError, curlOf, fieldOf, freshSeed, requestOf, wordsFor } from "./request.mjs";
import { replay, stream } from "./run.mjs";
import { Thread } from "./thread.mjs";

const $ = (id) => document.getElementById(id);
const form = $("ask");

/** For a chat model; the embedded `demo` writes code, and has examples of its own. */
const EXAMPLES = {
  completion: [
    ["a story", "Once upon a time, in a village by the sea,"],
    ["a list", "Three reasons to learn a new language:\n\n1."],
  ],
  chat: [
    ["a question", "Why is the sky blue?"],
    ["a letter", "Write a short letter that invites a friend to a picnic by the lake."],
    ["code", "Write a Python function that counts how often each word appears in a text."],
  ],
};

const DEMO = "spaceserve-demo";
const DEMO_EXAMPLES = {
  completion: [
    ["a class", 'class Account:\n    """A bank account."""\n\n    def __init__(self, name, number, balance=0):\n'],
    ["a function", 'def count_words(text):\n    """Count how often each word appears in a text."""\n    counts = {}\n'],
    ["a table", "SQUARES = {\n    1: 1,\n    2: 4,\n    3: 9,\n    4: 16,\n"],
  ],
  chat: [
    ["a class", "Write a Python class for a bank account."],
    ["a function", "Write a Python function that counts the words of a text."],
  ],
};

const stepChart = new Chart("Tokens per step", "a block is a step, the line the mean of the last 12", "tokens per step", 4);
const timeChart = new Chart("Time per token", "milliseconds, mean of the last 12 arrivals", "ms", 4);
$("charts").append(stepChart.root, timeChart.root);

const thread = new Thread($("thread"), showCurl);
const HINT = $("inspector").textContent;

let sides = []; // {name, plain, pane, answer, record} of what is shown
let question = null; // the message that is answered, in a chat
let controller = null; // of what is running
let facts = new AbortController(); // of the questions about the server
let examples = DEMO_EXAMPLES;
let touched = false; // whether the user has chosen what to ask
let most = Number($("max_tokens").value); // tokens that the drawings have room for
let drawing = false;

/* --- settings ---------------------------------------------------------------------------------------------------- */

function settings() {
  const { beside, logprobs, ...rest } = Object.fromEntries(new FormData(form));
  return { ...rest, beside: Boolean(beside), logprobs: Boolean(logprobs), before: thread.messages };
}

/** Whether there is something to compare with: drafts are on. */
const compared = (given) => given.beside && given.speculation !== "off";

/** What depends on completion or chat. */
function showMode() {
  const mode = form.elements.mode.value;
  $("system-field").hidden = mode !== "chat";
  $("thread").hidden = mode !== "chat" || thread.messages.length === 0;
  $("prompt-label").textContent = mode === "chat" ? "Message" : "Prompt";
  const buttons = examples[mode].map(([name, text]) => {
    const button = element("button", { type: "button" }, name);
    button.addEventListener("click", () => {
      touched = true;
      $("prompt").value = text;
      $("prompt").focus();
      showSettings();
    });
    return button;
  });
  $("examples").replaceChildren(...buttons);
}

function showSettings() {
  $("beside").disabled = $("speculation").value === "off";
  showCurl();
}

let isKeyed = false; // whether the server has asked for a key

function showCurl() {
  try {
    const request = requestOf(settings());
    if (!("seed" in request.body) && sides.length) request.body.seed = sides[0].seed;
    $("curl").textContent = curlOf(document.baseURI, request, isKeyed || $("key").value !== "");
  } catch {
    $("curl").textContent = "The settings above cannot be sent as they are.";
  }
}

/* --- running ----------------------------------------------------------------------------------------------------- */

async function run() {
  if (controller !== null) return;
  touched = true;
  complain(null);
  let request;
  const given = settings();
  try {
    request = requestOf(given);
  } catch (error) {
    return void complain(error);
  }
  request.body.seed ??= freshSeed();
  most = request.body.max_tokens || 1;
  const shown = given.mode === "completion" ? given.prompt : "";
  const chosen = { name: titleOf(given.speculation), plain: given.speculation === "off", request };
  const plain = { name: "Plain decoding", plain: true, request: { ...request, body: { ...request.body, speculation: "off" } } };
  question = given.mode === "chat" ? given.prompt : null;
  arrange(compared(given) ? [plain, chosen] : [chosen], request.body.seed, shown);
  showCurl();
  await busy(async (signal) => {
    for (const [place, side] of sides.entries()) {
      tell(sides.length > 1 ? `${place + 1} of 2: ${side.name.toLowerCase()} …` : "Running …");
      await runSide(side, signal);
    }
  });
  finish();
}

const titleOf = (speculation) =>
  speculation === "off" ? "Plain decoding" : speculation === "auto" ? "With drafts" : `With ${speculation} drafts a step`;

/** New panes for the sides; of two, none may find the prompt computed by the other. */
function arrange(wanted, seed, prompt) {
  sides = wanted.map((side) => {
    const body = wanted.length > 1 ? { ...side.request.body, cache_salt: crypto.randomUUID?.() ?? String(freshSeed()) } : side.request.body;
    const pane = new Pane(side.name, { plain: side.plain, prompt, inspect });
    return { ...side, seed, pane, request: { ...side.request, body }, answer: null, record: [] };
  });
  $("panes").replaceChildren(...sides.map(({ pane }) => pane.root));
  $("replay").hidden = $("reply").hidden = true;
  $("inspector").textContent = HINT;
  if ($("output").getBoundingClientRect().top > innerHeight * 0.7) $("output").scrollIntoView();
  for (const { pane } of sides.slice(1)) pane.say("waits for the other");
}

async function runSide(side, signal) {
  const { pane } = side;
  try {
    await stream(side.request, {
      key: $("key").value,
      signal,
      begun: (answer, record) => {
        Object.assign(side, { answer, record });
        pane.begin(answer);
      },
      came: (pieces) => {
        pane.add(pieces);
        soon();
      },
    });
    const end = side.answer.finish === "length" ? "max tokens reached" : "came to its end";
    pane.say(`first token after ${side.answer.firstTokenTime?.toFixed(0)} ms, ${end}`);
  } catch (error) {
    pane.say(signal.aborted ? "stopped by you" : side.answer?.tokens.length ? "broken off" : "no answer");
    throw error;
  } finally {
    pane.end();
  }
}

/** Do something that the stop button ends. */
async function busy(work) {
  controller = new AbortController();
  $("run").disabled = true;
  $("stop").disabled = false;
  const { signal } = controller;
  try {
    await work(signal);
  } catch (error) {
    if (!signal.aborted) complain(error);
  } finally {
    const focused = document.activeElement === $("stop");
    controller = null;
    $("run").disabled = false;
    $("stop").disabled = true;
    if (focused) $("run").focus();
  }
}

function finish() {
  most = Math.max(...sides.map(({ answer }) => answer?.tokens.length ?? 0)) || most;
  draw();
  const [one, other] = sides.map(({ answer }) => answer);
  $("reply").hidden = question === null || !sides.at(-1).answer?.finish;
  if (!one?.tokens.length) return tell("No token came.");
  if (sides.length === 1) return tell(summary(one));
  if (!other?.tokens.length) return tell("There is nothing to compare: the second answer has no token.");
  const { equal, count } = compare(one, other);
  const ratio = one.timePerToken && other.timePerToken ? one.timePerToken / other.timePerToken : null;
  const speed = ratio === null ? "" : `${ratio.toFixed(2)} times the speed of plain decoding. `;
  const both = one.finish && other.finish;
  const said = equal
    ? element("span", { class: "yes" }, `The two texts are equal${both ? `, all ${count} tokens` : ` as far as both go, ${count} tokens`}.`)
    : element("span", { class: "no" }, `The two texts differ from token ${count + 1} on.`);
  tell(speed, said, element("small", {}, ` Seed ${sides[0].seed}.`));
  $("replay").hidden = !both;
}

function summary(answer) {
  const count = answer.tokens.length;
  const rate = answer.statistics?.tokens_per_step ?? answer.tokensPerStep;
  const steps = answer.steps.filter((step) => step.number > 0).length;
  const per = rate === null ? "" : ` ${rate.toFixed(2)} tokens per step.`;
  return `${count} token${count === 1 ? "" : "s"} in ${steps} step${steps === 1 ? "" : "s"}.${per} Seed ${sides[0].seed}.`;
}

/** Go on from the answer: the next message comes behind it. */
function reply() {
  $("reply").hidden = true;
  $("prompt").value = "";
  $("prompt").focus();
  thread.add(question, sides.at(-1).answer.text);
}

async function replayBoth() {
  if (controller !== null) return;
  tell("Both at once, as fast as each came.");
  const shown = sides.map((side) => side.answer);
  await busy(async (signal) => {
    await Promise.all(
      sides.map(async (side) => {
        const { pane } = side;
        const begun = (answer) => {
          side.answer = answer;
          pane.begin(answer);
        };
        const came = (pieces) => {
          pane.add(pieces);
          soon();
        };
        const whole = await replay(side.record, { signal, begun, came });
        if (!whole) return;
        pane.end();
        pane.say(`${(side.record.at(-1).at / 1000).toFixed(2)} s`);
      }),
    );
  });
  sides.forEach((side, place) => restore(side, shown[place]));
  finish();
}

/** The whole answer again, after a replay that may have been stopped. */
function restore(side, answer) {
  if (side.answer.tokens.length === answer.tokens.length) {
    side.answer = side.pane.answer = answer;
    return;
  }
  side.answer = answer;
  side.pane.begin(answer);
  side.pane.add(answer.arrivals.flatMap(({ pieces }) => pieces));
  side.pane.end();
}

/* --- showing ----------------------------------------------------------------------------------------------------- */

/** Draw with the next frame. */
function soon() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    draw();
  });
}

function draw() {
  const begun = sides.filter(({ answer }) => answer !== null);
  for (const { pane } of begun) pane.count();
  const room = Math.max(most, ...begun.map(({ answer }) => answer.tokens.length));
  const series = (of) => begun.map(({ name, plain, answer }) => ({ name, plain: plain && sides.length > 1, points: of(answer) }));
  const blocks = begun.find((side) => side === sides.at(-1))?.answer.steps.filter((step) => step.number > 0);
  stepChart.show(series(tokensPerStep).map((one, place) => (place === sides.length - 1 ? { ...one, steps: blocks } : one)), room);
  timeChart.show(series(timePerToken), room);
}

function tell(...said) {
  $("verdict").replaceChildren(...said);
}

/** Describe a token, and frame the one at its place in the other answer. */
function inspect(pane, index) {
  for (const side of sides) if (side.pane !== pane) side.pane.mark(index);
  if (index !== null) $("inspector").replaceChildren(...description(pane.answer, index));
}

/** Say what went wrong, in words that help; null: nothing. */
function complain(error) {
  for (const marked of form.querySelectorAll("[aria-invalid]")) marked.removeAttribute("aria-invalid");
  $("error").hidden = error === null;
  if (error === null) return;
  const count = sides.findLast(({ answer }) => answer !== null)?.answer.tokens.length ?? 0;
  $("error").textContent = wordsFor(error, count);
  if (error instanceof ServerError && error.status === 401) {
    $("key-box").open = true;
    $("key").focus();
    return;
  }
  const input = document.getElementById(fieldOf(error));
  if (input !== null && form.contains(input)) {
    input.setAttribute("aria-invalid", "true");
    input.focus();
  }
}

/* --- the server ------------------------------------------------------------------------------ */

async function showServer() {
  facts.abort();
  facts = new AbortController();
  try {
    await watch($("key").value, showFacts, facts.signal);
  } catch (error) {
    if (error.name === "AbortError") return;
    $("facts").textContent = error.status === 401 ? "This server asks for an API key." : wordsFor(error, 0);
    if (error.status === 401) {
      $("key-box").open = true;
      isKeyed = true;
      showCurl();
    }
  }
}

function showFacts({ info, models }) {
  $("facts").replaceChildren(...factsLine(info));
  const acceptance = info.synthetic_acceptance;
  $("synthetic").hidden = !acceptance;
  if (acceptance) $("synthetic").textContent = `Synthetic acceptance: drafts are accepted at fixed rates (${acceptance.join(", ")}). Speeds say nothing about the checkpoint.`;
  $("fallback").hidden = !info.model_fallback;
  if (info.model_fallback) $("fallback").textContent = info.model_fallback;
  offer($("model"), models.map(({ id, parent }) => [id, parent ? `${id} (adapter)` : id]));
  offer($("speculation"), draftOptions(info));
  const chat = form.querySelector("[value=chat]");
  chat.disabled = !info.chat_template;
  chat.parentElement.title = info.chat_template ? "" : "This model has no chat template: start the server with --chat-template.";
  begin(info);
  showSettings();
}

/** Until something is typed or chosen: a chat model is asked in a chat, with its first example. */
function begin(info) {
  if (touched) return;
  examples = info.model_id === DEMO ? DEMO_EXAMPLES : EXAMPLES;
  form.elements.mode.value = info.chat_template && info.model_id !== DEMO ? "chat" : "completion";
  $("prompt").value = examples[form.elements.mode.value][0][1];
  showMode();
}

/* --- wiring ------------------------------------------------------------------------------------------------------ */

form.addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
form.addEventListener("input", () => {
  touched = true;
  showSettings();
});
for (const radio of form.elements.mode) radio.addEventListener("change", showMode);
$("stop").addEventListener("click", () => controller?.abort());
$("replay").addEventListener("click", replayBoth);
$("reply").addEventListener("click", reply);
$("key").addEventListener("change", () => {
  remembered("sessionStorage", "spaceserve.key", $("key").value);
  showServer();
});
$("copy").addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText($("curl").textContent);
    $("copy").textContent = "Copied";
  } catch {
    getSelection().selectAllChildren($("curl")); // without https a page may not write to the clipboard
    $("copy").textContent = "Selected: press Ctrl+C";
  }
  setTimeout(() => ($("copy").textContent = "Copy"), 2500);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    form.requestSubmit();
  } else if (event.key === "Escape" && controller !== null) {
    controller.abort();
  }
});

$("prompt").value = examples.completion[0][1];
$("key").value = remembered("sessionStorage", "spaceserve.key") ?? "";
theme($("theme"));
showMode();
showSettings();
draw();
showServer();
