// The page: what is chosen and asked, and where the answers stand.
import * as address from "./address.js";
import { Alternatives } from "./alternatives.js";
import { get, Problem, tellOfModelsGone, useKeysFrom } from "./api.js";
import { ModelCard } from "./card.js";
import { markDifference } from "./compare.js";
import { askForKey, compareCommand, startCopies, startHistory, tellLength } from "./copies.js";
import { copy, fill, find, make, speak } from "./dom.js";
import * as history from "./history.js";
import { lengthOf, Pane } from "./pane.js";
import { completion, conversation, limitOf, newSeed, reading } from "./requests.js";
import { SettingsForm } from "./settings.js";
import { startLanguage, startTheme } from "./theme.js";
import { number, say } from "./words.js";

const main = find("main"), prompt = find("prompt"), system = find("system");
const models = new Map(); // name -> what /v1/models tells of it
const turns = []; // of the conversation: {user, replies: [of each side]}
let isComparing = false, seed = null, room = null, entryId = "", timer = 0, counting = null; // seed: of the text that is shown; room: tokens that are left beside the prompt

const modeOf = () => main.dataset.mode;
const hasTokens = () => find("tokens").checked;
const chosen = () => [find("model-0").value, find("model-1").value];
const sides = () => isComparing ? [0, 1] : [0];
const state = () => ({ mode: modeOf(), models: chosen(), isComparing, prompt: prompt.value, system: system.value, settings: { ...settings.values } });

// Panes and cards

const panes = [0, 1].map(() => new Pane({ changed: (block) => hasChanged(block), begun: () => showButtons() }));
panes.forEach((pane, side) => {
  pane.twin = (block) => isComparing ? panes[1 - side].blocks[pane.blocks.indexOf(block)] : null;
});
const cards = [0, 1].map((side) => {
  const card = new ModelCard();
  card.isOpen = () => find("card-box").open && (side === 0 || isComparing);
  card.told = (found) => {
    const model = models.get(found.id);
    if (!model) return;
    model.gptworks.step = found.step; // a server that watches a run has taken its next checkpoint
    panes[side].model = model;
    nameModels();
    if (side === 0) find("compare-command").textContent = compareCommand(found);
  };
  return card;
});
const settings = new SettingsForm(find("settings"), () => changedByHand());

const hasChanged = (block) => {
  const side = panes.findIndex((pane) => pane.blocks.includes(block));
  const at = side < 0 ? -1 : panes[side].blocks.indexOf(block);
  if (modeOf() === "chat" && turns[at]) turns[at].replies[side] = block.plain; // what follows goes on from this
  if (isComparing) compareTexts();
  showButtons();
};

const compareTexts = () => {
  const [one, two] = panes.map((pane) => pane.blocks.at(-1)?.view), verdict = find("verdict");
  verdict.textContent = "";
  if (!one?.tokens.length || !two?.tokens.length) return;
  const { scored, gain, count } = markDifference(one, two);
  if (modeOf() !== "read" || count !== one.tokens.length || count !== two.tokens.length) return;
  const better = panes[gain > 0 ? 1 : 0].model.id;
  verdict.textContent = say("difference is", better, number(Math.abs(gain), 3), number(scored));
};

// What is chosen

const nameModels = () => {
  for (const choice of [find("model-0"), find("model-1")]) {
    for (const option of choice.options) {
      const { step } = models.get(option.value).gptworks;
      option.textContent = step == null || option.value.includes(String(step)) ? option.value : `${option.value} · ${say("step is", number(step))}`;
    }
  }
};

const showModels = () => {
  chosen().forEach((name, side) => {
    if (!models.has(name)) return;
    panes[side].model = models.get(name);
    if (sides().includes(side)) cards[side].show(name);
  });
  find("second").hidden = !isComparing;
  speak(find("compare"), isComparing ? "compare end" : "compare");
  main.classList.toggle("comparing", isComparing);
  find("panes").replaceChildren(...sides().map((side) => panes[side].element));
  find("cards").replaceChildren(...sides().map((side) => cards[side].element));
  showMode();
};

