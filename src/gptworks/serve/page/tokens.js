// Tokens of a text, each shaded by its probability. Text comes in at any speed and is drawn once per frame.
import { make } from "./dom.js";
import { number, percent, say } from "./words.js";

const BORDERS = [0.5, 0.2, 0.05, 0.01, 0.001]; // probabilities between the shades
const SPELLED = /^bytes:((?:\\x[0-9a-f]{2})+)$/; // how the server writes bytes that are no character by themselves
const encoder = new TextEncoder();

export const shadeOf = (logprob) => logprob == null ? "unknown" : `shade-${BORDERS.filter((border) => Math.exp(logprob) < border).length}`;

const bytesOf = (text) => {
  const spelled = SPELLED.exec(text);
  return spelled ? Uint8Array.from(spelled[1].split("\\x").slice(1), (digits) => parseInt(digits, 16)) : encoder.encode(text);
};

const UNSEEN = /^[\s\p{C}\p{Z}]*$/u; // no character that leaves ink
const CONTROL = /[\p{C}\p{Zl}\p{Zp}]/gu, SIGNS = { "\n": "↵", "\t": "⇥", "\r": "␍" };
const signOf = (letter) => {
  const code = letter.codePointAt(0);
  return SIGNS[letter] ?? (code < 32 ? String.fromCodePoint(0x2400 + code) : `U+${code.toString(16).toUpperCase().padStart(4, "0")}`);
};

/** A token on its own, where spaces, line ends and control characters must be seen. */
export const visible = (text) => {
  if (text === "") return "∅";
  if (SPELLED.test(text)) return text.slice(6);
  const spaces = UNSEEN.test(text) ? /\p{Z}/gu : /^\p{Z}|\p{Z}$/gu;
  return text.replace(spaces, "␣").replace(CONTROL, signOf);
};

export const perplexityOf = (tokens) => {
  const known = tokens.filter((token) => token.logprob != null);
  return known.length ? Math.exp(-known.reduce((sum, token) => sum + token.logprob, 0) / known.length) : null;
};

export const bitsPerByte = (tokens) => {
  const known = tokens.filter((token) => token.logprob != null);
  const bytes = known.reduce((sum, token) => sum + bytesOf(token.text).length, 0);
  return bytes ? -known.reduce((sum, token) => sum + token.logprob, 0) / Math.LN2 / bytes : null;
};

export class TokenView {
  constructor() {
    // One stop of the tabulator for all tokens; arrows go from one to the next.
    this.element = make("div", { class: "tokens", role: "group" });
    this.element.dataset.label = "tokens of the text";
    this.element.setAttribute("aria-label", say("tokens of the text"));
    this.element.view = this;
    this.clear();
  }

  clear() {
    this.tokens = [];
    this.texts = []; // as they are shown: a character of several tokens stands with its last one
    this.decoder = new TextDecoder();
    this.waiting = [];
    this.element.replaceChildren();
  }

  append(tokens) {
    for (const token of tokens) {
      const text = this.decoder.decode(bytesOf(token.text), { stream: true });
      const at = this.tokens.push(token) - 1;
      this.texts.push(text);
      this.waiting.push(this.drawn(token, text, at));
    }
    this.draw();
  }

  /** Text without scores. */
  appendText(text) {
    this.texts.push(text);
    this.waiting.push(document.createTextNode(text));
    this.draw();
  }

  draw() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => this.drawNow());
  }

  drawNow() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    this.element.append(...this.waiting);
    this.waiting = [];
  }

  drawn(token, text, at) {
    const span = document.createElement("span");
    span.className = `token ${shadeOf(token.logprob)}${token.isPrompt ? " prompt" : ""}${token.isChosen ? " chosen" : ""}`;
    if (!text || !/[^\p{C}]|[\n\t]/u.test(text)) { // half a character, an end of text, a control character
      span.textContent = token.text === "" ? `⟨${token.id}⟩` : text ? visible(text) : "·";
      span.classList.add("part");
    } else {
      span.textContent = text;
      if (text.includes("\n")) span.classList.add("newline");
    }
    if (!text || UNSEEN.test(span.textContent)) span.setAttribute("aria-label", visible(token.text));
    span.setAttribute("role", "button");
    span.tabIndex = at ? -1 : 0;
    span.dataset.at = at;
    return span;
  }

  /** Only the tokens before this one are left. */
  cut(at) {
    this.drawNow();
    const kept = this.tokens.slice(0, at);
    this.clear();
    this.append(kept);
    this.drawNow();
  }

  spanAt(at) {
    this.drawNow();
    return this.element.children[at];
  }

  get ids() { return this.tokens.map((token) => token.id); }
  get text() { return this.texts.join(""); }
  get written() { return this.tokens.filter((token) => !token.isPrompt); }
}

/** Of one token in words: for its window, and for those who do not see the shade. */
export const described = (token, at) => token.logprob == null
  ? say(at ? "no score" : "first token")
  : say("probability of", percent(Math.exp(token.logprob)), number(-token.logprob / Math.LN2, 3));
