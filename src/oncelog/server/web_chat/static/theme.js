// Set the chosen theme before the first paint. If none was chosen, the style sheet follows the system's theme.
(() => {
  const chosen = localStorage.getItem("oncelog-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
