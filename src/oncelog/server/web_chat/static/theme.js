// Before anything is drawn: light or dark, if the visitor has chosen one; else it is as the system has it.
(() => {
  const chosen = localStorage.getItem("oncelog-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
