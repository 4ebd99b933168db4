// Shared by charts.js and explorer.js: the page's data, number formatting, the tooltip, the light and dark themes.
"use strict";

const floatscope = (() => {
  const data = JSON.parse(document.getElementById("data").textContent);

  // Three significant digits: 0.123, 12.3, 1,234; very large and very small numbers with powers of ten.
  function format(value) {
    if (value === null || value === undefined || Number.isNaN(value)) return "not measured";
    const size = Math.abs(value);
    if (size !== 0 && (size >= 1e6 || size < 1e-3))
      return value.toExponential(2).replace("e", " × 10^").replace("+", "");
    const rounded = size >= 1000 ? Math.round(value) : Number(value.toPrecision(3));
    return rounded.toLocaleString("en-US", { maximumFractionDigits: 6 }).replace("-", "−");
  }

  function element(name, attributes, parent, text) {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    if (parent) parent.append(node);
    return node;
  }

  // The class that sets a model's colour as --c.
  function modelClass(label) {
    const index = data.models.indexOf(label);
    return index < 0 ? "m-none" : `m${index % data.model_colours}`;
  }

  // One tooltip for the whole page, which screen readers announce. `getPoint` returns the point that the tooltip
  // belongs to, so that it moves when the page scrolls; rows are {label, value, mark: class of a swatch}.
  const box = document.getElementById("tip");
  let getTipPoint = null;
  function placeTip() {
    if (!getTipPoint) return;
    const [x, y] = getTipPoint();
    box.hidden = y < -30 || y > window.innerHeight + 30;
    if (box.hidden) return;
    const { width, height } = box.getBoundingClientRect();
    const pageWidth = document.documentElement.clientWidth;
    const left = x + 14 + width > pageWidth - 8 ? x - width - 14 : x + 14;
    const top = y - height - 12 < 8 ? y + 18 : y - height - 12;
    box.style.left = `${Math.max(8, Math.min(left, pageWidth - width - 8))}px`;
    box.style.top = `${Math.max(8, Math.min(top, window.innerHeight - height - 8))}px`;
  }
  const tip = {
    show(getPoint, title, rows) {
      box.replaceChildren();
      element("strong", {}, box, title);
      const list = element("dl", {}, box);
      for (const row of rows) {
        const term = element("dt", {}, list);
        if (row.mark) element("span", { class: `swatch ${row.mark}`, "aria-hidden": "true" }, term);
        term.append(row.label);
        element("dd", {}, list, row.value);
      }
      getTipPoint = getPoint;
      placeTip();
    },
    hide() {
      getTipPoint = null;
      box.hidden = true;
    },
  };
  window.addEventListener("scroll", placeTip, { passive: true, capture: true });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") tip.hide();
  });

  // CSS colours follow the theme by themselves; a canvas must be redrawn when it changes.
  const print = window.matchMedia("print");
  const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
  const listeners = [];
  const theme = {
    get isPrint() {
      return print.matches;
    },
    get isDark() {
      const selected = document.documentElement.dataset.theme;
      return !print.matches && (selected ? selected === "dark" : prefersDark.matches);
    },
    onChange(redraw) {
      listeners.push(redraw);
    },
  };
  const notify = () => listeners.forEach((redraw) => redraw());
  prefersDark.addEventListener("change", notify);
  print.addEventListener("change", () => {
    if (print.matches) document.querySelectorAll("details").forEach((details) => (details.open = true));
    notify();
  });
  document.getElementById("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = theme.isDark ? "light" : "dark";
    notify();
  });

  // Mark the entry of the contents whose section is on screen.
  const links = new Map([...document.querySelectorAll("#contents a")].map((a) => [a.hash.slice(1), a]));
  const observer = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        if (!entry.isIntersecting) continue;
        links.forEach((a) => a.removeAttribute("aria-current"));
        links.get(entry.target.id).setAttribute("aria-current", "true");
      }
    },
    { rootMargin: "-20% 0px -70% 0px" },
  );
  for (const id of links.keys()) observer.observe(document.getElementById(id));

  return { data, format, element, modelClass, tip, theme };
})();
