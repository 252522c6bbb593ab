/** Light, dark, or as the system has it; and what a browser remembers for this page. */

const THEMES = ["system", "light", "dark"];
const NAME = "spaceserve.theme";

/** Show the theme that was chosen last; `button` goes through them. */
export function theme(button) {
  const root = document.documentElement;
  const show = (chosen) => {
    if (chosen === "system") delete root.dataset.theme;
    else root.dataset.theme = chosen;
    button.textContent = `Theme: ${chosen}`;
  };
  button.addEventListener("click", () => {
    const chosen = THEMES[(THEMES.indexOf(root.dataset.theme ?? "system") + 1) % THEMES.length];
    remembered("localStorage", NAME, chosen === "system" ? "" : chosen);
    show(chosen);
  });
  const last = remembered("localStorage", NAME);
  show(THEMES.includes(last) ? last : "system");
}

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
