// Questions to the server, and its answers in one shape.

const KEY = "gptworks.key"; // of the session only: gone when the tab is closed
let askForKey = async () => null, modelGone = () => {};

/** `asks`: gives a key that the user has typed, or null. */
export const useKeysFrom = (asks) => { askForKey = asks; };

/** `tells`: called when the server does not know a model that was asked for; it may be another server since. */
export const tellOfModelsGone = (tells) => { modelGone = tells; };

/** What went wrong, as the server says it. `status` 0: it does not answer. */
export class Problem extends Error {
  constructor(status, message, { code = "", retryAfter = 0 } = {}) {
    super(message);
    Object.assign(this, { status, code, retryAfter });
  }
}

const problemOf = async (answer) => {
  let error = {};
  try { error = (await answer.json()).error ?? {}; } catch { /* a proxy's page */ }
  const retryAfter = Number(answer.headers.get("Retry-After")) || 0;
  return new Problem(answer.status, error.message ?? answer.statusText, { code: error.code ?? "", retryAfter });
};

const ask = async (path, body, signal) => {
  for (;;) {
    const key = sessionStorage.getItem(KEY), headers = {};
    if (key) headers.Authorization = `Bearer ${key}`;
    if (body) headers["Content-Type"] = "application/json";
    let answer;
    try {
      answer = await fetch(path, { method: body ? "POST" : "GET", headers, signal, body: body && JSON.stringify(body) });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Problem(0, "");
    }
    if (answer.ok) return answer;
    const problem = await problemOf(answer);
    if (problem.code === "model_not_found") modelGone();
    if (answer.status !== 401) throw problem;
    // Several questions may be refused at once: the key that another of them got may be good for this one.
    if (sessionStorage.getItem(KEY) !== key) continue;
    const given = await askForKey(Boolean(key));
    if (!given) throw problem;
    sessionStorage.setItem(KEY, given);
  }
};

export const get = async (path, signal) => (await ask(path, undefined, signal)).json();
export const post = async (path, body, signal) => (await ask(path, body, signal)).json();
export const cardOf = (model) => get("/card/" + model.split("/").map(encodeURIComponent).join("/"));

/** The objects of a stream, one after the other. */
async function* events(path, body, signal) {
  const answer = await ask(path, body, signal), reader = answer.body.getReader(), decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    let piece;
    try { piece = await reader.read(); } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Problem(0, "");
    }
    if (piece.done) throw new Problem(0, ""); // without its end: the server has gone
    const parts = (rest + decoder.decode(piece.value, { stream: true })).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const found = JSON.parse(data);
      if (found.error) throw new Problem(500, found.error.message, { code: found.error.code ?? "" });
      yield found;
    }
  }
}

const alternativesOf = (found) => (found ?? []).map(({ id, token, logprob }) => ({ id, text: token, logprob }));

/** Of a choice of either endpoint: text, scored tokens, why it ended. `hasPrompt`: its tokens begin with the prompt's. */
const pieceOf = (choice, hasPrompt) => {
  const message = choice.delta ?? choice.message, tokens = [];
  if (choice.logprobs?.content) {
    for (const each of choice.logprobs.content) {
      tokens.push({ id: each.id, text: each.token, logprob: each.logprob, alternatives: alternativesOf(each.top_logprobs) });
    }
  } else if (choice.logprobs) {
    const { tokens: texts, token_logprobs: scores, alternatives } = choice.logprobs;
    const prompt = hasPrompt ? choice.prompt_token_ids ?? [] : [], ids = [...prompt, ...(choice.token_ids ?? [])];
    texts.forEach((text, at) => tokens.push(
      { id: ids[at], text, logprob: scores[at], alternatives: alternativesOf(alternatives?.[at]), isPrompt: at < prompt.length }));
  }
  return { index: choice.index, text: message ? message.content ?? "" : choice.text, tokens, finish: choice.finish_reason };
};

/** Pieces of the answer as they come; of a request that cannot be streamed, all at once. */
export async function* pieces({ path, body }, signal) {
  if (!body.stream) {
    for (const choice of (await post(path, body, signal)).choices) yield pieceOf(choice, body.echo);
    return;
  }
  for await (const { choices } of events(path, body, signal)) {
    for (const choice of choices) yield pieceOf(choice, body.echo);
  }
}
