// Light, dark or as the system has it; and the language.
import { fill, find, make } from "./dom.js";
import { currentLanguage, firstLanguage, LANGUAGES, setLanguage } from "./words.js";

const PLACE = "gptworks.theme", THEMES = ["auto", "light", "dark"];

const setTheme = (theme) => {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
};

export const startTheme = () => {
  let kept = null;
  try { kept = localStorage.getItem(PLACE); } catch { /* forbidden */ }
  const theme = THEMES.includes(kept) ? kept : "auto", choice = find("theme");
  choice.append(...THEMES.map((each) => make("option", { value: each, word: `theme.${each}` })));
  choice.value = theme;
  setTheme(theme);
  choice.addEventListener("change", () => {
    setTheme(choice.value);
    try { localStorage.setItem(PLACE, choice.value); } catch { /* forbidden */ }
  });
};

/** `changed`: what has to be written anew. */
export const startLanguage = (changed) => {
  const choice = find("language");
  setLanguage(firstLanguage(), false);
  choice.append(...Object.entries(LANGUAGES).map(([code, name]) => make("option", { value: code, text: name, lang: code })));
  choice.value = currentLanguage();
  choice.addEventListener("change", () => {
    setLanguage(choice.value, true);
    fill();
    changed();
  });
};