const showMode = () => {
  const mode = modeOf(), isChat = mode === "chat", composer = find("composer"), hadFocus = composer.contains(document.activeElement);
  const place = find(isChat ? "below" : "above");
  if (composer.parentElement !== place) { place.append(composer); if (hadFocus) prompt.focus(); }
  speak(find("run"), `run.${mode}`);
  const words = { complete: ["prompt", "prompt hint"], chat: ["message", "message hint"], read: ["text", "text hint"] }[mode];
  speak(find("prompt-label"), words[0]);
  prompt.dataset.hint = words[1];
  prompt.placeholder = say(words[1]);
  find("system-row").hidden = !isChat;
  find("settings-box").hidden = mode === "read"; // nothing is drawn
  const base = isChat && sides().map((side) => panes[side].model).find((model) => model && !model.gptworks.chat);
  if (base) speak(find("about"), "base model", base.id); else speak(find("about"), `about.${mode}`);
  find("about").classList.toggle("warn", Boolean(base));
  find("tokens").closest("label").hidden = mode === "read";
  find("difference-row").hidden = !isComparing || isChat || !(hasTokens() || mode === "read");
  main.classList.toggle("by-difference", !find("difference-row").hidden && find("difference").checked);
  showButtons();
};

const showButtons = () => {
  const isBusy = panes.some((pane) => pane.isBusy), isChat = modeOf() === "chat";
  find("run").hidden = isBusy;
  find("stop").hidden = !isBusy;
  find("fresh").hidden = !isChat || !turns.length;
  find("again").hidden = !isChat || !turns.length || isBusy;
  find("legend").hidden = !panes.some((pane) => pane.blocks.some((block) => block.view.tokens.length));
};

const setMode = (mode) => {
  main.dataset.mode = mode;
  document.querySelector(`input[name=mode][value=${mode}]`).checked = true;
};

/** What the form says: a seed that was drawn is for copied links only, else a reload would fix it. */
const keepAddress = () => window.history.replaceState(null, "", address.written(state()));

const changedByHand = () => {
  keepAddress();
  clearTimeout(timer);
  timer = setTimeout(count, 250);
};

const count = async () => {
  counting?.abort();
  counting = new AbortController();
  const model = panes[0].model, text = prompt.value;
  if (!model || !text || (modeOf() === "chat" && !model.gptworks.chat)) { find("length").textContent = ""; return; }
  const asked = modeOf() === "chat" ? messagesOf(0, turns.length, text) : text;
  try {
    const length = await lengthOf(model.id, asked, counting.signal);
    room = length.most - length.count;
    tellLength(find("length"), length);
  } catch { /* the next run tells it */ }
};

// Asking

const messagesOf = (side, end, user) => [
  ...(system.value.trim() ? [{ role: "system", content: system.value }] : []),
  ...turns.slice(0, end).map((turn) => [turn.user, turn.replies[side] || turn.replies[0]]).filter(([, reply]) => reply) // else it failed
    .flatMap(([question, reply]) => [{ role: "user", content: question }, { role: "assistant", content: reply }]),
  { role: "user", content: user },
];

/** What would be asked of the first model now; for commands that are copied. */
const requestNow = () => {
  const values = { ...settings.values, seed: settings.values.seed ?? seed ?? newSeed() }, model = chosen()[0];
  if (modeOf() === "read") return reading(model, prompt.value);
  if (modeOf() === "complete") return completion(model, prompt.value, values, { room: room ?? undefined, hasTokens: false });
  const user = prompt.value || (turns.at(-1)?.user ?? "");
  return conversation(model, messagesOf(0, prompt.value ? turns.length : turns.length - 1, user), values, { hasTokens: false });
};

/** The address of what the form says; where that leaves the seed open, with the one of the text that is shown. */
const linkNow = () => {
  const given = state();
  if (modeOf() !== "read") given.settings.seed ??= seed ?? undefined;
  return location.origin + "/" + address.written(given);
};

const tell = (word, ...args) => speak(find("status"), word, ...args);

const askOne = async (side, values) => {
  const pane = panes[side], model = pane.model, text = prompt.value, mode = modeOf();
  let blocks;
  const at = (index) => blocks[index] ??= pane.newBlock();
  const go = async () => {
    pane.clear();
    blocks = [];
    if (mode === "read") return pane.run(reading(model.id, text), at, go, { isReading: true });
    let left;
    if (values.max_tokens === undefined) {
      try {
        const { count: length, most } = await lengthOf(model.id, text);
        left = most - length;
      } catch (error) {
        if (!(error instanceof Problem)) throw error;
        pane.show(error, go);
        return false;
      }
    }
    return pane.run(completion(model.id, text, values, { room: left, hasTokens: hasTokens() }), at, go, { limit: limitOf(values, left) });
  };
  return go();
};

