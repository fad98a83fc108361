// The theme button, which switches between the system's theme, light and dark.
import { byId } from "./dom.mjs";

const KEY = "oncelog-theme";
const ORDER = ["system", "light", "dark"];
const SIGNS = { system: "◐", light: "☀", dark: "☾" };

export const startTheme = () => {
  const button = byId("theme");
  const show = (theme) => {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.textContent = SIGNS[theme];
    button.title = `Colours: ${theme}`;
    button.setAttribute("aria-label", `Colours: ${theme}. Change`);
  };
  button.addEventListener("click", () => {
    const theme = ORDER[(ORDER.indexOf(localStorage.getItem(KEY) ?? "system") + 1) % ORDER.length];
    localStorage.setItem(KEY, theme);
    show(theme);
  });
  show(ORDER.includes(localStorage.getItem(KEY)) ? localStorage.getItem(KEY) : "system");
};
