// Set the chosen theme before the first paint. Without a choice, the style sheet follows the system.
(() => {
  const chosen = localStorage.getItem("oncelog-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