const askConversation = async (side, turn, values) => {
  const pane = panes[side], model = pane.model, messages = messagesOf(side, turn, turns[turn].user);
  const before = async () => (await lengthOf(model.id, messages)).tokens;
  const block = pane.blocks[turn] ?? talk(pane, turn, before);
  const go = () => {
    block.reset();
    return pane.run(conversation(model.id, messages, values, { hasTokens: hasTokens() }), () => block, go, { limit: limitOf(values) });
  };
  return go();
};

const talk = (pane, turn, before) => {
  pane.body.append(make("p", { class: "user", text: turns[turn].user }));
  return pane.newBlock(before);
};

const run = async () => {
  if (!settings.isValid() || !panes[0].model) return;
  const values = settings.values, mode = modeOf();
  seed = mode === "read" ? null : values.seed ?? newSeed(); // nothing is drawn where a text is only read
  values.seed = seed;
  keepAddress();
  if (mode === "chat") { turns.push({ user: prompt.value, replies: [] }); prompt.value = ""; find("length").textContent = ""; }
  await askAll(values, turns.length - 1, mode === "chat");
};

const askAll = async (values, turn, isChat) => {
  tell(modeOf() === "read" ? "reading" : "writing");
  const asked = sides().map((side) => isChat ? askConversation(side, turn, values) : askOne(side, values));
  showButtons();
  if (isChat) panes[0].body.lastElementChild?.scrollIntoView({ block: "nearest" });
  const ended = await Promise.all(asked);
  showButtons();
  if (isComparing) compareTexts();
  const facts = panes[0].blocks.at(-1)?.facts.textContent ?? "";
  if (ended.every(Boolean)) tell("done", facts); else if (panes.some((pane) => !pane.trouble.hidden)) tell("failed"); else tell("stopped");
  if (panes.some((pane) => pane.blocks.length)) remember(isChat);
};

const remember = (isChat) => {
  if (!isChat || !entryId) entryId = `${Date.now()}-${newSeed()}`;
  const given = state();
  history.add({ ...given, seed, id: entryId, when: Date.now(),
    prompt: isChat ? turns[0].user : given.prompt, turns: isChat ? turns : undefined,
    answers: sides().map((side) => ({ model: panes[side].model.id, text: panes[side].blocks.at(-1)?.plain ?? "" })) });
};

const freshConversation = () => {
  turns.length = 0;
  entryId = "";
  for (const pane of panes) pane.clear();
  showButtons();
};

const openEntry = (entry) => {
  freshConversation();
  const { known } = take(entry);
  seed = entry.seed ?? entry.settings.seed ?? null;
  if (entry.mode === "chat") {
    prompt.value = "";
    entryId = entry.id;
    turns.push(...(entry.turns ?? []));
    for (const side of sides()) showTurns(side);
  } else if (known) {
    entry.answers.forEach(({ text }, side) => { if (sides().includes(side)) panes[side].newBlock().add({ tokens: [], text }); });
  }
  keepAddress();
  showButtons();
};

const showTurns = (side) => turns.forEach((turn, at) => {
  const before = async () => (await lengthOf(panes[side].model.id, messagesOf(side, at, turn.user))).tokens;
  talk(panes[side], at, before).add({ tokens: [], text: turn.replies[side] ?? turn.replies[0] ?? "" });
});

/** Sets the page to what an address or an entry of the history says. */
const take = (given) => {
  const names = [...models.keys()], missing = given.models.filter((name, side) => name && (side === 0 || given.isComparing) && !models.has(name));
  find("model-0").value = models.has(given.models[0]) ? given.models[0] : names[0];
  isComparing = given.isComparing && names.length > 1;
  const other = names.find((name) => name !== chosen()[0]) ?? names[0];
  find("model-1").value = models.has(given.models[1]) ? given.models[1] : other;
  setMode(given.mode);
  prompt.value = given.prompt;
  system.value = given.system ?? "";
  settings.values = given.settings;
  seed = null;
  find("notice").hidden = !missing.length;
  if (missing.length) speak(find("notice"), "model gone", missing.join(", "), chosen()[0]);
  showModels();
  count();
  return { known: !missing.length };
};

/** How to serve two models. */
const showHelp = (isShown) => {
  find("compare-help").hidden = !isShown;
  find("compare").setAttribute("aria-expanded", String(isShown));
};

const compareOrEnd = () => {
  isComparing = !isComparing;
  if (isComparing && chosen()[0] === chosen()[1]) find("model-1").value = [...models.keys()].find((name) => name !== chosen()[0]);
  panes[1].clear();
  if (isComparing && modeOf() === "chat") showTurns(1);
  showModels();
  changedByHand();
  if (isComparing) find("model-1").focus();
};

