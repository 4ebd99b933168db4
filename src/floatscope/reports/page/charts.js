// Lines, maps and dots as SVG, from the numbers embedded in the page.
//
// A kind of chart is a function (svg, chart, width, shown) that draws and answers with a view: its height and how a
// cursor moves over it. Pointer and arrow keys move the same cursor, and what it stands on is shown in the tooltip.
(() => {
  const { data, format, element, modelClass, tip } = floatscope;
  const SVG = "http://www.w3.org/2000/svg";
  const LEVELS = data.levels;
  const MARKERS = [
    "M-3.2,0a3.2,3.2 0 1,0 6.4,0a3.2,3.2 0 1,0 -6.4,0z",
    "M-2.9,-2.9h5.8v5.8h-5.8z",
    "M0,-3.9L3.6,2.6H-3.6z",
    "M0,-4.2L4.2,0L0,4.2L-4.2,0z",
  ];
  const TOP = "M-4,-3.5H4L0,3.5z";
  const DOT = "M-2.5,0a2.5,2.5 0 1,0 5,0a2.5,2.5 0 1,0 -5,0z";
  const MARK_NAMES = { top: "top key", anchor: "anchor", commit: "committed" };

  function draw(name, attributes, parent, text) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  }

  // Scales ---------------------------------------------------------------------------------------------------------

  function niceTicks(low, high, count) {
    const rough = (high - low || 1) / Math.max(1, count);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
    const ticks = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step);
    return ticks;
  }

  function logTicks(low, high) {
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power++)
      for (const m of high / low > 1e3 ? [1] : [1, 2, 5]) ticks.push(m * 10 ** power);
    return ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
  }

  // An axis along [from, to] pixels that holds all values; ends are rounded outwards a little.
  function scale(values, from, to, log, count) {
    const there = values.filter((v) => v !== null && v !== undefined && (!log || v > 0));
    let low = there.length ? Math.min(...there) : log ? 0.1 : 0;
    let high = there.length ? Math.max(...there) : 1;
    if (log) {
      if (low === high) [low, high] = [low / 2, high * 2];
      const at = (v) => from + ((to - from) * Math.log(Math.max(v, low) / low)) / Math.log(high / low);
      return { at, ticks: logTicks(low, high) };
    }
    if (low === 0 && high === 0) high = 1;
    const pad = (high - low || Math.abs(high) || 1) * 0.06;
    if (low >= 0 && low <= 0.75 * high) low = 0;
    else low -= pad;
    high = high <= 0 && high + pad > 0 ? 0 : high + pad;
    return { at: (v) => from + ((to - from) * (v - low)) / (high - low), ticks: niceTicks(low, high, count) };
  }

  function tickText(ticks, log) {
    if (log)
      return ticks.map((tick) => (tick < 1e-3 || tick >= 1e5 ? format(tick) : String(Number(tick.toPrecision(3)))));
    const most = Math.max(...ticks.map(Math.abs), 0);
    if (most >= 1e5 || (most > 0 && most < 1e-3)) return ticks.map((tick) => format(tick));
    const digits = Math.max(0, ...ticks.map((t) => (String(Number(t.toPrecision(6))).split(".")[1] || "").length));
    return ticks.map((tick) => tick.toFixed(digits).replace("-", "−"));
  }

  const textWidth = (text) => 6.6 * String(text).length;

  // Words in lines that fit; a label takes 15 pixels a line.
  function wrapped(text, width) {
    const found = [""];
    for (const word of text.split(" ")) {
      const line = found[found.length - 1];
      if (line && textWidth(`${line} ${word}`) > width) found.push(word);
      else found[found.length - 1] = line ? `${line} ${word}` : word;
    }
    return found;
  }
  const label = (svg, lines, at) =>
    lines.forEach((line, i) => draw("text", { ...at, y: at.y + 15 * i, class: "label" }, svg, line));

  const all = (chart, shown) => chart.series.filter((series) => shown(series.model));
  const values = (series) => [...series.y, ...(series.low || []), ...(series.high || [])];
  const interval = (series, i) =>
    series.low && series.low[i] !== null && series.high[i] !== null
      ? ` [${format(series.low[i])}, ${format(series.high[i])}]`
      : "";
  const called = (series) =>
    series.name === series.model || !series.model ? series.name : `${series.model} · ${series.name}`;
  const look = (series) => `${modelClass(series.model)}${series.control ? " control" : ""}`;

  // Which marker a series has: its place among the series of its model that are no controls.
  function marker(chart, series) {
    if (series.control) return MARKERS[0];
    const same = chart.series.filter((other) => other.model === series.model && !other.control);
    return MARKERS[same.indexOf(series) % MARKERS.length];
  }

  // Lines ----------------------------------------------------------------------------------------------------------

  function lines(svg, chart, width, shown) {
    const visible = all(chart, shown);
    const above = wrapped(chart.y_label, width);
    const below = wrapped(chart.x_label, width - 20);
    const top = 11 + 15 * above.length;
    const bottom = top + Math.round(Math.min(280, Math.max(170, width * 0.42)));
    const height = bottom + 25 + 15 * below.length;
    const named = chart.x.some((x) => typeof x === "string");
    const own = named ? chart.x.map((_, i) => i) : chart.x;
    const xs = (series) => series.x || own;
    const reference = Array.isArray(chart.reference)
      ? chart.reference
      : chart.reference === null
        ? []
        : own.map(() => chart.reference);
    const everyY = [...visible.flatMap(values), ...reference];
    const y = scale(everyY, bottom, top, chart.log, 5);
    const yText = tickText(y.ticks, chart.log);
    const left = Math.max(28, ...yText.map((t) => textWidth(t) + 12));
    const right = width - 14;
    const everyX = [...new Set(visible.flatMap(xs).concat(own))].sort((a, b) => a - b);
    const [first, last] = [everyX[0], everyX[everyX.length - 1]];
    const x = (v) =>
      first === last ? (left + right) / 2 : left + 6 + ((right - left - 12) * (v - first)) / (last - first);

    const grid = draw("g", { class: "grid" }, svg);
    y.ticks.forEach((tick, i) => {
      draw("line", { x1: left, x2: right, y1: y.at(tick), y2: y.at(tick) }, grid);
      draw("text", { x: left - 8, y: y.at(tick) + 4, "text-anchor": "end" }, grid, yText[i]);
    });
    label(svg, above, { x: 0, y: 12 });
    label(svg, below, { x: right, y: bottom + 36, "text-anchor": "end" });
    axis(grid, named ? chart.x : null, everyX, x, left, right, bottom);

    for (const series of [...visible].sort((a, b) => b.control - a.control)) {
      const g = draw("g", { class: `series ${look(series)}` }, svg);
      const at = xs(series);
      if (series.low) {
        for (const part of pieces(at, series.low, series.high)) {
          const [a, b] = [part[0], part[part.length - 1]];
          if (a === b)
            draw("path", { class: "whisker", d: `M${x(at[a])},${y.at(series.low[a])}V${y.at(series.high[a])}` }, g);
          else {
            const up = part.map((i) => `${x(at[i])},${y.at(series.high[i])}`);
            const down = part.map((i) => `${x(at[i])},${y.at(series.low[i])}`).reverse();
            draw("path", { class: "band", d: `M${up.join("L")}L${down.join("L")}z` }, g);
          }
        }
      }
      for (const part of pieces(at, series.y, series.y))
        draw("path", { class: "line", d: `M${part.map((i) => `${x(at[i])},${y.at(series.y[i])}`).join("L")}` }, g);
      const every = at.length <= 40 ? 1 : Math.ceil(at.length / 12);
      series.y.forEach((v, i) => {
        if (v === null || i % every) return;
        draw("path", { class: "dot", d: marker(chart, series), transform: `translate(${x(at[i])},${y.at(v)})` }, g);
      });
    }
    if (reference.length) {
      const points = own
        .map((v, i) => (reference[i] === null ? null : `${x(v)},${y.at(reference[i])}`))
        .filter(Boolean);
      draw(
        "path",
        {
          class: "reference",
          d: `M${points.length > 1 ? points.join("L") : `${left},${points[0].split(",")[1]}H${right}`}`,
        },
        svg,
      );
    }
    const rule = draw("line", { class: "rule", y1: top, y2: bottom, visibility: "hidden" }, svg);

    return {
      height,
      first: () => everyX[0],
      pick: (px) => everyX.reduce((best, v) => (Math.abs(x(v) - px) < Math.abs(x(best) - px) ? v : best), everyX[0]),
      step: (v, dx) => everyX[Math.max(0, Math.min(everyX.length - 1, everyX.indexOf(v) + dx))],
      show(v) {
        rule.setAttribute("x1", x(v));
        rule.setAttribute("x2", x(v));
        rule.setAttribute("visibility", "visible");
        const rows = [];
        for (const series of visible) {
          const own = xs(series); // where it has no such x, the nearest it has
          const i = own.reduce((best, other, j) => (Math.abs(other - v) < Math.abs(own[best] - v) ? j : best), 0);
          const where = own[i] === v ? "" : ` at ${format(own[i])}`;
          if (series.y.length && series.y[i] !== null)
            rows.push({
              label: called(series) + where,
              value: format(series.y[i]) + interval(series, i),
              mark: look(series),
            });
        }
        const i = own.indexOf(v);
        if (reference.length && i >= 0)
          rows.push({ label: chart.reference_label || "reference", value: format(reference[i]), mark: "ref" });
        return { x: x(v), y: top, title: named ? chart.x[v] : `${chart.x_label} ${format(v)}`, rows };
      },
      leave: () => rule.setAttribute("visibility", "hidden"),
    };
  }

  // Runs of indices at which both arrays hold numbers.
  function pieces(at, low, high) {
    const found = [];
    let run = [];
    at.forEach((_, i) => {
      if (low[i] !== null && high[i] !== null) run.push(i);
      else if (run.length) (found.push(run), (run = []));
    });
    return run.length ? [...found, run] : found;
  }

  // The horizontal axis: names where there are names, else round numbers among which whole ones stay whole.
  function axis(grid, names, at, x, left, right, bottom) {
    draw("line", { class: "base", x1: left, x2: right, y1: bottom, y2: bottom }, grid);
    const whole = at.every(Number.isInteger);
    let ticks = names ? at : niceTicks(at[0], at[at.length - 1], (right - left) / 70);
    if (whole && !names) ticks = ticks.filter(Number.isInteger);
    const texts = names ? ticks.map((i) => String(names[i])) : tickText(ticks);
    const room = names ? (right - left) / Math.max(1, ticks.length) : Infinity;
    const every = Math.ceil((Math.max(...texts.map(textWidth), 0) + 10) / room);
    ticks.forEach((tick, i) => {
      if (room !== Infinity && i % every) return;
      const text = draw("text", { x: x(tick), y: bottom + 17, "text-anchor": "middle" }, grid, texts[i]);
      const half = textWidth(texts[i]) / 2;
      if (x(tick) + half > right + 12) text.setAttribute("text-anchor", "end");
    });
  }

  // Dots -----------------------------------------------------------------------------------------------------------

  const APART = 11; // pixels between the series of a category

  function dots(svg, chart, width, shown) {
    const visible = all(chart, shown);
    const widest = Math.max(...chart.categories.map(textWidth), 0) + 16;
    const above = widest > width * 0.32; // no room beside: a category's name goes above its dots
    const left = above ? 4 : widest;
    const right = width - 16;
    const row = Math.max(24, APART * visible.length + 10) + (above ? 18 : 0);
    const top = 8;
    const bottom = top + row * chart.categories.length;
    const below = wrapped(chart.x_label, width - 20);
    const height = bottom + 25 + 15 * below.length;
    const every = [...visible.flatMap(values), ...(chart.reference === null ? [] : [chart.reference])];
    const x = scale(every, left + 8, right - 8, chart.log, (right - left) / 60);
    const middle = (c, s) => {
      const start = top + c * row + (above ? 18 : 0);
      const tall = row - (above ? 18 : 0);
      return start + tall / 2 + (s - (visible.length - 1) / 2) * APART;
    };

    const grid = draw("g", { class: "grid" }, svg);
    const texts = tickText(x.ticks, chart.log);
    x.ticks.forEach((tick, i) => {
      draw("line", { x1: x.at(tick), x2: x.at(tick), y1: top, y2: bottom }, grid);
      draw("text", { x: x.at(tick), y: bottom + 17, "text-anchor": "middle" }, grid, texts[i]);
    });
    label(svg, below, { x: right, y: bottom + 36, "text-anchor": "end" });
    chart.categories.forEach((name, c) => {
      if (c) draw("line", { class: "divide", x1: 0, x2: right, y1: top + c * row, y2: top + c * row }, grid);
      const at = above
        ? { x: 4, y: top + c * row + 15 }
        : { x: left - 10, y: top + (c + 0.5) * row + 4, "text-anchor": "end" };
      const short = textWidth(name) > width ? `${name.slice(0, Math.floor(width / 6.6) - 1)}…` : name;
      draw("text", { ...at, class: "category" }, svg, short);
    });
    if (chart.reference !== null)
      draw("path", { class: "reference", d: `M${x.at(chart.reference)},${top}V${bottom}` }, svg);
    const band = draw("rect", { class: "row", x: 0, width: right, height: row, visibility: "hidden" }, svg);
    visible.forEach((series, s) => {
      const g = draw("g", { class: `series ${look(series)}` }, svg);
      series.y.forEach((v, c) => {
        if (v === null) return;
        if (interval(series, c))
          draw("path", { class: "whisker", d: `M${x.at(series.low[c])},${middle(c, s)}H${x.at(series.high[c])}` }, g);
        draw(
          "path",
          {
            class: "dot large",
            d: marker(chart, series),
            transform: `translate(${x.at(v)},${middle(c, s)}) scale(1.35)`,
          },
          g,
        );
      });
    });

    const last = chart.categories.length - 1;
    return {
      height,
      first: () => 0,
      pick: (px, py) => Math.max(0, Math.min(last, Math.floor((py - top) / row))),
      step: (c, dx, dy) => Math.max(0, Math.min(last, c + dy + dx)),
      show(c) {
        band.setAttribute("y", top + c * row);
        band.setAttribute("visibility", "visible");
        const rows = visible.map((series) => ({
          label: called(series),
          value: format(series.y[c]) + interval(series, c),
          mark: look(series),
        }));
        const known = visible.map((series) => series.y[c]).filter((v) => v !== null);
        return {
          x: known.length ? x.at(Math.max(...known)) : left,
          y: top + c * row + 4,
          title: chart.categories[c],
          rows,
        };
      },
      leave: () => band.setAttribute("visibility", "hidden"),
    };
  }

  // Maps -----------------------------------------------------------------------------------------------------------

  function range(chart) {
    if (chart.bounds) return chart.bounds;
    let [low, high] = [Infinity, -Infinity];
    for (const row of chart.values)
      for (const v of row) if (v !== null && (!chart.log || v > 0)) [low, high] = [Math.min(low, v), Math.max(high, v)];
    if (low > high) return [0.5, 1];
    if (!chart.log && low >= 0) low = 0;
    return low === high ? [low - 0.5, high + 0.5] : [low, high];
  }

  function levels(chart) {
    const [low, high] = range(chart);
    const at = chart.log
      ? (v) => Math.log(Math.max(v, low) / low) / Math.log(high / low)
      : (v) => (v - low) / (high - low);
    return (v) => Math.max(0, Math.min(LEVELS - 1, Math.round((LEVELS - 1) * at(v))));
  }

  function map(svg, chart, width) {
    const [rows, columns] = [chart.y.length, chart.x.length];
    const left = Math.max(30, ...chart.y.map((y) => textWidth(y) + 12));
    const right = width - 8;
    const cell = (right - left) / columns;
    const tall = Math.max(4, Math.min(22, Math.max(cell, Math.min(15, 220 / rows)), 460 / rows));
    const above = wrapped(chart.y_label, width);
    const below = wrapped(chart.x_label, width - 20);
    const top = 7 + 15 * above.length;
    const bottom = top + rows * tall;
    const height = Math.ceil(bottom + 25 + 15 * below.length);
    const level = levels(chart);

    // Narrow columns share a pixel, and the largest of them is seen. All cells of a level are one path.
    const drawn = Math.min(columns, Math.floor(right - left));
    const paths = Array.from({ length: LEVELS }, () => []);
    const shape = (v) => Number(v.toFixed(2));
    for (let r = 0; r < rows; r++) {
      let start = 0,
        before = -1;
      for (let c = 0; c <= drawn; c++) {
        let most = null;
        if (c < drawn)
          for (let k = Math.floor((c * columns) / drawn); k < Math.floor(((c + 1) * columns) / drawn); k++) {
            const v = chart.values[r][k];
            if (v !== null && (most === null || v > most)) most = v;
          }
        const now = most === null ? -1 : level(most);
        if (now === before && c < drawn) continue;
        const wide = (right - left) / drawn;
        if (before >= 0)
          paths[before].push(
            `M${shape(left + start * wide)},${shape(top + r * tall)}` +
              `h${shape((c - start) * wide)}v${shape(tall)}h${shape((start - c) * wide)}z`,
          );
        [start, before] = [c, now];
      }
    }
    const cells = draw("g", { class: "cells" }, svg);
    draw("rect", { class: "absent", x: left, y: top, width: right - left, height: bottom - top }, cells);
    paths.forEach((path, i) => path.length && draw("path", { class: `f${i}`, d: path.join("") }, cells));

    const grid = draw("g", { class: "grid" }, svg);
    const x = (c) => left + (c + 0.5) * cell;
    const y = (r) => top + (r + 0.5) * tall;
    const named = (labels) => labels.some((label) => typeof label === "string");
    const spaced = (labels, room, size) => {
      const every = Math.max(1, Math.ceil((labels.length * size) / room));
      const nice = named(labels) ? every : [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].find((n) => n >= every) || every;
      return labels.map((_, i) => i).filter((i) => i % nice === 0);
    };
    const wordy = Math.max(...chart.x.map(textWidth), 0) + 14;
    for (const c of spaced(chart.x, right - left, wordy))
      draw("text", { x: x(c), y: bottom + 17, "text-anchor": "middle" }, grid, chart.x[c]);
    for (const r of spaced(chart.y, bottom - top, 15))
      draw("text", { x: left - 7, y: y(r) + 4, "text-anchor": "end" }, grid, chart.y[r]);
    label(svg, above, { x: 0, y: 12 });
    label(svg, below, { x: right, y: bottom + 36, "text-anchor": "end" });

    const path = chart.marks.filter((mark) => mark[2] === "top").sort((a, b) => a[0] - b[0]);
    if (path.length)
      draw("path", { class: "mark top-path", d: `M${path.map(([r, c]) => `${x(c)},${y(r)}`).join("L")}` }, svg);
    for (const [r, c, kind] of chart.marks) {
      const place = { class: `mark ${kind}`, transform: `translate(${x(c)},${y(r)})` };
      if (kind === "anchor")
        draw(
          "rect",
          { ...place, x: -Math.max(cell, 5) / 2, y: -tall / 2, width: Math.max(cell, 5), height: tall, rx: 1.5 },
          svg,
        );
      else draw("path", { ...place, d: kind === "top" ? TOP : DOT }, svg);
    }
    const frame = draw("rect", { class: "cursor", width: Math.max(cell, 4), height: tall, visibility: "hidden" }, svg);

    const within = (v, n) => Math.max(0, Math.min(n - 1, v));
    return {
      height,
      first: () => [0, 0],
      pick: (px, py) => [within(Math.floor((py - top) / tall), rows), within(Math.floor((px - left) / cell), columns)],
      step: ([r, c], dx, dy) => [within(r + dy, rows), within(c + dx, columns)],
      show([r, c]) {
        frame.setAttribute("x", x(c) - Math.max(cell, 4) / 2);
        frame.setAttribute("y", top + r * tall);
        frame.setAttribute("visibility", "visible");
        const said = chart.marks.filter((mark) => mark[0] === r && mark[1] === c).map((mark) => MARK_NAMES[mark[2]]);
        const v = chart.values[r][c];
        const result = [{ label: chart.unit || "value", value: format(v) }];
        if (said.length) result.push({ label: "marked", value: said.join(", ") });
        return {
          x: x(c),
          y: y(r),
          title: `${chart.y_label} ${chart.y[r]}, ${chart.x_label} ${chart.x[c]}`,
          rows: result,
        };
      },
      leave: () => frame.setAttribute("visibility", "hidden"),
    };
  }

  // Legends --------------------------------------------------------------------------------------------------------

  // A button for each model, then what dashes and shapes mean where they mean something.
  function seriesLegend(legend, chart, hidden, redraw) {
    for (const label of new Set(chart.series.map((series) => series.model))) {
      const button = element("button", { type: "button", "aria-pressed": "true", class: modelClass(label) }, legend);
      element("span", { class: "swatch", "aria-hidden": "true" }, button);
      button.append(label);
      button.addEventListener("click", () => {
        if (!hidden.delete(label)) hidden.add(label);
        button.setAttribute("aria-pressed", String(!hidden.has(label)));
        redraw();
      });
    }
    const key = (name, shape, kind) => {
      const item = element("span", { class: "key" }, legend);
      const svg = draw(
        "svg",
        { width: 20, height: 10, viewBox: "-10 -5 20 10", class: `series ${kind}`, "aria-hidden": "true" },
        item,
      );
      if (kind === "control") draw("path", { class: "line", d: "M-9,0H9" }, svg);
      draw("path", { class: "dot", d: shape }, svg);
      item.append(name);
    };
    const several = chart.series.some((series) => !series.control && marker(chart, series) !== MARKERS[0]);
    const said = new Set();
    for (const series of chart.series) {
      const name = `${series.name}${series.control}`;
      if ((series.control || several) && !said.has(name))
        key(series.name, marker(chart, series), series.control ? "control" : "");
      said.add(name);
    }
    if (chart.reference !== null) {
      const item = element("span", { class: "key" }, legend);
      element("span", { class: "swatch ref", "aria-hidden": "true" }, item);
      item.append(chart.reference_label || "reference");
    }
  }

  function mapLegend(legend, chart) {
    if (chart.model) {
      const item = element("span", { class: `key ${modelClass(chart.model)}` }, legend);
      element("span", { class: "swatch", "aria-hidden": "true" }, item);
      item.append(chart.model);
    }
    const [low, high] = range(chart);
    const item = element("span", { class: "key" }, legend, format(low));
    const bar = draw("svg", { width: 128, height: 10, class: "colours", "aria-hidden": "true" }, item);
    for (let i = 0; i < LEVELS; i++) draw("rect", { class: `f${i}`, x: i * 2, width: 2.5, height: 10 }, bar);
    item.append(`${format(high)}${chart.unit ? ` ${chart.unit}` : ""}${chart.log ? " (log)" : ""}`);
    for (const kind of new Set(chart.marks.map((mark) => mark[2]))) {
      const mark = element("span", { class: "key" }, legend);
      const svg = draw("svg", { width: 14, height: 12, viewBox: "-7 -6 14 12", "aria-hidden": "true" }, mark);
      if (kind === "anchor") draw("rect", { class: "mark anchor", x: -4, y: -4, width: 8, height: 8, rx: 1.5 }, svg);
      else draw("path", { class: `mark ${kind}`, d: kind === "top" ? TOP : DOT }, svg);
      mark.append(MARK_NAMES[kind]);
    }
  }

  // A chart on the page ----------------------------------------------------------------------------------------------

  const KEYS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

  function place(holder) {
    const chart = data.charts[Number(holder.dataset.chart)];
    const legend = element("div", { class: "legend" }, holder);
    const plot = element(
      "div",
      { class: "plot", tabindex: "0", role: "group", "aria-label": `${chart.title}. Arrow keys read the values.` },
      holder,
    );
    const hidden = new Set();
    let view,
      svg,
      cursor,
      drawnAt = 0;

    function redraw() {
      drawnAt = plot.clientWidth;
      svg = draw("svg", {}, null);
      view = { lines, dots, map }[chart.kind](svg, chart, drawnAt, (model) => !hidden.has(model));
      svg.setAttribute("viewBox", `0 0 ${drawnAt} ${view.height}`);
      svg.setAttribute("aria-hidden", "true");
      plot.replaceChildren(svg);
      cursor = undefined;
    }
    function show(at) {
      cursor = at;
      const told = view.show(at);
      const where = () => {
        const box = svg.getBoundingClientRect();
        const zoom = box.width / drawnAt;
        return [box.left + told.x * zoom, box.top + told.y * zoom];
      };
      tip.show(where, told.title, told.rows);
    }
    function leave() {
      cursor = undefined;
      view.leave();
      tip.hide();
    }
    function point(event) {
      const box = svg.getBoundingClientRect();
      const zoom = drawnAt / box.width;
      show(view.pick((event.clientX - box.left) * zoom, (event.clientY - box.top) * zoom));
    }
    plot.addEventListener("pointermove", point);
    plot.addEventListener("pointerdown", point);
    plot.addEventListener("pointerleave", leave);
    plot.addEventListener("blur", leave);
    plot.addEventListener("keydown", (event) => {
      if (!(event.key in KEYS)) return;
      event.preventDefault();
      show(cursor === undefined ? view.first() : view.step(cursor, ...KEYS[event.key]));
    });

    if (chart.kind === "map") mapLegend(legend, chart);
    else seriesLegend(legend, chart, hidden, redraw);
    redraw();
    new ResizeObserver(() => plot.clientWidth !== drawnAt && plot.clientWidth > 0 && redraw()).observe(plot);
  }

  document.querySelectorAll("[data-chart]").forEach(place);
})();
