// Before the first paint: else a page that was set to dark begins with a flash of white.
try {
  const theme = localStorage.getItem("gptworks.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch { /* forbidden */ }
// All else after it, as on two cores the browser and the server would stand in its way; unseen, nothing is ever painted.
const rest = () => import("/page/main.js");
addEventListener("DOMContentLoaded", () => {
  const isTold = !document.hidden && PerformanceObserver.supportedEntryTypes?.includes("paint");
  if (isTold) new PerformanceObserver(rest).observe({ type: "paint", buffered: true });
  setTimeout(rest, isTold ? 300 : 0);
});
