// Light, dark, or as the system has it; and the colours of the style sheet for canvases.

import { byId, setAttribute } from "./dom.js";

const THEMES = { auto: "Automatic", light: "Light", dark: "Dark" };
const KEY = "rpcmp-theme";

const probe = document.createElement("i");
probe.hidden = true;

// The colour of a custom property, as light or dark makes it.
function colour(name) {
  if (!probe.isConnected) document.body.append(probe);
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

function stored() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null; // some browsers keep nothing for files
  }
}

// Calls `changed` whenever colours are others than before.
function theming(changed) {
  const button = byId("theme");
  let theme = Object.hasOwn(THEMES, stored() ?? "") ? stored() : "auto";
  const show = () => {
    document.documentElement.dataset.theme = theme;
    button.textContent = THEMES[theme];
    setAttribute(button, "aria-label", `Colours: ${THEMES[theme]}`);
    changed();
  };
  button.addEventListener("click", () => {
    const names = Object.keys(THEMES);
    theme = names[(names.indexOf(theme) + 1) % names.length];
    try {
      localStorage.setItem(KEY, theme);
    } catch {
      // it holds for this page then
    }
    show();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  show();
}

export { colour, theming };
