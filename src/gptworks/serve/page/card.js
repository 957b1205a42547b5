// What is known of a model; of a run also how it goes on.
import { cardOf } from "./api.js";
import { lossChart } from "./chart.js";
import { copy, make } from "./dom.js";
import { number, say } from "./words.js";

const EVERY = 5000; // ms between two looks at a run

const size = (count) => count >= 1e9 ? `${number(count / 1e9, 3)} G` : count >= 1e6 ? `${number(count / 1e6, 3)} M` : number(count);
const bytes = (count) => count >= 1e9 ? `${number(count / 1e9, 3)} GB` : `${number(count / 1e6, 3)} MB`;

const hash = (digest) => make("button", { type: "button", class: "hash", title: digest, on: { click: () => copy(digest) } },
  make("span", { class: "hidden", text: `${say("copy")} ` }), digest.slice(0, 12) + "…");

const rows = (card) => {
  const found = [
    ["parameters", size(card.parameters)],
    ["shape", say("shape is", card.layers, card.hidden_size, card.heads)],
    ["context", say("count of tokens", number(card.context))],
    ["kept as", card.weights],
    ["tokenizer", `${card.tokenizer.split("/").at(-1)}, ${say("entries", number(card.vocabulary))}`],
    ["tokenizer hash", hash(card.tokenizer_sha256.replace(/^sha256:/, ""))],
    ["source", card.source],
  ];
  if (card.system) found.push(["format of weights", card.system]);
  if (card.step != null) found.push(["weights are of", say("step is", number(card.step))]);
  if (card.tuned_from) found.push(["tuned from", card.tuned_from]);
  found.push(["chat", say(card.chat ? "has chat" : "has no chat")]);
  return found.map(([word, value]) => make("div", {}, make("dt", { text: say(word) }), make("dd", {}, value)));
};

const files = (card) => {
  const list = card.files === null ? [make("li", { text: say("hashing") })] : card.files.map((each) =>
    make("li", {}, make("span", { text: `${each.name}, ${bytes(each.bytes)}` }), " sha256 ", hash(each.sha256)));
  return make("details", { "data-keep": "files" }, make("summary", { text: say("files of weights") }), make("ul", { class: "files" }, ...list));
};

/** Of one step; a number of an earlier one says so. */
const factsAt = (step, steps, told) => {
  const found = [say(steps ? "at step of" : "step is", number(step), steps && number(steps))];
  for (const [word, point] of [["loss is", told.loss], ["held out is", told.held_out]]) {
    if (point) found.push(say(word, number(point[1], 4)) + (point[0] < step ? ` (${say("step is", number(point[0]))})` : ""));
  }
  return found.join(" · ");
};

const run = (card) => {
  const { run: found } = card, { loss, smoothed, held_out: heldOut } = found, parts = [make("h3", { text: say("run is", found.name) })];
  if (loss.length) {
    const title = say("curve in words", number(loss[0][1], 4), number(loss.at(-1)[1], 4), number(found.step));
    parts.push(lossChart([{ points: loss, kind: smoothed.length ? "raw" : "smooth" }, { points: smoothed, kind: "smooth" }, { points: heldOut, kind: "mark" }],
      { step: card.step, steps: found.steps, title }));
    const legend = [say("loss over steps")];
    if (heldOut.length) legend.push(say("held out dotted"));
    if (card.step != null) legend.push(say("line is served"));
    parts.push(make("p", { class: "soft small", text: legend.join(" · ") }));
  }
  const isLast = card.step === found.step;
  if (card.step != null) parts.push(make("p", { text: say("served is", factsAt(card.step, isLast && found.steps, found.served)) }));
  if (found.step != null && !isLast) parts.push(make("p", { text: say("newest is", factsAt(found.step, found.steps, found.last)) }));
  if (found.newest != null) {
    // Who named a step wants that one.
    const isNewer = card.step != null && found.newest > card.step && [found.folder, `${found.folder}@latest`].includes(card.source);
    parts.push(make("p", { text: say("newest checkpoint", number(found.newest)) + (isNewer ? ` ${say("serve newer")}` : "") }));
  }
  return make("div", { class: "run" }, ...parts);
};

export class ModelCard {
  constructor() {
    this.element = make("article", { class: "card" });
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.renew(); });
    setInterval(() => { if (!document.hidden && this.isOpen()) this.renew(); }, EVERY);
    this.isOpen = () => true;
  }

  async show(model) {
    if (this.model === model) return;
    this.model = model;
    this.text = "";
    this.card = null;
    this.element.replaceChildren();
    await this.renew();
  }

  /** What cannot be had at the moment leaves what is seen. `told`: who wants to know of a new card. */
  async renew() {
    const model = this.model;
    if (!model) return;
    let card;
    try { card = await cardOf(model); } catch { return; }
    if (model !== this.model) return;
    const text = JSON.stringify(card);
    if (text === this.text) return;
    this.text = text;
    this.card = card;
    this.draw();
    this.told?.(card);
  }

  draw() {
    if (!this.card) return;
    const open = new Set([...this.element.querySelectorAll("details[open]")].map((each) => each.dataset.keep));
    this.element.replaceChildren(make("h3", { class: "name", text: this.card.id }), ...(this.card.run ? [run(this.card)] : []),
      make("dl", {}, ...rows(this.card)), files(this.card));
    for (const each of this.element.querySelectorAll("details")) each.open = open.has(each.dataset.keep);
  }
}
