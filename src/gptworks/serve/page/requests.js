// What is asked of the server, out of what the page is set to. Also the same as commands for elsewhere.
import { SETTINGS } from "./settings.js";

export const ALTERNATIVES = 5;
export const USUAL_TOKENS = 200; // where nobody says how many; fewer where the context has less room

/** 31 bits, which every client can carry. */
export const newSeed = () => crypto.getRandomValues(new Uint32Array(1))[0] >>> 1;

/** For a text that goes on from a token of another: its own draws, the same each time. 31 bits as well. */
export const branchSeed = (seed, numBefore) => {
  let mixed = Math.imul(seed ^ Math.floor(seed / 2 ** 32), 0x9e3779b1) ^ Math.imul(numBefore + 1, 0x85ebca6b);
  for (const factor of [0x7feb352d, 0x846ca68b]) mixed = Math.imul(mixed ^ mixed >>> 15, factor);
  return (mixed ^ mixed >>> 16) >>> 1;
};

const stopsOf = (lines) => lines.split("\n").filter((line) => line).map((line) => line.replaceAll("\\n", "\n"));

const biasesOf = (text) => Object.fromEntries(
  text.split(/[\s,]+/).filter(Boolean).map((pair) => pair.split(":")).map(([id, bias]) => [id, Number(bias)]));

/** The fields of a request: only what differs from the server's own defaults. */
const fieldsOf = (settings, mode) => {
  const found = {};
  for (const { name, kind, only } of SETTINGS) {
    const value = settings[name];
    if (value === undefined || (only && only !== mode)) continue;
    found[name] = kind === "lines" ? stopsOf(value) : kind === "biases" ? biasesOf(value) : value;
  }
  return found;
};

/** `prompt`: text or token ids. `hasPrompt`: the answer begins with the prompt and its scores. */
export const completion = (model, prompt, settings, { room, hasTokens = true, hasPrompt = hasTokens } = {}) => {
  const fields = fieldsOf(settings, "complete"), count = fields.max_tokens ?? Math.max(1, Math.min(USUAL_TOKENS, room ?? USUAL_TOKENS));
  const body = { model, prompt, ...fields, max_tokens: count, stream: !(fields.best_of > (fields.n ?? 1)) };
  if (hasTokens) Object.assign(body, { logprobs: ALTERNATIVES, return_token_ids: true, echo: hasPrompt });
  return { path: "/v1/completions", body };
};

/** Only reads: what the model thinks of each token of a text. */
export const reading = (model, text) => ({
  path: "/v1/completions",
  body: { model, prompt: text, max_tokens: 0, temperature: 0, echo: true, logprobs: ALTERNATIVES, return_token_ids: true },
});

/** What ends a text that comes to its greatest length: the number that was asked for, the usual one, or the context. `room`: of a completion. */
export const limitOf = ({ max_tokens: asked }, room = 0) => asked !== undefined ? "length" : room > USUAL_TOKENS ? "usual" : "full";

export const conversation = (model, messages, settings, { hasTokens = true } = {}) => {
  const body = { model, messages, ...fieldsOf(settings, "chat"), stream: true };
  if (hasTokens) Object.assign(body, { logprobs: true, top_logprobs: ALTERNATIVES, return_token_ids: true });
  return { path: "/v1/chat/completions", body };
};

// The same elsewhere. What only the token view needs is left out.

const withoutView = ({ path, body }) => {
  const { return_token_ids: _, ...rest } = body;
  if (body.max_tokens !== 0) for (const name of ["echo", "logprobs", "top_logprobs"]) delete rest[name];
  return { path, body: { ...rest, stream: undefined } };
};

/** A word for a shell, quoted where it must be. */
export const shellWord = (text) => /^[\w@%+=:,./-]+$/.test(text) ? text : quoted(text);
const quoted = (text) => `'${String(text).replaceAll("'", `'\\''`)}'`;
const python = (value) => {
  if (value === true) return "True";
  if (value === false) return "False";
  if (value === null) return "None";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([key, each]) => `${JSON.stringify(key)}: ${python(each)}`).join(", ")}}`;
  return JSON.stringify(value);
};

export const asCurl = (request, { hasKey }) => {
  const { path, body } = withoutView(request), key = hasKey ? ` -H "Authorization: Bearer $GPTWORKS_API_KEY"` : "";
  return `curl ${location.origin}${path}${key} -H 'Content-Type: application/json' -d ${quoted(JSON.stringify(body))}`;
};

const OPENAI = ["model", "prompt", "messages", "max_tokens", "temperature", "top_p", "n", "best_of", "stop", "seed",
  "presence_penalty", "frequency_penalty", "logit_bias", "echo", "logprobs"];

export const asPython = (request, { hasKey }) => {
  const { path, body } = withoutView(request), isChat = path.includes("chat");
  const known = {}, more = {};
  for (const [name, value] of Object.entries(body)) if (value !== undefined) (OPENAI.includes(name) ? known : more)[name] = value;
  const lines = Object.entries(known).map(([name, value]) => `    ${name}=${python(value)},`);
  if (Object.keys(more).length) lines.push(`    extra_body=${python(more)},`);
  const key = hasKey ? `os.environ["GPTWORKS_API_KEY"]` : `"none"`;
  return [
    ...(hasKey ? ["import os", ""] : []), "import openai", "",
    `client = openai.OpenAI(base_url="${location.origin}/v1", api_key=${key})`,
    `answer = client.${isChat ? "chat.completions" : "completions"}.create(`, ...lines, ")",
    isChat ? "print(answer.choices[0].message.content)" : body.max_tokens === 0 ? "print(answer.choices[0].logprobs)" : "print(answer.choices[0].text)",
  ].join("\n");
};

const OPTIONS = { max_tokens: "max-new-tokens", min_tokens: "min-new-tokens", no_repeat_ngram_size: "no-repeat-ngram",
  ignore_eos: "ignore-eod", n: "num-return-sequences" };

/** `gptworks generate` writes on from a text; of a conversation and of a text that is only read there is no such command. */
export const asCommand = ({ body }) => {
  if (body.messages || body.max_tokens === 0) return null;
  const words = ["gptworks", "generate", "--server", location.origin, "--model", shellWord(body.model), "--prompt", quoted(body.prompt)];
  for (const { name } of SETTINGS) {
    const value = body[name], option = `--${OPTIONS[name] ?? name.replaceAll("_", "-")}`;
    if (value === undefined || value === false) continue;
    if (name === "temperature" && value === 0) words.push("--strategy", "greedy");
    else if (value === true) words.push(option);
    else if (name === "stop") for (const each of value) words.push(option, quoted(each));
    else if (name === "logit_bias") for (const [id, bias] of Object.entries(value)) words.push(option, `${id}:${bias}`);
    else words.push(option, value);
  }
  return words.join(" ");
};
