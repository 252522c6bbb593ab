/** What went wrong, in words that help, and the field it is about. */

import { FieldError, ServerError } from "./request.mjs";
import { BrokenStream } from "./sse.mjs";

/** `count`: the tokens that had come. */
export function wordsFor(error, count) {
  if (error instanceof ServerError || error instanceof FieldError) return error.message;
  if (error instanceof BrokenStream || (error instanceof TypeError && count)) {
    const tokens = `${count} token${count === 1 ? "" : "s"}`;
    return `The stream broke after ${tokens}: the connection to the server was lost. What is shown is not the whole answer.`;
  }
  if (error instanceof TypeError) return "The server cannot be reached. Is it still running?"; // fetch says no more
  return `${error.name}: ${error.message}`;
}

const NAMES = { messages: "prompt", max_completion_tokens: "max_tokens" };

/** The id of the field to look at; null where it is about none. */
export const fieldOf = (error) => NAMES[error.field] ?? error.field ?? null;
