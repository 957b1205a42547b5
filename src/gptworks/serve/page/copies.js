// Windows beside the work: history, the key, and what can be copied.
import { copy, find, make, speak } from "./dom.js";
import * as history from "./history.js";
import { asCommand, asCurl, asPython, shellWord } from "./requests.js";
import { currentLanguage, number, say } from "./words.js";

/** Asks for the key of the server; null where the window was closed. All that wait get the same answer. */
let asking = null;
export const askForKey = (isWrong) => asking ??= new Promise((resolve) => {
  const dialog = find("key"), field = find("key-field"), form = find("key-form");
  find("key-wrong").hidden = !isWrong;
  field.value = "";
  form.onsubmit = (event) => { event.preventDefault(); dialog.close(field.value.trim()); };
  dialog.onclose = () => { const given = dialog.returnValue; field.value = ""; dialog.returnValue = ""; asking = null; resolve(given || null); };
  dialog.showModal();
});

/** `request()`: what would be asked now. `link()`: the address that brings it back. */
export const startCopies = (request, link) => {
  const menu = find("copies");
  menu.addEventListener("toggle", () => {
    if (menu.open) menu.querySelector("[data-copy=command]").disabled = !asCommand(request());
  });
  document.addEventListener("click", (event) => { if (!menu.contains(event.target)) menu.open = false; });
  menu.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !menu.open) return;
    menu.open = false;
    menu.querySelector("summary").focus();
  });
  const makers = { link, curl: () => asCurl(request(), facts()), python: () => asPython(request(), facts()), command: () => asCommand(request()) };
  const facts = () => ({ hasKey: Boolean(sessionStorage.getItem("gptworks.key")) });
  for (const button of menu.querySelectorAll("[data-copy]")) {
    button.addEventListener("click", async () => { await copy(makers[button.dataset.copy](), button); });
  }
};

const entryRow = (entry, open, changed) => {
  const first = entry.prompt.trim().split("\n")[0].slice(0, 90) || "…", when = new Date(entry.when);
  const line = `${say(`mode.${entry.mode}`)} · ${entry.answers.map(({ model }) => model).join(", ")} · ${when.toLocaleString(currentLanguage())}`;
  const answer = entry.answers[0]?.text.trim().slice(0, 140) ?? "";
  const opener = make("button", { type: "button", class: "entry", on: { click: () => { find("history").close(); open(entry); } } },
    make("strong", { text: first }), make("span", { class: "soft small", text: line }), make("span", { class: "small answer", text: answer }));
  const remover = make("button", { type: "button", class: "quiet", text: "×", on: { click: () => { history.remove(entry.id); changed(); } } });
  remover.setAttribute("aria-label", `${say("history remove")}: ${first}`);
  return make("li", {}, opener, remover);
};

export const startHistory = (open) => {
  const dialog = find("history");
  const draw = () => {
    const entries = history.all();
    find("history-list").replaceChildren(...entries.map((entry) => entryRow(entry, open, draw)));
    find("history-empty").hidden = entries.length > 0;
    find("history-clear").hidden = !entries.length;
  };
  find("show-history").addEventListener("click", () => { draw(); dialog.showModal(); });
  find("history-close").addEventListener("click", () => dialog.close());
  find("history-clear").addEventListener("click", () => { history.clear(); draw(); });
};

const USUAL_PORT = 8000;

/** One model only: how to serve two, with what there is, where this one is served. */
export const compareCommand = (card) => {
  const run = card.run, steps = run?.checkpoints.map(({ step }) => step) ?? [];
  const sources = steps.length > 1 ? [`${run.folder}@${steps[0]}`, `${run.folder}@${steps.at(-1)}`] : [card.source, "OTHER-DIR"];
  const port = Number(card.port ?? location.port) || USUAL_PORT;
  return `gptworks serve ${sources.map((source) => `--model ${shellWord(source)}`).join(" ")}${port === USUAL_PORT ? "" : ` --port ${port}`}`;
};

export const tellLength = (element, { count, most }) => {
  speak(element, "length of", number(count), number(most));
  element.classList.toggle("bad", count >= most);
};
