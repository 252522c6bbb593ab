/** What a browser keeps for this page: `localStorage` for good, `sessionStorage` until the tab is closed. */

/** The text kept under a name, or null; with a `value`, that is kept instead, and "" forgets it. */
export function remembered(storage, name, value) {
  try {
    if (value === undefined) return window[storage].getItem(name);
    if (value) window[storage].setItem(name, value);
    else window[storage].removeItem(name);
  } catch {
    // forbidden: then nothing is remembered
  }
  return null;
}