const listModels = (found) => {
  models.clear();
  for (const model of found) models.set(model.id, model);
  for (const choice of [find("model-0"), find("model-1")]) choice.replaceChildren(...found.map(({ id }) => make("option", { value: id, text: id })));
  nameModels();
  find("compare-command").textContent = compareCommand(cards[0].card?.id === found[0].id ? cards[0].card : found[0].gptworks);
};

/** Another server may stand at this address since the page was opened: its models, and all else as it is. */
const renewModels = async () => {
  let found;
  try { found = (await get("/v1/models")).data; } catch { return; } // what is asked next tells it
  if (JSON.stringify(found.map(({ id }) => id)) === JSON.stringify([...models.keys()])) return;
  const before = state(), drawn = seed;
  listModels(found);
  take(before);
  seed = drawn;
  if (found.length > 1) showHelp(false);
  keepAddress();
};

// The first moment

const listen = () => {
  find("composer").addEventListener("submit", (event) => { event.preventDefault(); run(); });
  find("stop").addEventListener("click", () => { for (const pane of panes) pane.stop(); find("run").hidden = false; find("run").focus(); });
  find("fresh").addEventListener("click", () => { freshConversation(); prompt.focus(); });
  find("again").addEventListener("click", () => {
    seed = settings.values.seed ?? newSeed();
    askAll({ ...settings.values, seed }, turns.length - 1, true);
  });
  find("reset").addEventListener("click", () => { settings.values = {}; changedByHand(); find("settings").querySelector("input").focus(); });
  for (const choice of document.querySelectorAll("input[name=mode]")) {
    choice.addEventListener("change", () => {
      if (modeOf() === "chat" || choice.value === "chat") freshConversation();
      setMode(choice.value);
      showMode();
      changedByHand();
    });
  }
  for (const side of [0, 1]) find(`model-${side}`).addEventListener("change", () => { find("notice").hidden = true; showModels(); changedByHand(); });
  find("compare").addEventListener("click", () => {
    if (models.size > 1) { compareOrEnd(); return; }
    showHelp(find("compare-help").hidden);
    renewModels().then(() => { if (models.size > 1 && !isComparing) compareOrEnd(); }); // the server may be the one that was asked for here
  });
  find("swap").addEventListener("click", () => {
    const [one, two] = chosen();
    find("model-0").value = two;
    find("model-1").value = one;
    for (const pane of panes) pane.clear();
    turns.length = 0;
    showModels();
    changedByHand();
  });
  find("compare-copy").addEventListener("click", () => copy(find("compare-command").textContent, find("compare-copy")));
  for (const id of ["tokens", "difference"]) find(id).addEventListener("change", showMode);
  for (const field of [prompt, system]) field.addEventListener("input", changedByHand);
  prompt.addEventListener("keydown", (event) => {
    const isSend = event.key === "Enter" && !event.isComposing && (event.ctrlKey || event.metaKey || (modeOf() === "chat" && !event.shiftKey));
    if (!isSend || find("run").hidden) return;
    event.preventDefault();
    find("composer").requestSubmit();
  });
  find("skip").addEventListener("click", (event) => { event.preventDefault(); prompt.focus(); }); // the address is not for places
  addEventListener("hashchange", () => { freshConversation(); take(address.read(location.hash)); });
};

const start = async () => {
  startLanguage(() => {
    tell("");
    nameModels();
    for (const side of sides()) { if (panes[side].model) panes[side].relabel(); cards[side].draw(); }
    compareTexts();
  });
  startTheme();
  fill();
  useKeysFrom(askForKey);
  tellOfModelsGone(renewModels);
  startHistory(openEntry);
  startCopies(requestNow, linkNow);
  new Alternatives((view, at, alternative) => {
    const goingOn = view.block.pane.goOn(view, at, alternative, { ...settings.values, seed: settings.values.seed ?? seed ?? newSeed() });
    showButtons();
    goingOn.then(showButtons);
  });
  listen();
  showMode();
  await load();
};

const load = async () => {
  let found;
  try { found = (await get("/v1/models")).data; } catch (problem) {
    find("panes").replaceChildren(panes[0].element);
    panes[0].show(problem, load);
    return;
  }
  listModels(found);
  panes[0].trouble.hidden = true;
  find("run").disabled = false;
  take(address.read(location.hash));
};

start();
