/** What the server says about itself: the line at the top, the models, how many drafts there can be. */

import { ask } from "./request.mjs";
import { element } from "./pane.mjs";

const RETRY = 1500; // milliseconds between two questions to a server that is starting

/** Ask until the model is ready; `show` gets {info, models} each time. Throws ServerError. */
export async function watch(key, show, signal) {
  for (;;) {
    const [info, models] = await Promise.all(
      ["info", "v1/models"].map(async (path) => (await ask(path, { key, signal })).json()),
    );
    show({ info, models: models.data });
    if (info.ready) return;
    await new Promise((resolve) => setTimeout(resolve, RETRY));
    signal.throwIfAborted();
  }
}

/** The line at the top, as nodes. */
export function factsLine(info) {
  if (!info.ready) return [element("b", {}, info.model_id), " is starting: it can be asked as soon as it is ready."];
  const { max_draft_length: most, draft_head: head } = info.speculation;
  const drafts = most ? `up to ${most} drafts per step${head ? " with a draft head" : ""}` : "plain decoding only";
  const where = `${info.model_dtype} on ${info.model_device_type}`;
  return [element("b", {}, info.model_id), ` · ${where} · window ${info.max_total_tokens} tokens · ${drafts}`];
}

/** Make `select` offer `options` [[value, text]], keeping what is chosen where that is still there. */
export function offer(select, options) {
  const chosen = select.value;
  select.replaceChildren(...options.map(([value, text]) => element("option", { value }, text)));
  if (options.some(([value]) => value === chosen)) select.value = chosen;
}

export function draftOptions(info) {
  const most = info.speculation.max_request ?? 0;
  const numbers = Array.from({ length: most }, (_, place) => [String(place + 1), `always ${place + 1}`]);
  return [["auto", "auto"], ...numbers, ["off", "off"]];
}
