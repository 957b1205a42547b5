// What was asked and answered, kept in this browser only.
const PLACE = "gptworks.history", MOST = 50, LONGEST = 20000; // entries; characters of a text

const cut = (text) => text.length > LONGEST ? text.slice(0, LONGEST) : text;

export const all = () => {
  try {
    const found = JSON.parse(localStorage.getItem(PLACE) ?? "[]");
    return Array.isArray(found) ? found : [];
  } catch { return []; } // another program's, or forbidden
};

const keep = (entries) => {
  for (let count = Math.min(MOST, entries.length); count >= 0; count = Math.floor(count / 2) || (count ? 0 : -1)) {
    try {
      localStorage.setItem(PLACE, JSON.stringify(entries.slice(0, count)));
      return;
    } catch { /* no room: fewer */ }
  }
};

/** `entry`: the state of the page, and the answers by model. One with the same `id` is replaced. */
export const add = (entry) => {
  const shortened = { ...entry, prompt: cut(entry.prompt), answers: entry.answers.map(({ model, text }) => ({ model, text: cut(text) })) };
  keep([shortened, ...all().filter((each) => each.id !== entry.id)]);
};
export const remove = (id) => keep(all().filter((each) => each.id !== id));
export const clear = () => { try { localStorage.removeItem(PLACE); } catch { /* forbidden: then nothing is there */ } };
