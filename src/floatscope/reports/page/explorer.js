// The canvas explorer: the canvas of one sample as text, step by step, shaded by the attention of a layer, and its
// temporal map.
//
// A sample is unpacked when it is selected. A change of step or layer only requests a frame; the frame updates the
// tokens whose appearance changes. The text never reflows: from the first step on, a masked position has the width of
// the token that will be committed there.
(() => {
  const root = document.getElementById("explorer");
  if (!root) return;
  const { data, format, element, modelClass, tip, theme } = floatscope;
  const [ABSENT, MASKED, COMMITTED, NOISE] = [0, 2, 3, 4];
  const STATES = ["absent", "prompt", "masked", "committed", "noise"];
  const LEVELS = data.levels;
  const parts = Object.fromEntries(
    [...root.querySelectorAll("[data-part]")].map((node) => [node.dataset.part, node]),
  );

  // Reading ----------------------------------------------------------------------------------------------------------

  const TYPES = { uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array };

  // From base64 of deflated differences between steps to a flat array of codes.
  async function unpack(packed) {
    const bytes = Uint8Array.from(atob(packed.data), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    const codes = new TYPES[packed.type](await new Response(stream).arrayBuffer());
    const row = codes.length / packed.shape[0];
    for (let i = row; i < codes.length; i++) codes[i] += codes[i - row];
    return codes;
  }

  // The codes, and the value of each code of a layer: low · (high / low) ** ((c − 1) / max_level). Code 0 means not
  // measured.
  async function decode(encoded) {
    const { low, high, max_level: maxLevel } = encoded;
    const codes = await unpack(encoded.codes);
    const values = low.map((lowest, layer) =>
      Float64Array.from({ length: maxLevel + 2 }, (_, c) =>
        c ? lowest * (high[layer] / lowest) ** ((c - 1) / maxLevel) : NaN,
      ),
    );
    return { codes, values, high };
  }

  async function readSample(index) {
    const payload = JSON.parse(document.getElementById(`sample-${index}`).textContent);
    const { steps, keys } = payload;
    const [lift, uniform, topKeys] = await Promise.all([
      decode(payload.lift),
      decode(payload.uniform),
      unpack(payload.top_keys),
    ]);
    const heads = payload.heads && {
      count: payload.heads.count,
      keys: await unpack(payload.heads.keys),
      lift: await decode(payload.heads.lift),
    };
    const tokens = new Int32Array(steps * keys);
    const states = new Uint8Array(steps * keys);
    tokens.set(payload.tokens);
    states.set(payload.states);
    let next = 0;
    for (let t = 1; t < steps; t++) {
      tokens.copyWithin(t * keys, (t - 1) * keys, t * keys);
      states.copyWithin(t * keys, (t - 1) * keys, t * keys);
      for (; next < payload.changes.length && payload.changes[next][0] === t; next++) {
        const [, position, token, state] = payload.changes[next];
        tokens[t * keys + position] = token;
        states[t * keys + position] = state;
      }
    }
    const commitsAt = Array.from({ length: steps }, () => new Map()); // step → position → commit
    const finalTokens = tokens.slice((steps - 1) * keys);
    const commitOf = new Map(); // position → commit
    const edits = new Set(payload.edits || []); // indices of commits that overwrite a committed token
    payload.commits.forEach(([step, position, token, confidence], i) => {
      commitsAt[step].set(position, { token, confidence, isEdit: edits.has(i) });
      commitOf.set(position, { step, token, confidence, isEdit: edits.has(i) });
      finalTokens[position] = token;
    });
    const regionsAt = Array.from({ length: keys }, () => []); // position → indices of its regions
    payload.regions.forEach((region, r) =>
      region.spans.forEach(([start, stop]) => {
        for (let p = start; p < stop; p++) regionsAt[p].push(r);
      }),
    );
    const liftKeys = payload.lift.codes.shape[2]; // keys with a lift; a growing canvas has one more key at its end
    const ranks = payload.heads ? payload.heads.keys.shape[3] : 0;
    const specialIds = new Set(payload.special_ids);
    const hasUnranked = lift.codes.includes(0);
    return {
      ...payload,
      lift,
      uniform,
      topKeys,
      heads,
      ranks,
      tokens,
      states,
      commitsAt,
      commitOf,
      finalTokens,
      regionsAt,
      liftKeys,
      specialIds,
      hasUnranked,
    };
  }

  // Selection --------------------------------------------------------------------------------------------------------

  let sample = null;
  const selection = { step: 0, layer: 0, head: -1, percent: false, fit: true, token: -1 };
  let timer = 0;

  const valueAt = ({ codes, values }, step, layer, key) =>
    key < sample.liftKeys ? values[layer][codes[(step * values.length + layer) * sample.liftKeys + key]] : NaN;
  const liftAt = (step, layer, key) => valueAt(sample.lift, step, layer, key);
  const uniformAt = (step, layer, key) => valueAt(sample.uniform, step, sample.layer_visibility[layer], key);
  // The top keys of a head with their lifts, largest first.
  function headTopKeys(step, layer, head) {
    const { count, keys, lift } = sample.heads;
    const from = ((step * sample.layers.length + layer) * count + head) * sample.ranks;
    const result = [];
    for (let i = from; i < from + sample.ranks; i++)
      if (keys[i]) result.push([keys[i] - 1, lift.values[layer][lift.codes[i]]]);
    return result;
  }
  function topKeyAt(step) {
    if (selection.head >= 0) return (headTopKeys(step, selection.layer, selection.head)[0] || [-1])[0];
    return sample.topKeys[step * sample.layers.length + selection.layer] - 1;
  }

  // With a cache, the data of single heads is about the new rows of a step; the page has no percentages for them.
  const inPercent = () => selection.percent && !(selection.head >= 0 && sample.rows === "cache");

  // The values that colour the keys at a step, for the selected layer and head; NaN where nothing was measured.
  function valuesAt(step) {
    const values = new Float64Array(sample.keys).fill(NaN);
    const { layer, head } = selection;
    if (head >= 0) for (const [key, lift] of headTopKeys(step, layer, head)) values[key] = lift;
    else for (let k = 0; k < sample.liftKeys; k++) values[k] = liftAt(step, layer, k);
    if (inPercent()) for (let k = 0; k < sample.liftKeys; k++) values[k] *= uniformAt(step, layer, k);
    return values;
  }

  // The ends of the colour scale: from uniform attention to the largest value of all runs, or of this layer.
  function colourBounds() {
    const highest = (selection.head >= 0 ? sample.heads.lift : sample.lift).high;
    let high = data.max_lift;
    if (selection.fit) high = highest[selection.layer];
    else if (selection.head >= 0) high = Math.max(...highest);
    if (!inPercent()) return [1, Math.max(high, 1.5)];
    const low = 100 / sample.keys;
    sample.maxPercents ||= maxPercents();
    if (selection.head < 0 && selection.fit) high = sample.maxPercents[selection.layer];
    else if (selection.head < 0) high = Math.max(...sample.maxPercents);
    else high *= Math.max(...sample.uniform.high);
    return [low, Math.max(high, 1.5 * low)];
  }
  function maxPercents() {
    return sample.layers.map((_, layer) => {
      let largest = 0;
      for (let t = 0; t < sample.steps; t++)
        for (let k = 0; k < sample.liftKeys; k++) {
          const received = liftAt(t, layer, k) * uniformAt(t, layer, k);
          if (received > largest) largest = received;
        }
      return largest;
    });
  }
  // A function from a value to its colour level.
  function colourLevels() {
    const [low, high] = colourBounds();
    const factor = (LEVELS - 1) / Math.log(high / low);
    return (v) => (v > low ? Math.min(LEVELS - 1, Math.round(Math.log(v / low) * factor)) : 0);
  }

  // The canvas as text -----------------------------------------------------------------------------------------------

  let spans = []; // one span per position
  let breaks = []; // after each span, the line breaks at the end of its token; no box reaches into the next line
  let styles = null; // the appearance of each span in one number: level, state, new, top, special
  let shownTokens = null; // the token id that each span shows
  let offsets = null; // the distance of each span from the top of the text
  let visibleHeight = 0; // of the text
  const MARGIN = 150; // pixels above and below the visible text that are kept up to date
  const classes = new Map();

  function spanClass(style) {
    if (!classes.has(style)) {
      const level = style & 255;
      const state = STATES[(style >> 8) & 7];
      const flags = ["new", "top", "special"].filter((_, i) => (style >> (11 + i)) & 1);
      classes.set(style, ["t", `l${level}`, state, ...flags].join(" "));
    }
    return classes.get(style);
  }
  const piece = (token) => (token < 0 ? "" : sample.pieces[token]);
  const tokenText = (token) =>
    piece(token)
      .replace(/\n+$/, (breaks) => "⏎".repeat(breaks.length))
      .replace(/\n/g, "⏎\n") || "·";
  // Special tokens follow each other without spaces; a line may break after each.
  const lineBreaks = (token) => piece(token).match(/\n*$/)[0] || (sample.specialIds.has(token) ? "\u200b" : "");
  const quote = (token) => `“${piece(token).replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "␣")}”`;

  // The token at a position at a step: the one just committed, the earlier one, or none yet.
  function nameToken(step, p) {
    const commit = sample.commitsAt[step].get(p);
    const state = sample.states[step * sample.keys + p];
    if (commit) return quote(commit.token);
    if (state === MASKED) return "a mask";
    if (state === NOISE) return `noise, ${quote(sample.tokens[step * sample.keys + p])}`;
    return state === ABSENT ? "nothing yet" : quote(sample.tokens[step * sample.keys + p]);
  }

  function buildText() {
    const fragment = document.createDocumentFragment();
    let group = null,
      groupRegions = "";
    breaks = [];
    spans = Array.from({ length: sample.keys }, (_, p) => {
      if (!group || String(sample.regionsAt[p]) !== groupRegions) {
        groupRegions = String(sample.regionsAt[p]);
        group = element("span", { class: "region" }, fragment);
        const lines = sample.regionsAt[p].slice(-3).reverse(); // the innermost region first
        group.style.boxShadow =
          lines.map((r, i) => `0 ${2 + 2.5 * i}px 0 var(--g${r % data.region_colours})`).join(", ") || "none";
      }
      const span = element("span", { tabindex: "-1" }, group);
      span.dataset.p = p;
      group.append((breaks[p] = document.createTextNode("")));
      return span;
    });
    offsets = null;
    styles = new Int32Array(sample.keys).fill(-1);
    shownTokens = new Int32Array(sample.keys).fill(-2);
    parts.text.replaceChildren(fragment);
    parts.text.tabIndex = 0;
  }

  // The range of visible tokens with a margin: only these are updated. In print, all tokens are.
  function visibleRange() {
    if (!offsets || theme.isPrint) return [0, sample.keys];
    const from = parts.text.scrollTop - MARGIN;
    const to = parts.text.scrollTop + visibleHeight + MARGIN;
    const firstAfter = (y) => {
      let [low, high] = [0, offsets.length];
      while (low < high) {
        const middle = (low + high) >> 1;
        if (offsets[middle] < y) low = middle + 1;
        else high = middle;
      }
      return low;
    };
    return [firstAfter(from), firstAfter(to)];
  }
  function measureText() {
    const box = parts.text.getBoundingClientRect();
    const start = box.top - parts.text.scrollTop;
    visibleHeight = box.height;
    offsets = Float32Array.from(spans, (span) => span.getBoundingClientRect().top - start);
  }

  function paintText() {
    const { keys, states, tokens } = sample;
    const values = valuesAt(selection.step);
    const level = colourLevels();
    const topKey = topKeyAt(selection.step);
    const commits = sample.commitsAt[selection.step];
    const [from, to] = visibleRange();
    for (let p = from; p < to; p++) {
      const state = states[selection.step * keys + p];
      const commit = commits.get(p);
      let id = tokens[selection.step * keys + p];
      if (commit) id = commit.token;
      else if (state === MASKED || state === NOISE || state === ABSENT) id = sample.finalTokens[p]; // for its width
      if (shownTokens[p] !== id) {
        spans[p].textContent = tokenText(id);
        if (breaks[p].data !== lineBreaks(id)) breaks[p].data = lineBreaks(id);
        shownTokens[p] = id;
      }
      const style =
        level(values[p]) |
        (state << 8) |
        ((commit ? 1 : 0) << 11) |
        ((p === topKey ? 1 : 0) << 12) |
        ((sample.specialIds.has(id) ? 1 : 0) << 13);
      if (styles[p] !== style) {
        spans[p].className = spanClass(style);
        styles[p] = style;
      }
    }
  }

  // The temporal map -------------------------------------------------------------------------------------------------

  const LEFT = 34,
    TOP = 14,
    BOTTOM = 20;
  const cells = document.createElement("canvas"); // drawn once per layer
  let cellsKey = "";
  let box = { width: 0, height: 0, rowHeight: 0 };

  // A canvas cannot read CSS variables: look each up once per theme.
  const probe = element("i", { hidden: "" }, root);
  const font = `11px ${getComputedStyle(root).fontFamily}`;
  const colours = {};
  function css(name) {
    const key = `${name} ${theme.isDark}`;
    if (!colours[key]) {
      probe.style.color = `var(${name})`;
      colours[key] = getComputedStyle(probe).color;
    }
    return colours[key];
  }

  function paintCells() {
    const ratio = window.devicePixelRatio || 1;
    const width = Math.max(1, Math.round((box.width - LEFT) * ratio));
    const { layer, head, percent, fit } = selection;
    const key = [sample.label, sample.sample, layer, head, percent, fit, theme.isDark, width].join();
    if (key === cellsKey) return;
    cellsKey = key;
    cells.width = width;
    cells.height = sample.steps;
    const context = cells.getContext("2d");
    const image = context.createImageData(width, sample.steps);
    const pixels = new Uint32Array(image.data.buffer);
    const ramp = data.ramps[theme.isDark ? "dark" : "light"].map((hex) => {
      const [r, g, b] = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
      return (255 << 24) | (b << 16) | (g << 8) | r;
    });
    const level = colourLevels();
    for (let t = 0; t < sample.steps; t++) {
      const values = valuesAt(t);
      for (let x = 0; x < width; x++) {
        const from = Math.floor((x * sample.keys) / width);
        const to = Math.max(from + 1, Math.floor(((x + 1) * sample.keys) / width));
        let largest = -1,
          isPresent = false;
        for (let k = from; k < to; k++) {
          if (values[k] > largest) largest = values[k];
          isPresent = isPresent || sample.states[t * sample.keys + k] !== ABSENT;
        }
        const empty = isPresent && head >= 0 ? ramp[0] : 0;
        pixels[t * width + x] = largest >= 0 ? ramp[level(largest)] : empty;
      }
    }
    context.putImageData(image, 0, 0);
  }

  function paintStrip() {
    const canvas = parts.strip;
    const ratio = window.devicePixelRatio || 1;
    const context = canvas.getContext("2d");
    paintCells();
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, box.width, box.height + TOP + BOTTOM);
    context.imageSmoothingEnabled = false;
    context.fillStyle = css("--absent");
    context.fillRect(LEFT, TOP, box.width - LEFT, box.height);
    context.drawImage(cells, LEFT, TOP, box.width - LEFT, box.height);
    const cellWidth = (box.width - LEFT) / sample.keys;
    const x = (key) => LEFT + (key + 0.5) * cellWidth;
    const y = (step) => TOP + (step + 0.5) * box.rowHeight;

    sample.regions.forEach((region, r) => {
      context.fillStyle = css(`--g${r % data.region_colours}`);
      const lane = region.spans.length ? 4 * Math.min(2, sample.regionsAt[region.spans[0][0]].indexOf(r)) : 0;
      for (const [start, stop] of region.spans)
        context.fillRect(LEFT + start * cellWidth + 0.5, lane + 1, Math.max(1.5, (stop - start) * cellWidth - 1), 3);
    });
    context.fillStyle = css("--muted");
    context.font = font;
    context.textAlign = "right";
    const spacing = Math.max(1, Math.ceil(14 / box.rowHeight));
    for (let t = 0; t < sample.steps; t += spacing)
      if (Math.abs(t - selection.step) >= spacing || t === selection.step) context.fillText(t, LEFT - 7, y(t) + 4);
    context.textAlign = "center";
    const keySpacing = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000].find((n) => n * cellWidth > 46) || 5000;
    for (let k = 0; k < sample.keys && x(k) < box.width - 10; k += keySpacing)
      context.fillText(k, Math.max(LEFT + 4, x(k)), TOP + box.height + 15);

    context.fillStyle = css("--commit");
    const radius = Math.max(1.6, Math.min(3, cellWidth / 2, box.rowHeight / 3));
    for (const [step, position] of sample.commits) {
      context.beginPath();
      context.arc(x(position), y(step), radius, 0, 7);
      context.fill();
    }
    if (selection.token >= 0) {
      context.strokeStyle = css("--text");
      context.globalAlpha = 0.35;
      context.lineWidth = Math.max(1, Math.min(cellWidth, 3));
      context.beginPath();
      context.moveTo(x(selection.token), TOP);
      context.lineTo(x(selection.token), TOP + box.height);
      context.stroke();
      context.globalAlpha = 1;
    }
    context.strokeStyle = context.fillStyle = css("--top");
    context.lineWidth = 1.75;
    context.lineJoin = "round";
    context.beginPath();
    for (let t = 0, isStarted = false; t < sample.steps; t++) {
      const key = topKeyAt(t);
      if (key >= 0) context[isStarted ? "lineTo" : "moveTo"](x(key), y(t));
      isStarted = isStarted || key >= 0;
    }
    context.stroke();
    const topKey = topKeyAt(selection.step);
    if (topKey >= 0) {
      context.beginPath();
      context.arc(x(topKey), y(selection.step), 4, 0, 7);
      context.fill();
    }
    context.strokeStyle = css("--text");
    context.lineWidth = 1.5;
    context.strokeRect(LEFT - 0.75, TOP + selection.step * box.rowHeight, box.width - LEFT, Math.max(2, box.rowHeight));
  }

  function sizeStrip() {
    const ratio = window.devicePixelRatio || 1;
    const width = parts.strip.parentElement.clientWidth;
    const height = Math.max(2 * (sample.steps <= 128), Math.min(16, 230 / sample.steps)); // of a row
    box = { width, height: Math.max(24, height * sample.steps), rowHeight: Math.max(24 / sample.steps, height) };
    parts.strip.width = Math.round(width * ratio);
    parts.strip.height = Math.round((box.height + TOP + BOTTOM) * ratio);
    parts.strip.style.height = `${box.height + TOP + BOTTOM}px`;
    requestFrame();
  }

  // Text -------------------------------------------------------------------------------------------------------------

  const formatLift = (lift) => (Number.isNaN(lift) ? "not ranked: too few rows see it" : `${format(lift)} × uniform`);

  function paintStatus() {
    parts["step-label"].textContent = `${selection.step} of 0–${sample.steps - 1}`;
    parts["layer-label"].textContent =
      `${sample.layers[selection.layer]} of ${sample.layers[0]}–${sample.layers[sample.layers.length - 1]}`;
    root.dataset.step = selection.step;
    root.dataset.layer = sample.layers[selection.layer];
    const topKey = topKeyAt(selection.step);
    const count = sample.commitsAt[selection.step].size;
    const masked = countState(selection.step, MASKED);
    const noise = countState(selection.step, NOISE);
    const left = masked ? ` of ${masked} masked` : noise ? ` on ${noise} positions of noise` : "";
    const commits = count ? `commits ${count} token${count > 1 ? "s" : ""}${left}` : "commits nothing";
    const head = selection.head >= 0 ? `, head ${selection.head}` : "";
    const source = `layer ${sample.layers[selection.layer]}${head}`;
    const top =
      topKey < 0
        ? "none, no key has a lift of 2 or more"
        : `position ${topKey}, ${nameToken(selection.step, topKey)}, ${formatLift(topLift(topKey))}`;
    parts.status.textContent = `Step ${selection.step} ${commits}. Top key of ${source}: ${top}.`;
    parts["show-top"].hidden = topKey < 0;
  }
  function topLift(topKey) {
    const { step, layer, head } = selection;
    return head >= 0 ? headTopKeys(step, layer, head)[0][1] : liftAt(step, layer, topKey);
  }
  function countState(step, state) {
    let count = 0;
    for (let p = 0; p < sample.keys; p++) count += sample.states[step * sample.keys + p] === state;
    return count;
  }

  function paintScale() {
    const [low, high] = colourBounds();
    const unit = inPercent() ? " %" : " ×";
    parts.scale.firstElementChild.textContent = inPercent() ? `≤ ${format(low)} %` : "≤ uniform";
    parts.scale.lastElementChild.textContent = format(high) + unit;
    const notes = [...sample.notes];
    const rows = sample.rows === "cache" ? " of the new rows of a step" : "";
    if (selection.head >= 0)
      notes.push(`For single heads, the page has only the ${sample.ranks} top keys${rows}; other keys have no colour.`);
    else if (sample.rows === "cache")
      notes.push("This model has a cache: each step shows the attention of its whole prefix.");
    if (sample.rows === "block")
      notes.push("This model has a cache of finished blocks: each step shows the rows of its current block.");
    if (sample.hasUnranked)
      notes.push("Grey in the map: keys that do not exist yet, or that too few rows see to be ranked.");
    parts.note.textContent = notes.join(" ");
    parts.note.hidden = !notes.length;
  }

  function findCommitBefore(step, p) {
    for (let t = step - 1; t >= 0; t--) {
      const commit = sample.commitsAt[t].get(p);
      if (commit) return { step: t, ...commit };
    }
    return sample.commitOf.get(p);
  }
  function describeState(state, commit, earlier) {
    const verb = (c) => (c.isEdit ? "edited" : "committed");
    if (commit)
      return `${[MASKED, NOISE].includes(state) ? `${STATES[state]}, ` : ""}${verb(commit)} at this step (confidence ${format(commit.confidence)})`;
    if (state === COMMITTED && earlier)
      return `${verb(earlier)} at step ${earlier.step} (confidence ${format(earlier.confidence)})`;
    if (state === NOISE && earlier && earlier.step < selection.step)
      return `noise again; ${verb(earlier)} at step ${earlier.step} and renoised since`;
    return state === ABSENT ? "not there yet" : STATES[state];
  }
  function describeToken(p) {
    const { step, layer, head } = selection;
    const state = sample.states[step * sample.keys + p];
    const rows = [
      { label: "state", value: describeState(state, sample.commitsAt[step].get(p), findCommitBefore(step, p)) },
    ];
    if (head >= 0) {
      const rank = headTopKeys(step, layer, head).findIndex(([key]) => key === p);
      if (rank >= 0) {
        const lift = headTopKeys(step, layer, head)[rank][1];
        rows.push({ label: `lift, head ${head}`, value: `${formatLift(lift)}, rank ${rank + 1}` });
        if (sample.rows !== "cache")
          rows.push({ label: "received", value: `${format(lift * uniformAt(step, layer, p))} %` });
      } else rows.push({ label: `lift, head ${head}`, value: "not among its top keys" });
    } else if (state !== ABSENT) {
      const lift = liftAt(step, layer, p);
      rows.push({ label: "lift", value: formatLift(lift) });
      if (!Number.isNaN(lift))
        rows.push({ label: "received", value: `${format(lift * uniformAt(step, layer, p))} %` });
    }
    if (sample.regionsAt[p].length)
      rows.push({ label: "region", value: sample.regionsAt[p].map((r) => sample.regions[r].name).join(", ") });
    if (p === topKeyAt(step)) rows.push({ label: "mark", value: "top key of this step" });
    return { title: `position ${p}: ${nameToken(step, p)}`, rows };
  }
  function showToken(p) {
    selection.token = p;
    const { title, rows } = describeToken(p);
    const getPoint = () => {
      const box = spans[p].getClientRects()[0]; // if the token is on two lines, its part on the first line
      return [box.left + Math.min(box.width, 40) / 2, box.top];
    };
    tip.show(getPoint, title, rows);
    requestFrame();
  }
  function hideToken() {
    selection.token = -1;
    tip.hide();
    requestFrame();
  }

  // Frames -----------------------------------------------------------------------------------------------------------

  let isRequested = false;
  function paint() {
    isRequested = false;
    if (!sample) return;
    paintText();
    paintStatus();
    paintScale();
    paintStrip();
  }
  function requestFrame() {
    if (!isRequested) requestAnimationFrame(paint);
    isRequested = true;
  }

  function go(step, layer) {
    selection.step = Math.max(0, Math.min(sample.steps - 1, step));
    selection.layer = Math.max(0, Math.min(sample.layers.length - 1, layer));
    parts.step.value = selection.step;
    parts.layer.value = selection.layer;
    requestFrame();
    const focused = document.activeElement.dataset.p;
    if (focused !== undefined && root.contains(document.activeElement))
      requestAnimationFrame(() => showToken(Number(focused)));
    else if (selection.token >= 0) hideToken();
  }

  function play(on) {
    clearInterval(timer);
    timer = 0;
    if (on) {
      if (selection.step === sample.steps - 1) go(0, selection.layer);
      timer = setInterval(
        () => {
          go(selection.step + 1, selection.layer);
          if (selection.step === sample.steps - 1) play(false);
        },
        Math.max(60, Math.min(600, 12000 / sample.steps)),
      );
    }
    parts.play.textContent = timer ? "❚❚" : "▶";
    parts.play.setAttribute("aria-label", timer ? "Pause" : "Play");
  }

  // Scroll the text, but not the page, until a token is visible.
  function scrollToToken(p) {
    const token = spans[p].getBoundingClientRect();
    const text = parts.text.getBoundingClientRect();
    if (token.top < text.top || token.bottom > text.bottom)
      parts.text.scrollTop += token.top - text.top - text.height / 2;
  }
  function focusToken(p) {
    spans[p].focus({ preventScroll: true });
    scrollToToken(p);
    showToken(p);
  }

  // Controls ---------------------------------------------------------------------------------------------------------

  const runs = [...new Set(data.samples.map((entry) => entry.label))];
  runs.forEach((label) => element("option", { value: label }, parts.run, label));

  function fillSamples() {
    parts.sample.replaceChildren();
    data.samples.forEach((entry, i) => {
      if (entry.label === parts.run.value) element("option", { value: i }, parts.sample, entry.sample);
    });
  }
  async function openSample() {
    play(false);
    const index = Number(parts.sample.value);
    const selected = await readSample(index);
    if (index !== Number(parts.sample.value)) return; // the reader has selected another one
    const depth = sample ? selection.layer / Math.max(1, sample.layers.length - 1) : 0.5;
    sample = selected;
    root.className = `explorer ${modelClass(sample.label)}`;
    parts.step.max = sample.steps - 1;
    parts.layer.max = sample.layers.length - 1;
    parts.play.disabled = sample.steps < 2;
    parts.head.replaceChildren();
    element("option", { value: -1 }, parts.head, "mean");
    const heads = sample.heads ? sample.heads.count : 0;
    for (let h = 0; h < heads; h++) element("option", { value: h }, parts.head, h);
    parts.head.disabled = !heads;
    if (selection.head >= heads) selection.head = -1;
    parts.head.value = selection.head;
    parts.regions.replaceChildren();
    sample.regions.forEach((region, r) => {
      const item = element("button", { type: "button", class: `g${r % data.region_colours}` }, parts.regions);
      element("span", { class: "swatch", "aria-hidden": "true" }, item);
      item.append(region.name);
      item.addEventListener("click", () => region.spans.length && focusToken(region.spans[0][0]));
    });
    selection.token = -1;
    buildText();
    go(0, Math.round(depth * (sample.layers.length - 1)));
    sizeStrip();
    const firstMask = sample.states.findIndex((state) => state === MASKED || state === NOISE);
    parts["noise-key"].hidden = !sample.states.includes(NOISE);
    requestAnimationFrame(() => {
      scrollToToken(firstMask >= 0 ? firstMask : sample.keys - 1);
      measureText();
      root.dataset.ready = index;
    });
  }

  parts.run.addEventListener("change", () => {
    fillSamples();
    openSample();
  });
  parts.sample.addEventListener("change", openSample);
  parts.step.addEventListener("input", () => {
    play(false);
    go(Number(parts.step.value), selection.layer);
  });
  parts.layer.addEventListener("input", () => go(selection.step, Number(parts.layer.value)));
  parts.head.addEventListener("change", () => {
    selection.head = Number(parts.head.value);
    requestFrame();
  });
  parts.colour.addEventListener("change", () => {
    selection.percent = parts.colour.value === "percent";
    requestFrame();
  });
  parts.fit.addEventListener("change", () => {
    selection.fit = parts.fit.checked;
    requestFrame();
  });
  parts.play.addEventListener("click", () => play(!timer));
  parts["show-top"].addEventListener("click", () => focusToken(topKeyAt(selection.step)));

  const eventToken = (event) => (event.target.dataset.p === undefined ? null : Number(event.target.dataset.p));
  parts.text.addEventListener("pointerover", (event) => {
    const p = eventToken(event);
    if (p !== null) showToken(p);
  });
  parts.text.addEventListener("pointerleave", hideToken);
  parts.text.addEventListener("focusin", (event) => {
    const p = eventToken(event);
    if (p !== null) showToken(p);
  });
  parts.text.addEventListener("focusout", hideToken);

  const eventCell = (event) => {
    const strip = parts.strip.getBoundingClientRect();
    return {
      step: Math.max(0, Math.min(sample.steps - 1, Math.floor((event.clientY - strip.top - TOP) / box.rowHeight))),
      key: Math.floor(((event.clientX - strip.left - LEFT) / (box.width - LEFT)) * sample.keys),
    };
  };
  parts.strip.addEventListener("pointerdown", (event) => {
    play(false);
    go(eventCell(event).step, selection.layer);
  });
  parts.strip.addEventListener("pointermove", (event) => {
    const { step, key } = eventCell(event);
    if (event.buttons) go(step, selection.layer);
    if (key < 0 || key >= sample.keys) return tip.hide();
    const value = valuesAt(step)[key];
    const strip = parts.strip.getBoundingClientRect();
    const [x, y] = [event.clientX - strip.left, event.clientY - strip.top];
    const getPoint = () => {
      const box = parts.strip.getBoundingClientRect();
      return [box.left + x, box.top + y];
    };
    const valueText = inPercent() ? `${format(value)} %` : formatLift(value);
    tip.show(getPoint, `step ${step}, position ${key}`, [
      { label: "token", value: nameToken(step, key) },
      {
        label: inPercent() ? "received" : "lift",
        value: Number.isNaN(value) ? "not stored" : valueText,
      },
    ]);
  });
  parts.strip.addEventListener("pointerleave", tip.hide);

  // Space plays; arrows change the step and the layer, with Shift the token; A goes to the top key.
  root.addEventListener("keydown", (event) => {
    if (!sample || event.altKey || event.ctrlKey || event.metaKey || event.target.matches("select")) return;
    const isSlider = event.target.matches("input[type=range]");
    const sideways = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const upwards = { ArrowUp: 1, ArrowDown: -1 }[event.key];
    if (event.key === " ") {
      if (event.target.matches("button, input[type=checkbox]")) return;
      play(!timer);
    } else if (event.shiftKey && sideways) {
      const focused = event.target.dataset.p;
      const p = focused === undefined ? topKeyAt(selection.step) - sideways : Number(focused);
      focusToken(Math.max(0, Math.min(sample.keys - 1, p + sideways)));
    } else if (event.key === "a" || event.key === "A") {
      if (topKeyAt(selection.step) >= 0) focusToken(topKeyAt(selection.step));
    } else if (sideways && !isSlider) {
      play(false);
      go(selection.step + sideways, selection.layer);
    } else if (upwards && event.target !== parts.layer) go(selection.step, selection.layer + upwards);
    else return;
    event.preventDefault();
  });

  parts.text.addEventListener("scroll", requestFrame, { passive: true });
  theme.onChange(paint);
  new ResizeObserver(() => {
    if (!sample) return;
    sizeStrip();
    if (offsets) measureText();
  }).observe(parts.strip.parentElement);
  fillSamples();
  openSample();
})();
