// The window at a token: how likely it was, and what the model would have written instead.
import { find, make, speak } from "./dom.js";
import { percent, say } from "./words.js";
import { described, visible } from "./tokens.js";

const WAIT = 250; // ms in which the pointer may go from the token to its window

/** One window for all tokens of the page. `choose(view, at, alternative)` goes on from there. */
export class Alternatives {
  constructor(choose) {
    this.choose = choose;
    this.window = find("alternatives");
    this.isPinned = false;
    document.addEventListener("pointerover", (event) => {
      if (event.pointerType === "touch") return;
      const span = event.target.closest?.(".token");
      if (span) this.show(span, false);
      else if (event.target.closest?.("#alternatives")) clearTimeout(this.timer);
      else this.hideSoon();
    });
    document.addEventListener("click", (event) => {
      const span = event.target.closest?.(".token");
      if (span) this.show(span, true);
      else if (!event.target.closest?.("#alternatives")) this.hide();
    });
    document.addEventListener("focusin", (event) => {
      const span = event.target.closest?.(".token");
      if (span && span.matches(":focus-visible")) { if (!this.isLeaving) this.show(span, false); }
      else if (!span && !event.target.closest?.("#alternatives")) this.hide();
    });
    document.addEventListener("keydown", (event) => this.key(event));
    addEventListener("resize", () => this.hide());
  }

  show(span, isPinned) {
    clearTimeout(this.timer);
    if (this.isPinned && !isPinned) return;
    this.isPinned = isPinned;
    if (this.span === span && !this.window.hidden) return;
    this.span?.classList.remove("at");
    this.span = span;
    span.classList.add("at");
    const view = span.closest(".tokens").view, at = Number(span.dataset.at), token = view.tokens[at];
    this.place = { view, at };
    const canGoOn = view.canGoOn !== false;
    const rows = token.alternatives.map((each) => {
      const share = Math.exp(each.logprob), isSame = each.id === token.id;
      const bar = make("span", { class: "bar", "aria-hidden": "true" });
      bar.style.setProperty("--share", share);
      const row = make("button", { type: "button", class: isSame ? "same" : "", disabled: !canGoOn,
        on: { click: () => { this.hide(); this.choose(view, at, each); } } },
        make("span", { class: "hidden", text: `${say(isSame ? "again from" : "go on with")} ` }),
        make("span", { class: "word", text: visible(each.text) }), bar, make("span", { class: "share", text: percent(share) }));
      return make("li", {}, row);
    });
    find("alternatives-token").textContent = visible(token.text);
    find("alternatives-id").textContent = token.id ?? "";
    find("alternatives-score").textContent = described(token, at) + this.more(view, at);
    speak(find("alternatives-hint"), !rows.length ? "no alternatives" : canGoOn ? "choose to go on" : "wait to go on");
    find("alternatives-list").replaceChildren(...rows);
    this.window.hidden = false;
    this.position();
  }

  /** Beside another model, what that one thought of the same token. */
  more(view, at) {
    const other = view.other?.();
    return other && other.tokens[at]?.logprob != null && other.tokens[at].id === view.tokens[at].id
      ? ` · ${say("the other model", percent(Math.exp(other.tokens[at].logprob)))}` : "";
  }

  position() {
    // Of a token that is broken over two lines the longer part: the other one is but the space before a word.
    const box = [...this.span.getClientRects()].sort((one, other) => other.width - one.width)[0] ?? this.span.getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = this.window;
    const left = Math.max(8, Math.min(box.left, document.documentElement.clientWidth - width - 8));
    const isBelow = box.bottom + height + 8 < innerHeight || box.top < height + 8;
    this.window.style.left = `${left + scrollX}px`;
    this.window.style.top = `${(isBelow ? box.bottom + 6 : box.top - height - 6) + scrollY}px`;
  }

  hideSoon() {
    if (this.isPinned || this.window.hidden || this.window.contains(document.activeElement)) return;
    if (this.span === document.activeElement) return;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.hide(), WAIT);
  }

  hide() {
    clearTimeout(this.timer);
    this.isPinned = false;
    this.window.hidden = true;
    this.span?.classList.remove("at");
    this.span = null;
  }

  key(event) {
    if (event.target.closest?.("#alternatives")) this.keyInWindow(event);
    else if (event.target.closest?.(".token")) this.keyOnToken(event);
    else if (event.key === "Escape") this.hide();
  }

  keyInWindow(event) {
    const buttons = [...find("alternatives-list").querySelectorAll("button")], at = buttons.indexOf(document.activeElement);
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) { event.preventDefault(); buttons[(at + step + buttons.length) % buttons.length]?.focus(); }
    if (event.key === "Escape") this.leave(event);
  }

  /** Back to the token, without its window. */
  leave(event) {
    const span = this.span;
    event.preventDefault();
    this.hide();
    this.isLeaving = true;
    span?.focus();
    this.isLeaving = false;
  }

  keyOnToken(event) {
    const span = event.target.closest(".token"), view = span.closest(".tokens").view, at = Number(span.dataset.at);
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -at, End: view.tokens.length - 1 - at }[event.key];
    if (step !== undefined) {
      event.preventDefault();
      const next = view.spanAt(at + step);
      if (!next) return;
      span.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
      this.show(next, false);
    } else if (["Enter", " ", "ArrowDown"].includes(event.key)) {
      event.preventDefault();
      this.show(span, true);
      find("alternatives-list").querySelector("button")?.focus();
    } else if (event.key === "Escape") this.hide();
  }
}
