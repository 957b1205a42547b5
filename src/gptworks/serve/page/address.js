// Everything that decides an answer, in the part of the address that browsers do not send: a link brings it back.
import { parsed, SETTINGS } from "./settings.js";

const LONGEST = 6000; // characters of a prompt in a link; servers of links cut longer ones
export const MODES = ["complete", "chat", "read"];

/** `state`: mode, models, prompt, system, messages, settings. */
export const written = ({ mode, models, prompt, system, settings, isComparing }) => {
  const found = new URLSearchParams();
  found.set("mode", mode);
  if (models[0]) found.set("model", models[0]);
  if (isComparing && models[1]) found.set("with", models[1]);
  for (const { name } of SETTINGS) if (settings[name] !== undefined) found.set(name, settings[name]);
  if (mode === "chat" && system) found.set("system", system.slice(0, LONGEST));
  if (prompt && prompt.length <= LONGEST) found.set("prompt", prompt);
  return "#" + found;
};

/** What the address says; names of models that are not served stay, so that the page can say so. */
export const read = (fragment) => {
  const given = new URLSearchParams(fragment.replace(/^#/, "")), settings = {};
  for (const setting of SETTINGS) {
    const value = parsed(setting, given.get(setting.name));
    if (value !== undefined) settings[setting.name] = value;
  }
  return {
    mode: MODES.includes(given.get("mode")) ? given.get("mode") : "complete",
    models: [given.get("model"), given.get("with")],
    isComparing: given.has("with"),
    prompt: given.get("prompt") ?? "",
    system: given.get("system") ?? "",
    settings,
  };
};
