// What charts.js and explorer.js share: the page's data, numbers as text, the one tooltip, light and dark.
"use strict";

const floatscope = (() => {
  const data = JSON.parse(document.getElementById("data").textContent);

  // Three figures: 0.123, 12.3, 1,234; very large and very small ones by powers of ten.
  function format(value) {
    if (value === null || value === undefined || Number.isNaN(value)) return "not measured";
    const size = Math.abs(value);
    if (size !== 0 && (size >= 1e6 || size < 1e-3))
      return value.toExponential(2).replace("e", " × 10^").replace("+", "");
    const rounded = size >= 1000 ? Math.round(value) : Number(value.toPrecision(3));
    return rounded.toLocaleString("en-US", { maximumFractionDigits: 6 }).replace("-", "−");
  }

  function element(name, attributes, parent, text) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  }

  // The class that carries a model's colour as --c.
  function modelClass(label) {
    const at = data.models.indexOf(label);
    return at < 0 ? "m-none" : `m${at % data.model_colours}`;
  }

  // One tooltip for the whole page, also read out. `where` gives the point it belongs to, so that it follows when the
  // page scrolls; rows are {label, value, mark: class of a swatch}.
  const box = document.getElementById("tip");
  let follows = null;
  function place() {
    if (!follows) return;
    const [x, y] = follows();
    box.hidden = y < -30 || y > window.innerHeight + 30;
    if (box.hidden) return;
    const { width, height } = box.getBoundingClientRect();
    const room = document.documentElement.clientWidth;
    const left = x + 14 + width > room - 8 ? x - width - 14 : x + 14;
    const top = y - height - 12 < 8 ? y + 18 : y - height - 12;
    box.style.left = `${Math.max(8, Math.min(left, room - width - 8))}px`;
    box.style.top = `${Math.max(8, Math.min(top, window.innerHeight - height - 8))}px`;
  }
  const tip = {
    show(where, title, rows) {
      box.replaceChildren();
      element("strong", {}, box, title);
      const list = element("dl", {}, box);
      for (const row of rows) {
        const term = element("dt", {}, list);
        if (row.mark) element("span", { class: `swatch ${row.mark}`, "aria-hidden": "true" }, term);
        term.append(row.label);
        element("dd", {}, list, row.value);
      }
      follows = where;
      place();
    },
    hide() {
      follows = null;
      box.hidden = true;
    },
  };
  window.addEventListener("scroll", place, { passive: true, capture: true });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") tip.hide();
  });

  // Colours are CSS, which follows by itself; only a canvas has to be told.
  const print = window.matchMedia("print");
  const night = window.matchMedia("(prefers-color-scheme: dark)");
  const followers = [];
  const theme = {
    get print() {
      return print.matches;
    },
    get dark() {
      const chosen = document.documentElement.dataset.theme;
      return !print.matches && (chosen ? chosen === "dark" : night.matches);
    },
    follow(redraw) {
      followers.push(redraw);
    },
  };
  const told = () => followers.forEach((redraw) => redraw());
  night.addEventListener("change", told);
  print.addEventListener("change", () => {
    if (print.matches) document.querySelectorAll("details").forEach((details) => (details.open = true));
    told();
  });
  document.getElementById("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = theme.dark ? "light" : "dark";
    told();
  });

  // The entry of the contents whose section is being read.
  const links = new Map([...document.querySelectorAll("#contents a")].map((a) => [a.hash.slice(1), a]));
  const seen = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        if (!entry.isIntersecting) continue;
        links.forEach((a) => a.removeAttribute("aria-current"));
        links.get(entry.target.id).setAttribute("aria-current", "true");
      }
    },
    { rootMargin: "-20% 0px -70% 0px" },
  );
  for (const id of links.keys()) seen.observe(document.getElementById(id));

  return { data, format, element, modelClass, tip, theme };
})();
