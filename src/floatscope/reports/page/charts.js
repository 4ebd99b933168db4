// Lines, maps and dots as SVG, from the numbers embedded in the page.
//
// Each kind of chart is a function (svg, chart, width, isVisible) that draws the chart and returns a view: its height
// and how a cursor moves over it. The pointer and the arrow keys move the same cursor; the tooltip shows its values.
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
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    if (parent) parent.append(node);
    return node;
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

  // An axis along [from, to] pixels that contains all values, with a little padding.
  function scale(values, from, to, log, count) {
    const measured = values.filter((v) => v !== null && v !== undefined && (!log || v > 0));
    let low = measured.length ? Math.min(...measured) : log ? 0.1 : 0;
    let high = measured.length ? Math.max(...measured) : 1;
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
    const largest = Math.max(...ticks.map(Math.abs), 0);
    if (largest >= 1e5 || (largest > 0 && largest < 1e-3)) return ticks.map((tick) => format(tick));
    const digits = Math.max(0, ...ticks.map((t) => (String(Number(t.toPrecision(6))).split(".")[1] || "").length));
    return ticks.map((tick) => tick.toFixed(digits).replace("-", "−"));
  }

  const textWidth = (text) => 6.6 * String(text).length;

  // Break a text into lines that fit; each line of a label is 15 pixels high.
  function wrapText(text, width) {
    const lines = [""];
    for (const word of text.split(" ")) {
      const line = lines[lines.length - 1];
      if (line && textWidth(`${line} ${word}`) > width) lines.push(word);
      else lines[lines.length - 1] = line ? `${line} ${word}` : word;
    }
    return lines;
  }
  const drawLabel = (svg, lines, position) =>
    lines.forEach((line, i) => draw("text", { ...position, y: position.y + 15 * i, class: "label" }, svg, line));

  const visibleSeries = (chart, isVisible) => chart.series.filter((series) => isVisible(series.model));
  const values = (series) => [...series.y, ...(series.low || []), ...(series.high || [])];
  const intervalText = (series, i) =>
    series.low && series.low[i] !== null && series.high[i] !== null
      ? ` [${format(series.low[i])}, ${format(series.high[i])}]`
      : "";
  const seriesName = (series) =>
    series.name === series.model || !series.model ? series.name : `${series.model} · ${series.name}`;
  const seriesClass = (series) => `${modelClass(series.model)}${series.control ? " control" : ""}`;

  // The marker depends on the index among the series of the same model that are not controls.
  function marker(chart, series) {
    if (series.control) return MARKERS[0];
    const same = chart.series.filter((other) => other.model === series.model && !other.control);
    return MARKERS[same.indexOf(series) % MARKERS.length];
  }

  // Lines ----------------------------------------------------------------------------------------------------------

  function lines(svg, chart, width, isVisible) {
    const visible = visibleSeries(chart, isVisible);
    const above = wrapText(chart.y_label, width);
    const below = wrapText(chart.x_label, width - 20);
    const top = 11 + 15 * above.length;
    const bottom = top + Math.round(Math.min(280, Math.max(170, width * 0.42)));
    const height = bottom + 25 + 15 * below.length;
    const hasNames = chart.x.some((x) => typeof x === "string");
    const chartX = hasNames ? chart.x.map((_, i) => i) : chart.x;
    const xs = (series) => series.x || chartX;
    const reference = Array.isArray(chart.reference)
      ? chart.reference
      : chart.reference === null
        ? []
        : chartX.map(() => chart.reference);
    const allY = [...visible.flatMap(values), ...reference];
    const y = scale(allY, bottom, top, chart.log, 5);
    const yText = tickText(y.ticks, chart.log);
    const left = Math.max(28, ...yText.map((t) => textWidth(t) + 12));
    const right = width - 14;
    const allX = [...new Set(visible.flatMap(xs).concat(chartX))].sort((a, b) => a - b);
    const [first, last] = [allX[0], allX[allX.length - 1]];
    const x = (v) =>
      first === last ? (left + right) / 2 : left + 6 + ((right - left - 12) * (v - first)) / (last - first);

    const grid = draw("g", { class: "grid" }, svg);
    y.ticks.forEach((tick, i) => {
      draw("line", { x1: left, x2: right, y1: y.at(tick), y2: y.at(tick) }, grid);
      draw("text", { x: left - 8, y: y.at(tick) + 4, "text-anchor": "end" }, grid, yText[i]);
    });
    drawLabel(svg, above, { x: 0, y: 12 });
    drawLabel(svg, below, { x: right, y: bottom + 36, "text-anchor": "end" });
    drawAxis(grid, hasNames ? chart.x : null, allX, x, left, right, bottom);

    for (const series of [...visible].sort((a, b) => b.control - a.control)) {
      const g = draw("g", { class: `series ${seriesClass(series)}` }, svg);
      const own = xs(series);
      if (series.low) {
        for (const part of splitAtGaps(own, series.low, series.high)) {
          const [a, b] = [part[0], part[part.length - 1]];
          if (a === b)
            draw("path", { class: "whisker", d: `M${x(own[a])},${y.at(series.low[a])}V${y.at(series.high[a])}` }, g);
          else {
            const upper = part.map((i) => `${x(own[i])},${y.at(series.high[i])}`);
            const lower = part.map((i) => `${x(own[i])},${y.at(series.low[i])}`).reverse();
            draw("path", { class: "band", d: `M${upper.join("L")}L${lower.join("L")}z` }, g);
          }
        }
      }
      for (const part of splitAtGaps(own, series.y, series.y))
        draw("path", { class: "line", d: `M${part.map((i) => `${x(own[i])},${y.at(series.y[i])}`).join("L")}` }, g);
      const spacing = own.length <= 40 ? 1 : Math.ceil(own.length / 12);
      series.y.forEach((v, i) => {
        if (v === null || i % spacing) return;
        draw("path", { class: "dot", d: marker(chart, series), transform: `translate(${x(own[i])},${y.at(v)})` }, g);
      });
    }
    if (reference.length) {
      const points = chartX
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
      first: () => allX[0],
      pick: (px) => allX.reduce((best, v) => (Math.abs(x(v) - px) < Math.abs(x(best) - px) ? v : best), allX[0]),
      step: (v, dx) => allX[Math.max(0, Math.min(allX.length - 1, allX.indexOf(v) + dx))],
      show(v) {
        rule.setAttribute("x1", x(v));
        rule.setAttribute("x2", x(v));
        rule.setAttribute("visibility", "visible");
        const rows = [];
        for (const series of visible) {
          const own = xs(series); // a series without this x shows its nearest one
          const i = own.reduce((best, other, j) => (Math.abs(other - v) < Math.abs(own[best] - v) ? j : best), 0);
          const nearest = own[i] === v ? "" : ` at ${format(own[i])}`;
          if (series.y.length && series.y[i] !== null)
            rows.push({
              label: seriesName(series) + nearest,
              value: format(series.y[i]) + intervalText(series, i),
              mark: seriesClass(series),
            });
        }
        const i = chartX.indexOf(v);
        if (reference.length && i >= 0)
          rows.push({ label: chart.reference_label || "reference", value: format(reference[i]), mark: "ref" });
        return { x: x(v), y: top, title: hasNames ? chart.x[v] : `${chart.x_label} ${format(v)}`, rows };
      },
      leave: () => rule.setAttribute("visibility", "hidden"),
    };
  }

  // Groups of consecutive indices at which both arrays have numbers.
  function splitAtGaps(xs, low, high) {
    const groups = [];
    let group = [];
    xs.forEach((_, i) => {
      if (low[i] !== null && high[i] !== null) group.push(i);
      else if (group.length) (groups.push(group), (group = []));
    });
    return group.length ? [...groups, group] : groups;
  }

  // The horizontal axis: names if there are names, else round numbers; integers keep integer ticks.
  function drawAxis(grid, names, xs, x, left, right, bottom) {
    draw("line", { class: "base", x1: left, x2: right, y1: bottom, y2: bottom }, grid);
    let ticks = names ? xs : niceTicks(xs[0], xs[xs.length - 1], (right - left) / 70);
    if (xs.every(Number.isInteger) && !names) ticks = ticks.filter(Number.isInteger);
    const texts = names ? ticks.map((i) => String(names[i])) : tickText(ticks);
    const space = names ? (right - left) / Math.max(1, ticks.length) : Infinity;
    const spacing = Math.ceil((Math.max(...texts.map(textWidth), 0) + 10) / space);
    ticks.forEach((tick, i) => {
      if (space !== Infinity && i % spacing) return;
      const text = draw("text", { x: x(tick), y: bottom + 17, "text-anchor": "middle" }, grid, texts[i]);
      const half = textWidth(texts[i]) / 2;
      if (x(tick) + half > right + 12) text.setAttribute("text-anchor", "end");
    });
  }

  // Dots -----------------------------------------------------------------------------------------------------------

  const SERIES_GAP = 11; // pixels between the series of a category

  function dots(svg, chart, width, isVisible) {
    const visible = visibleSeries(chart, isVisible);
    const nameWidth = Math.max(...chart.categories.map(textWidth), 0) + 16;
    const isAbove = nameWidth > width * 0.32; // long names are above the dots instead of beside them
    const left = isAbove ? 4 : nameWidth;
    const right = width - 16;
    const rowHeight = Math.max(24, SERIES_GAP * visible.length + 10) + (isAbove ? 18 : 0);
    const top = 8;
    const bottom = top + rowHeight * chart.categories.length;
    const below = wrapText(chart.x_label, width - 20);
    const height = bottom + 25 + 15 * below.length;
    const allValues = [...visible.flatMap(values), ...(chart.reference === null ? [] : [chart.reference])];
    const x = scale(allValues, left + 8, right - 8, chart.log, (right - left) / 60);
    const middle = (c, s) => {
      const start = top + c * rowHeight + (isAbove ? 18 : 0);
      const height = rowHeight - (isAbove ? 18 : 0);
      return start + height / 2 + (s - (visible.length - 1) / 2) * SERIES_GAP;
    };

    const grid = draw("g", { class: "grid" }, svg);
    const texts = tickText(x.ticks, chart.log);
    x.ticks.forEach((tick, i) => {
      draw("line", { x1: x.at(tick), x2: x.at(tick), y1: top, y2: bottom }, grid);
      draw("text", { x: x.at(tick), y: bottom + 17, "text-anchor": "middle" }, grid, texts[i]);
    });
    drawLabel(svg, below, { x: right, y: bottom + 36, "text-anchor": "end" });
    chart.categories.forEach((name, c) => {
      const y = top + c * rowHeight;
      if (c) draw("line", { class: "divide", x1: 0, x2: right, y1: y, y2: y }, grid);
      const position = isAbove
        ? { x: 4, y: top + c * rowHeight + 15 }
        : { x: left - 10, y: top + (c + 0.5) * rowHeight + 4, "text-anchor": "end" };
      const short = textWidth(name) > width ? `${name.slice(0, Math.floor(width / 6.6) - 1)}…` : name;
      draw("text", { ...position, class: "category" }, svg, short);
    });
    if (chart.reference !== null)
      draw("path", { class: "reference", d: `M${x.at(chart.reference)},${top}V${bottom}` }, svg);
    const highlight = draw("rect", { class: "row", x: 0, width: right, height: rowHeight, visibility: "hidden" }, svg);
    visible.forEach((series, s) => {
      const g = draw("g", { class: `series ${seriesClass(series)}` }, svg);
      series.y.forEach((v, c) => {
        if (v === null) return;
        if (intervalText(series, c))
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
      pick: (px, py) => Math.max(0, Math.min(last, Math.floor((py - top) / rowHeight))),
      step: (c, dx, dy) => Math.max(0, Math.min(last, c + dy + dx)),
      show(c) {
        highlight.setAttribute("y", top + c * rowHeight);
        highlight.setAttribute("visibility", "visible");
        const rows = visible.map((series) => ({
          label: seriesName(series),
          value: format(series.y[c]) + intervalText(series, c),
          mark: seriesClass(series),
        }));
        const measured = visible.map((series) => series.y[c]).filter((v) => v !== null);
        return {
          x: measured.length ? x.at(Math.max(...measured)) : left,
          y: top + c * rowHeight + 4,
          title: chart.categories[c],
          rows,
        };
      },
      leave: () => highlight.setAttribute("visibility", "hidden"),
    };
  }

  // Maps -----------------------------------------------------------------------------------------------------------

  function colourBounds(chart) {
    if (chart.bounds) return chart.bounds;
    let [low, high] = [Infinity, -Infinity];
    for (const row of chart.values)
      for (const v of row) if (v !== null && (!chart.log || v > 0)) [low, high] = [Math.min(low, v), Math.max(high, v)];
    if (low > high) return [0.5, 1];
    if (!chart.log && low >= 0) low = 0;
    return low === high ? [low - 0.5, high + 0.5] : [low, high];
  }

  // A function from a value to its colour level.
  function colourLevels(chart) {
    const [low, high] = colourBounds(chart);
    const fraction = chart.log
      ? (v) => Math.log(Math.max(v, low) / low) / Math.log(high / low)
      : (v) => (v - low) / (high - low);
    return (v) => Math.max(0, Math.min(LEVELS - 1, Math.round((LEVELS - 1) * fraction(v))));
  }

  function map(svg, chart, width) {
    const [rows, columns] = [chart.y.length, chart.x.length];
    const left = Math.max(30, ...chart.y.map((y) => textWidth(y) + 12));
    const right = width - 8;
    const cellWidth = (right - left) / columns;
    const cellHeight = Math.max(4, Math.min(22, Math.max(cellWidth, Math.min(15, 220 / rows)), 460 / rows));
    const above = wrapText(chart.y_label, width);
    const below = wrapText(chart.x_label, width - 20);
    const top = 7 + 15 * above.length;
    const bottom = top + rows * cellHeight;
    const height = Math.ceil(bottom + 25 + 15 * below.length);
    const level = colourLevels(chart);

    // Columns narrower than a pixel are merged; the largest value is drawn. All cells of a level are one path.
    const drawnColumns = Math.min(columns, Math.floor(right - left));
    const paths = Array.from({ length: LEVELS }, () => []);
    const firstColumn = (c) => Math.floor((c * columns) / drawnColumns);
    const round = (v) => Number(v.toFixed(2));
    for (let r = 0; r < rows; r++) {
      let start = 0,
        previous = -1;
      for (let c = 0; c <= drawnColumns; c++) {
        let largest = null;
        if (c < drawnColumns)
          for (let k = firstColumn(c); k < firstColumn(c + 1); k++) {
            const v = chart.values[r][k];
            if (v !== null && (largest === null || v > largest)) largest = v;
          }
        const current = largest === null ? -1 : level(largest);
        if (current === previous && c < drawnColumns) continue;
        const columnWidth = (right - left) / drawnColumns;
        if (previous >= 0)
          paths[previous].push(
            `M${round(left + start * columnWidth)},${round(top + r * cellHeight)}` +
              `h${round((c - start) * columnWidth)}v${round(cellHeight)}h${round((start - c) * columnWidth)}z`,
          );
        [start, previous] = [c, current];
      }
    }
    const cells = draw("g", { class: "cells" }, svg);
    draw("rect", { class: "absent", x: left, y: top, width: right - left, height: bottom - top }, cells);
    paths.forEach((path, i) => path.length && draw("path", { class: `f${i}`, d: path.join("") }, cells));

    const grid = draw("g", { class: "grid" }, svg);
    const x = (c) => left + (c + 0.5) * cellWidth;
    const y = (r) => top + (r + 0.5) * cellHeight;
    const hasNames = (labels) => labels.some((label) => typeof label === "string");
    const labelledIndices = (labels, space, size) => {
      const needed = Math.max(1, Math.ceil((labels.length * size) / space));
      const rounded = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].find((n) => n >= needed) || needed;
      const spacing = hasNames(labels) ? needed : rounded;
      return labels.map((_, i) => i).filter((i) => i % spacing === 0);
    };
    const labelWidth = Math.max(...chart.x.map(textWidth), 0) + 14;
    for (const c of labelledIndices(chart.x, right - left, labelWidth))
      draw("text", { x: x(c), y: bottom + 17, "text-anchor": "middle" }, grid, chart.x[c]);
    for (const r of labelledIndices(chart.y, bottom - top, 15))
      draw("text", { x: left - 7, y: y(r) + 4, "text-anchor": "end" }, grid, chart.y[r]);
    drawLabel(svg, above, { x: 0, y: 12 });
    drawLabel(svg, below, { x: right, y: bottom + 36, "text-anchor": "end" });

    const path = chart.marks.filter((mark) => mark[2] === "top").sort((a, b) => a[0] - b[0]);
    if (path.length)
      draw("path", { class: "mark top-path", d: `M${path.map(([r, c]) => `${x(c)},${y(r)}`).join("L")}` }, svg);
    const frameWidth = Math.max(cellWidth, 5);
    for (const [r, c, kind] of chart.marks) {
      const attributes = { class: `mark ${kind}`, transform: `translate(${x(c)},${y(r)})` };
      if (kind === "anchor")
        draw(
          "rect",
          { ...attributes, x: -frameWidth / 2, y: -cellHeight / 2, width: frameWidth, height: cellHeight, rx: 1.5 },
          svg,
        );
      else draw("path", { ...attributes, d: kind === "top" ? TOP : DOT }, svg);
    }
    const cursorWidth = Math.max(cellWidth, 4);
    const cursor = draw("rect", { class: "cursor", width: cursorWidth, height: cellHeight, visibility: "hidden" }, svg);

    const clamp = (v, n) => Math.max(0, Math.min(n - 1, v));
    return {
      height,
      first: () => [0, 0],
      pick: (px, py) => [
        clamp(Math.floor((py - top) / cellHeight), rows),
        clamp(Math.floor((px - left) / cellWidth), columns),
      ],
      step: ([r, c], dx, dy) => [clamp(r + dy, rows), clamp(c + dx, columns)],
      show([r, c]) {
        cursor.setAttribute("x", x(c) - cursorWidth / 2);
        cursor.setAttribute("y", top + r * cellHeight);
        cursor.setAttribute("visibility", "visible");
        const marks = chart.marks.filter((mark) => mark[0] === r && mark[1] === c).map((mark) => MARK_NAMES[mark[2]]);
        const v = chart.values[r][c];
        const result = [{ label: chart.unit || "value", value: format(v) }];
        if (marks.length) result.push({ label: "mark", value: marks.join(", ") });
        return {
          x: x(c),
          y: y(r),
          title: `${chart.y_label} ${chart.y[r]}, ${chart.x_label} ${chart.x[c]}`,
          rows: result,
        };
      },
      leave: () => cursor.setAttribute("visibility", "hidden"),
    };
  }

  // Legends --------------------------------------------------------------------------------------------------------

  // A button for each model, then the meaning of dashes and of markers.
  function drawSeriesLegend(legend, chart, hidden, redraw) {
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
    const addKey = (name, shape, kind) => {
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
    const hasSeveral = chart.series.some((series) => !series.control && marker(chart, series) !== MARKERS[0]);
    const explained = new Set();
    for (const series of chart.series) {
      const id = `${series.name}${series.control}`;
      if ((series.control || hasSeveral) && !explained.has(id))
        addKey(series.name, marker(chart, series), series.control ? "control" : "");
      explained.add(id);
    }
    if (chart.reference !== null) {
      const item = element("span", { class: "key" }, legend);
      element("span", { class: "swatch ref", "aria-hidden": "true" }, item);
      item.append(chart.reference_label || "reference");
    }
  }

  function drawMapLegend(legend, chart) {
    if (chart.model) {
      const item = element("span", { class: `key ${modelClass(chart.model)}` }, legend);
      element("span", { class: "swatch", "aria-hidden": "true" }, item);
      item.append(chart.model);
    }
    const [low, high] = colourBounds(chart);
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

  function addChart(holder) {
    const chart = data.charts[Number(holder.dataset.chart)];
    const legend = element("div", { class: "legend" }, holder);
    const plot = element(
      "div",
      { class: "plot", tabindex: "0", role: "group", "aria-label": `${chart.title}. The arrow keys read the values.` },
      holder,
    );
    const hidden = new Set();
    let view,
      svg,
      cursor,
      drawnWidth = 0;

    function redraw() {
      drawnWidth = plot.clientWidth;
      svg = draw("svg", {}, null);
      view = { lines, dots, map }[chart.kind](svg, chart, drawnWidth, (model) => !hidden.has(model));
      svg.setAttribute("viewBox", `0 0 ${drawnWidth} ${view.height}`);
      svg.setAttribute("aria-hidden", "true");
      plot.replaceChildren(svg);
      cursor = undefined;
    }
    function show(position) {
      cursor = position;
      const { x, y, title, rows } = view.show(position);
      const getPoint = () => {
        const box = svg.getBoundingClientRect();
        const zoom = box.width / drawnWidth;
        return [box.left + x * zoom, box.top + y * zoom];
      };
      tip.show(getPoint, title, rows);
    }
    function leave() {
      cursor = undefined;
      view.leave();
      tip.hide();
    }
    function point(event) {
      const box = svg.getBoundingClientRect();
      const zoom = drawnWidth / box.width;
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

    if (chart.kind === "map") drawMapLegend(legend, chart);
    else drawSeriesLegend(legend, chart, hidden, redraw);
    redraw();
    new ResizeObserver(() => plot.clientWidth !== drawnWidth && plot.clientWidth > 0 && redraw()).observe(plot);
  }

  document.querySelectorAll("[data-chart]").forEach(addChart);
})();
