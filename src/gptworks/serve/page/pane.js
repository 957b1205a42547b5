// One model's side: what it writes or reads, how it went, and how to go on from any token.
import { pieces, post, Problem } from "./api.js";
import { copy, make } from "./dom.js";
import { branchSeed, completion, limitOf, USUAL_TOKENS } from "./requests.js";
import { bitsPerByte, perplexityOf, TokenView } from "./tokens.js";
import { number, say } from "./words.js";

/** A text that is written: its tokens, its buttons, what is told below it. */
class Block {
  constructor(pane, before = null) {
    this.pane = pane;
    this.before = before; // of a conversation: gives the ids of all that stands before the text
    this.view = new TokenView();
    this.view.block = this;
    this.view.other = () => pane.twin?.(this)?.view;
    this.text = "";
    this.history = []; // what it was before each alternative
    this.facts = make("p", { class: "facts" });
    this.undo = make("button", { type: "button", class: "quiet", word: "undo", hidden: true, on: { click: () => this.goBack() } });
    this.copier = make("button", { type: "button", class: "quiet", word: "copy text", hidden: true, on: { click: () => copy(this.plain, this.copier) } });
    this.element = make("div", { class: "block" }, this.view.element, make("div", { class: "below" }, this.facts, this.undo, this.copier));
  }

  get plain() { return this.text || this.view.text; }

  /** As if nothing had come. */
  reset() {
    this.view.clear();
    Object.assign(this, { text: "", finish: null, history: [] });
    this.facts.textContent = "";
  }

  add(piece) {
    if (piece.tokens.length) this.view.append(piece.tokens);
    else if (piece.text && !this.view.tokens.length) this.view.appendText(piece.text);
    this.text += piece.text;
    if (piece.finish) this.finish = piece.finish;
  }

  /** Also again, in another language. */
  end({ seconds, numBefore, isReading = false, limit = "length" }) {
    this.ended = { seconds, numBefore, isReading, limit };
    this.view.drawNow();
    const tokens = isReading ? this.view.tokens : this.view.written, facts = [];
    const perplexity = perplexityOf(tokens), bits = isReading ? bitsPerByte(tokens) : null;
    if (tokens.length) facts.push(say("count of tokens", number(tokens.length)));
    if (perplexity !== null) facts.push(say("perplexity is", number(perplexity, 3)));
    if (bits !== null) facts.push(say("bits per byte are", number(bits, 3)));
    const numNew = tokens.length - numBefore;
    if (!isReading && numNew > 1) facts.push(say("speed is", number(numNew / seconds, 3)));
    if (!isReading && this.finish) facts.push(say(`finish.${this.finish === "length" ? limit : this.finish}`, number(USUAL_TOKENS)));
    if (this.isStopped) facts.push(say("finish.you"));
    this.facts.textContent = facts.join(" · ");
    this.facts.dataset.perplexity = perplexity ?? "";
    this.copier.hidden = !this.plain;
    this.undo.hidden = !this.history.length;
  }

  save() {
    this.history.push({ tokens: [...this.view.tokens], text: this.text, facts: this.facts.textContent, finish: this.finish, ended: this.ended });
  }

  goBack() {
    const { tokens, text, facts, finish, ended } = this.history.pop();
    this.pane.stop();
    this.view.clear();
    this.view.append(tokens);
    Object.assign(this, { text, finish, ended });
    this.facts.textContent = facts;
    this.undo.hidden = !this.history.length;
    this.pane.changed(this);
  }
}

export class Pane {
  /** `changed(block)`: a text is another than before. `begun()`: it is busy now. */
  constructor({ changed, begun }) {
    this.changed = changed;
    this.begun = begun;
    this.title = make("h2", { class: "model" });
    this.note = make("span", { class: "soft" });
    this.body = make("div", { class: "texts" });
    this.trouble = make("div", { class: "trouble", role: "alert", hidden: true });
    this.element = make("section", { class: "pane" }, make("header", {}, this.title, this.note), this.body, this.trouble);
    this.blocks = [];
  }

  /** `model`: what the server told of it. */
  set model(model) {
    this.found = model;
    this.title.textContent = model.id;
    this.note.textContent = model.gptworks.step == null ? "" : say("step is", number(model.gptworks.step));
  }

  get model() { return this.found; }

  /** The language has changed. */
  relabel() {
    this.model = this.found;
    for (const block of this.blocks) if (block.ended) block.end(block.ended);
  }

