// Dark, light, or as the system is; the choice stays in this browser.

const THEMES = ["auto", "dark", "light"];

/** @returns {string} */
export function theme() {
  const kept = localStorage.getItem("theme") ?? "";
  return THEMES.includes(kept) ? kept : "auto";
}

/** Make the page have the chosen colours. */
export function applyTheme() {
  document.documentElement.dataset.theme = theme();
}

const changed = () => dispatchEvent(new CustomEvent("theme-changed"));

/** Have what is drawn by hand follow the system, too. */
export function followSystem() {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
}

/** Choose the next one. */
export function nextTheme() {
  localStorage.setItem("theme", THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length]);
  applyTheme();
  changed();
}
