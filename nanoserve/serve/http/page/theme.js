// Light or dark theme. Not a module, so that it runs before the page is first drawn, without a flash.

(() => {
  const KEY = "nanoserve.theme";
  const root = document.documentElement;
  const wanted = matchMedia("(prefers-color-scheme: dark)");

  function kept() {
    try {
      return localStorage.getItem(KEY);
    } catch {
      return null;
    }
  }

  function show(theme) {
    if (theme === "dark" || theme === "light") root.dataset.theme = theme;
    root.dispatchEvent(new Event("themechange"));
  }

  show(kept());
  wanted.addEventListener("change", () => show(kept()));
  document.addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme").addEventListener("click", () => {
      const isDark = root.dataset.theme ? root.dataset.theme === "dark" : wanted.matches;
      const theme = isDark ? "light" : "dark";
      try {
        localStorage.setItem(KEY, theme);
      } catch {
        // without storage, the choice lasts for as long as the page is open
      }
      show(theme);
    });
  });
})();