  get isBusy() { return Boolean(this.controller); }

  clear() {
    this.stop();
    this.blocks = [];
    this.body.replaceChildren();
    this.trouble.hidden = true;
    this.element.classList.remove("filled");
  }

  newBlock(before) {
    const block = new Block(this, before);
    this.blocks.push(block);
    this.body.append(block.element);
    this.element.classList.add("filled");
    return block;
  }

  stop() {
    this.controller?.abort();
    this.controller = null;
  }

  /** Asks, and shows what comes. `blocks(index)`: where the text of each choice goes. True: it came to its end. */
  async run(request, blocks, again, options = {}) {
    this.stop();
    const controller = this.controller = new AbortController();
    this.trouble.hidden = true;
    this.element.classList.add("busy");
    this.element.setAttribute("aria-busy", "true");
    this.begun();
    const used = new Map();
    const begun = performance.now(); // of the request: tokens that come late come at once, and no rate is in their distances
    let isDone = false;
    try {
      for await (const piece of pieces(request, controller.signal)) {
        if (controller.signal.aborted) break;
        const block = blocks(piece.index);
        if (!used.has(block)) { used.set(block, block.view.written.length); block.view.canGoOn = false; }
        block.add(piece);
      }
      isDone = !controller.signal.aborted;
    } catch (error) {
      if (error.name !== "AbortError") {
        if (!(error instanceof Problem)) throw error;
        this.show(error, again);
      }
    } finally {
      const seconds = (performance.now() - begun) / 1000;
      for (const [block, numBefore] of used) {
        block.isStopped = controller.signal.aborted;
        block.view.canGoOn = true;
        block.end({ seconds, numBefore, ...options });
      }
      if (this.controller === controller) this.controller = null;
      if (!this.controller) {
        this.element.classList.remove("busy");
        this.element.removeAttribute("aria-busy");
      }
      for (const block of used.keys()) this.changed(block);
    }
    return isDone;
  }

  /** What went wrong, in the server's words, and what can be done. */
  show(problem, again) {
    const lines = [make("p", problem.status === 0 ? { word: "server gone" } : { text: problem.message })];
    const advice = { queue_full: "advice.queue", context_length_exceeded: "advice.long", no_chat_template: "advice.chat" }[problem.code];
    if (advice) lines.push(make("p", { class: "soft", word: advice }));
    if (again && (problem.status === 0 || problem.status === 429 || problem.status >= 500)) {
      const button = make("button", { type: "button", word: "try again", on: { click: () => { this.trouble.hidden = true; again(); } } });
      if (problem.retryAfter) { // the server has said when
        button.disabled = true;
        setTimeout(() => { button.disabled = false; }, Math.min(problem.retryAfter, 30) * 1000);
      }
      lines.push(button);
    }
    this.trouble.replaceChildren(...lines);
    this.trouble.hidden = false;
  }

  /** From this token on another text: what stands before it stays, then comes the alternative. `settings` have the text's seed. */
  async goOn(view, at, alternative, settings) {
    const block = view.block, token = view.tokens[at];
    this.stop();
    block.save();
    view.cut(at);
    view.append([{ ...token, id: alternative.id, text: alternative.text, logprob: alternative.logprob, isChosen: true, isPrompt: false }]);
    block.text = view.text;
    block.finish = null;
    block.facts.textContent = "";
    const go = async () => {
      let before;
      try { before = block.before ? await block.before() : []; } catch (error) { this.show(error, go); return; }
      const ids = [...before, ...view.ids], { n: _, best_of: __, ...rest } = settings;
      const room = this.model.gptworks.context - ids.length;
      const seed = branchSeed(rest.seed, ids.length - 1); // the same one would draw as at the beginning, and quote it
      const request = completion(this.model.id, ids, { ...rest, seed }, { room, hasPrompt: false });
      await this.run(request, () => block, go, { limit: limitOf(rest, room) });
    };
    await go();
    view.spanAt(at)?.focus({ preventScroll: true });
  }
}

/** How many tokens a prompt has, and how many the model can have. */
export const lengthOf = async (model, prompt, signal) => {
  const words = Array.isArray(prompt) ? { messages: prompt } : { prompt };
  const { count, max_model_len: most, tokens } = await post("/tokenize", { model, ...words }, signal);
  return { count, most, tokens };
};
