// A curve of losses as SVG.
const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 360, HEIGHT = 170, LEFT = 40, RIGHT = 10, TOP = 8, BOTTOM = 24;

const shape = (tag, attributes, text) => {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text != null) element.textContent = text;
  return element;
};

/** Round numbers that enclose the range, about `count` of them. */
export const ticks = (low, high, count = 4) => {
  if (low === high) { low -= 0.5; high += 0.5; }
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough * 0.999);
  const found = [];
  for (let at = Math.floor(low / step + 1e-9); at <= Math.ceil(high / step - 1e-9); at++) found.push(Number((at * step).toPrecision(6)));
  return found;
};

const short = (value) => value >= 1e6 ? `${value / 1e6}M` : value >= 1e4 ? `${value / 1e3}k` : String(value);

/** `curves`: [{points, kind}], kind raw, smooth or mark. `step`: where the weights are from, marked. `title`: in words. */
export const lossChart = (curves, { step, steps, title }) => {
  const shown = curves.filter(({ points }) => points.length), all = shown.flatMap(({ points }) => points);
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title, class: "chart" });
  const last = Math.max(steps ?? 0, ...all.map(([x]) => x));
  // The first losses of a run are far above the rest: the scale is that of most of the curve.
  const sorted = all.map(([, y]) => y).sort((a, b) => a - b), high = sorted[Math.floor((sorted.length - 1) * 0.97)];
  const rows = ticks(sorted[0], high), columns = ticks(0, last, 3).filter((each) => each <= last);
  const x = (value) => LEFT + value / last * (WIDTH - LEFT - RIGHT);
  const y = (value) => TOP + (1 - (Math.min(value, rows.at(-1)) - rows[0]) / (rows.at(-1) - rows[0])) * (HEIGHT - TOP - BOTTOM);
  for (const row of rows) {
    svg.append(shape("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(row), y2: y(row) }),
      shape("text", { x: LEFT - 6, y: y(row) + 4, "text-anchor": "end" }, short(row)));
  }
  for (const column of columns) svg.append(shape("text", { x: x(column), y: HEIGHT - 6, "text-anchor": column ? "middle" : "start" }, short(column)));
  if (step != null) svg.append(shape("line", { class: "here", x1: x(step), x2: x(step), y1: TOP, y2: HEIGHT - BOTTOM }));
  for (const { points, kind } of shown) {
    svg.append(shape("polyline", { class: `curve ${kind}`, points: points.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ") }));
    if (kind === "mark") for (const [a, b] of points) svg.append(shape("circle", { class: "dot", cx: x(a).toFixed(1), cy: y(b).toFixed(1), r: 2.5 }));
  }
  return svg;
};
