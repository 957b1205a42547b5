// Two models on the same text: which of them expected each token more.
const STRONG = 2, WEAK = 0.5; // nats of difference

const sideOf = (mine, other) => {
  const gap = mine - other;
  return Math.abs(gap) < WEAK ? "even" : `${gap > 0 ? "more" : "less"}${Math.abs(gap) >= STRONG ? "-much" : ""}`;
};

/** How many tokens from the beginning are the same in both. */
export const sameTokens = (one, two) => {
  let at = 0;
  while (at < one.tokens.length && at < two.tokens.length && one.tokens[at].id === two.tokens[at].id) at++;
  return at;
};

/** Marks tokens that both have in common by who expected them more; gives the sum of the second's advantage in nats. */
export const markDifference = (one, two) => {
  const count = sameTokens(one, two);
  let gain = 0, scored = 0;
  for (let at = 0; at < count; at++) {
    const [a, b] = [one.tokens[at].logprob, two.tokens[at].logprob];
    if (a == null || b == null) continue;
    one.spanAt(at).dataset.side = sideOf(a, b);
    two.spanAt(at).dataset.side = sideOf(b, a);
    gain += b - a;
    scored++;
  }
  return { count, scored, gain };
};
