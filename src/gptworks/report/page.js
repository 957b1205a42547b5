"use strict";
// The page is whole without this: here are the language of the browser, the values under the pointer, and, where
// `gptworks watch` serves the page, its renewal.
if (navigator.language.toLowerCase().startsWith("zh")) document.getElementById("lang-zh").checked = true;

const nearest = (points, x) => {
  let low = 0, high = points.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle + 1; else high = middle;
  }
  return low && x - points[low - 1][0] < points[low][0] - x ? points[low - 1] : points[low];
};

const isShown = (run) => {
  const choice = document.getElementById("run-" + run);
  return !choice || choice.checked;
};

const hover = (figure, series) => {
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  tip.setAttribute("aria-hidden", "true");
  figure.append(tip);
  const markAt = (x) => {
    for (const line of figure.querySelectorAll(".at")) { line.setAttribute("x1", x); line.setAttribute("x2", x); }
  };
  const hide = () => { tip.hidden = true; markAt(-9); };
  figure.addEventListener("pointerleave", hide);
  figure.addEventListener("pointermove", (event) => {
    const svg = [...figure.querySelectorAll("svg[data-x]")].find((each) => each.getBoundingClientRect().width);
    if (!svg) return;
    const box = svg.getBoundingClientRect(), [left, , right] = svg.dataset.box.split(" ").map(Number);
    const [low, high] = svg.dataset.x.split(" ").map(Number);
    const at = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    if (at < left || at > right) { hide(); return; }
    const x = low + (at - left) / (right - left) * (high - low);
    markAt(at);
    const found = series.filter((each) => isShown(each.run)).map((each) => [each, ...nearest(each.points, x)]);
    const steps = found.map(([, step]) => step), closest = steps.length ? steps.reduce(
      (best, step) => Math.abs(step - x) < Math.abs(best - x) ? step : best) : 0;
    const table = document.createElement("table"), head = document.createElement("b");
    head.textContent = `${document.getElementById("lang-zh").checked ? "步" : "step"} ${closest.toLocaleString("en")}`;
    for (const [each, step, value] of found) {
      const row = table.insertRow();
      row.style.color = `var(--run-${each.run})`;
      row.insertCell().textContent = step === closest ? each.label : `${each.label} (${step.toLocaleString("en")})`;
      row.insertCell().textContent = Number(Number(value).toPrecision(5)).toString();
    }
    tip.replaceChildren(head, table);
    tip.hidden = !found.length;
    const place = figure.getBoundingClientRect(), across = event.clientX - place.left + 14;
    tip.style.left = Math.max(0, Math.min(across, place.width - tip.offsetWidth - 4)) + "px";
    tip.style.top = event.clientY - place.top + 16 + "px";
  });
};

const attach = () => {
  const series = JSON.parse(document.getElementById("series").textContent);
  for (const figure of document.querySelectorAll("figure[data-chart]")) hover(figure, series[figure.dataset.chart]);
};
attach();

const every = Number(document.body.dataset.every);
if (every) {
  let tag = "";
  const renew = async () => {
    const status = document.getElementById("status");
    try {
      const answer = await fetch(location.pathname, { headers: { "If-None-Match": tag } });
      status.className = answer.status < 400 ? "" : "bad";
      if (answer.status !== 200) return;
      tag = answer.headers.get("ETag") ?? "";
      const found = new DOMParser().parseFromString(await answer.text(), "text/html");
      const open = [...document.querySelectorAll("details")].map((each) => each.open);
      document.querySelector("main").replaceWith(found.querySelector("main"));
      document.getElementById("series").textContent = found.getElementById("series").textContent;
      document.querySelectorAll("details").forEach((each, number) => { each.open = open[number] ?? false; });
      attach();
    } catch {
      status.className = "bad";  // the server has gone; what was seen stays
    }
  };
  setInterval(renew, every * 1000);
}
