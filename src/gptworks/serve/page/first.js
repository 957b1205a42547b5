// Before the first paint: else a page that was set to dark begins with a flash of white.
try {
  const theme = localStorage.getItem("gptworks.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch { /* forbidden */ }
