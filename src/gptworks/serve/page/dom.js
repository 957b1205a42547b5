// Elements, made without any markup: text is always text.
import { say } from "./words.js";

/** `word` is a key of words.js, filled again when the language changes; `on` are listeners; the rest are attributes. */
export const make = (tag, { word, args = [], text, on = {}, ...attributes } = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  for (const [name, listener] of Object.entries(on)) element.addEventListener(name, listener);
  if (text != null) element.textContent = text;
  if (word) speak(element, word, ...args);
  element.append(...children.filter((child) => child != null));
  return element;
};

/** Lets the element say something in the language of the page, now and after a change of language. */
export const speak = (element, word, ...args) => {
  element.dataset.word = word;
  if (args.length) element.dataset.args = JSON.stringify(args); else delete element.dataset.args;
  element.textContent = say(word, ...args);
};

/** All that has words: `data-word` is text, `data-label` what screen readers say, `data-hint` a placeholder. */
export const fill = (root = document) => {
  for (const element of root.querySelectorAll("[data-word]")) {
    element.textContent = say(element.dataset.word, ...JSON.parse(element.dataset.args ?? "[]"));
  }
  for (const element of root.querySelectorAll("[data-label]")) element.setAttribute("aria-label", say(element.dataset.label));
  for (const element of root.querySelectorAll("[data-hint]")) element.placeholder = say(element.dataset.hint);
};

export const label = (element, word) => {
  element.dataset.label = word;
  element.setAttribute("aria-label", say(word));
  return element;
};

export const find = (id) => document.getElementById(id);

/** Puts text into the clipboard and says so on the button for a moment. */
export const copy = async (text, button) => {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // not a secure address: the old way, through a selection
    const area = make("textarea", { class: "away", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  if (!button) return;
  const before = button.dataset.word;
  speak(button, "copied");
  setTimeout(() => { if (before) speak(button, before); }, 1500);
};
