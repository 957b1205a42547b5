// All settings of sampling, each with what it does; and the form in which they stand.
import { find, make } from "./dom.js";

// `usual` is what the server does where nothing is said; `only`: of one mode.
export const SETTINGS = [
  { name: "max_tokens", group: "main", kind: "count", min: 1, hint: "auto" },
  { name: "temperature", group: "main", kind: "number", min: 0, step: 0.1, usual: 1 },
  { name: "top_p", group: "main", kind: "number", min: 0, max: 1, step: 0.05, usual: 1 },
  { name: "top_k", group: "choice", kind: "count", min: 0, usual: 0 },
  { name: "min_p", group: "choice", kind: "number", min: 0, max: 1, step: 0.01, usual: 0 },
  { name: "typical_p", group: "choice", kind: "number", min: 0, max: 1, step: 0.05, usual: 1 },
  { name: "seed", group: "main", kind: "count", min: 0, hint: "anew" },
  { name: "repetition_penalty", group: "repetition", kind: "number", min: 0, step: 0.05, usual: 1 },
  { name: "presence_penalty", group: "repetition", kind: "number", min: -2, max: 2, step: 0.1, usual: 0 },
  { name: "frequency_penalty", group: "repetition", kind: "number", min: -2, max: 2, step: 0.1, usual: 0 },
  { name: "no_repeat_ngram_size", group: "repetition", kind: "count", min: 0, usual: 0 },
  { name: "min_tokens", group: "length", kind: "count", min: 0, usual: 0 },
  { name: "stop", group: "length", kind: "lines", hint: "none" },
  { name: "ignore_eos", group: "length", kind: "switch" },
  { name: "n", group: "more", kind: "count", min: 1, max: 16, usual: 1, only: "complete" },
  { name: "best_of", group: "more", kind: "count", min: 1, max: 32, usual: 1, only: "complete" },
  { name: "logit_bias", group: "more", kind: "biases", hint: "none" },
];
const GROUPS = { main: true, choice: false, length: false, repetition: false, more: false }; // which are open at first

/** What a text of the address or of a field means; undefined: nothing, or no such value. */
export const parsed = ({ kind, min, max }, text) => {
  if (text == null || text === "") return undefined;
  if (kind === "switch") return text === "true" || text === true || undefined;
  if (kind === "lines") return text;
  if (kind === "biases") return /^\s*(\d+:-?\d+(\.\d+)?([\s,]+|$))+$/.test(text) ? text : undefined;
  const value = Number(text), isGood = kind === "count" ? Number.isSafeInteger(value) : Number.isFinite(value);
  return isGood && value >= (min ?? -Infinity) && value <= (max ?? Infinity) ? value : undefined;
};

const input = ({ name, kind, min, max, step, usual, hint }) => {
  const common = { id: `set-${name}`, name, "aria-describedby": `about-${name}` };
  if (kind === "switch") return make("input", { ...common, type: "checkbox" });
  if (kind === "lines") return make("textarea", { ...common, rows: 2, spellcheck: "false", "data-hint": hint });
  if (kind === "biases") return make("input", { ...common, type: "text", spellcheck: "false", pattern: "\\s*(\\d+:-?\\d+(\\.\\d+)?[\\s,]*)*", "data-hint": hint });
  const field = make("input", { ...common, type: "number", min, max, step: kind === "count" ? 1 : "any", inputmode: kind === "count" ? "numeric" : "decimal" });
  if (hint) field.dataset.hint = hint; else field.placeholder = String(usual);
  if (step && kind !== "count") field.addEventListener("keydown", (event) => stepBy(event, field, { step, usual, min, max }));
  return field;
};

/** Arrow keys move a number by its own step, which `step: any` would not. */
const stepBy = (event, field, { step, usual, min = -Infinity, max = Infinity }) => {
  const sign = { ArrowUp: 1, ArrowDown: -1 }[event.key];
  if (!sign) return;
  event.preventDefault();
  const next = (field.value === "" ? usual : Number(field.value)) + sign * step;
  field.value = String(Number(Math.min(max, Math.max(min, next)).toFixed(4)));
  field.dispatchEvent(new Event("input", { bubbles: true }));
};

export class SettingsForm {
  /** `changed` is called with every change. */
  constructor(form, changed) {
    this.form = form;
    for (const [group, isOpen] of Object.entries(GROUPS)) {
      const rows = SETTINGS.filter((each) => each.group === group).map((each) => make("div", { class: `setting ${each.kind}` },
        make("label", { for: `set-${each.name}` }, make("span", { word: `set.${each.name}` }), make("code", { text: each.name })),
        input(each),
        make("p", { id: `about-${each.name}`, class: "about", word: `about.${each.name}` })));
      form.append(make("details", { open: isOpen }, make("summary", { word: `group.${group}` }), ...rows));
    }
    form.addEventListener("input", () => { this.mark(); changed(); });
    form.addEventListener("submit", (event) => event.preventDefault());
  }

  get values() {
    const found = {};
    for (const each of SETTINGS) {
      const field = find(`set-${each.name}`), value = parsed(each, each.kind === "switch" ? field.checked : field.value);
      if (value !== undefined) found[each.name] = value;
    }
    return found;
  }

  set values(given) {
    for (const { name, kind } of SETTINGS) {
      const field = find(`set-${name}`);
      if (kind === "switch") field.checked = given[name] === true; else field.value = given[name] ?? "";
    }
    this.mark();
  }

  /** Settings that say something are seen at once, and so is their number. */
  mark() {
    const count = Object.keys(this.values).length;
    for (const { name } of SETTINGS) find(`set-${name}`).closest(".setting").classList.toggle("set", name in this.values);
    find("reset").hidden = !count;
  }

  /** Shows what is wrong with a field, and goes there. */
  isValid() {
    const wrong = this.form.querySelector(":invalid");
    if (!wrong) return true;
    for (let element = wrong; element; element = element.parentElement) if (element.tagName === "DETAILS") element.open = true;
    wrong.reportValidity();
    return false;
  }
}
