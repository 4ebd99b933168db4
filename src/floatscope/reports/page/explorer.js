// The canvas explorer: one sample's canvas as text, step by step, shaded by where a layer looks, and its temporal map.
//
// A sample is unpacked when it is chosen. A change of step or layer only asks for a frame; the frame compares what each
// token should look like with what it looks like and touches those that differ. Nothing moves: a masked position has,
// from the first step on, the width of the token that will be written there.
(() => {
  const root = document.getElementById("explorer");
  if (!root) return;
  const { data, format, element, modelClass, tip, theme } = floatscope;
  const [ABSENT, MASKED, COMMITTED] = [0, 2, 3];
  const STATES = ["absent", "prompt", "masked", "committed"];
  const LEVELS = data.levels;
  const parts = Object.fromEntries(
    [...root.querySelectorAll("[data-part]")].map((found) => [found.dataset.part, found]),
  );

  // Reading ----------------------------------------------------------------------------------------------------------

  const TYPES = { uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array };

  // Base64 of deflated differences from step to step → the codes, flat.
  async function unpack(packed) {
    const bytes = Uint8Array.from(atob(packed.data), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    const codes = new TYPES[packed.type](await new Response(stream).arrayBuffer());
    const row = codes.length / packed.shape[0];
    for (let i = row; i < codes.length; i++) codes[i] += codes[i - row];
    return codes;
  }

  // What each code of a layer stands for: low · (high / low) ** ((c − 1) / most); 0 was not measured.
  async function decode(told) {
    const codes = await unpack(told.codes);
    const values = told.low.map((low, layer) =>
      Float64Array.from({ length: told.most + 2 }, (_, c) =>
        c ? low * (told.high[layer] / low) ** ((c - 1) / told.most) : NaN,
      ),
    );
    return { codes, values, high: told.high };
  }

  async function read(index) {
    const told = JSON.parse(document.getElementById(`sample-${index}`).textContent);
    const { steps, keys } = told;
    const [lift, uniform, anchors] = await Promise.all([decode(told.lift), decode(told.uniform), unpack(told.anchors)]);
    const heads = told.heads && {
      count: told.heads.count,
      keys: await unpack(told.heads.keys),
      lift: await decode(told.heads.lift),
    };
    const tokens = new Int32Array(steps * keys);
    const states = new Uint8Array(steps * keys);
    tokens.set(told.tokens);
    states.set(told.states);
    let next = 0;
    for (let t = 1; t < steps; t++) {
      tokens.copyWithin(t * keys, (t - 1) * keys, t * keys);
      states.copyWithin(t * keys, (t - 1) * keys, t * keys);
      for (; next < told.changes.length && told.changes[next][0] === t; next++) {
        const [, position, token, state] = told.changes[next];
        tokens[t * keys + position] = token;
        states[t * keys + position] = state;
      }
    }
    const fresh = Array.from({ length: steps }, () => new Map());
    const final = tokens.slice((steps - 1) * keys);
    const written = new Map();
    for (const [step, position, token, confidence] of told.commits) {
      fresh[step].set(position, { token, confidence });
      written.set(position, { step, token, confidence });
      final[position] = token;
    }
    const inside = Array.from({ length: keys }, () => []);
    told.regions.forEach((region, r) =>
      region.spans.forEach(([start, stop]) => {
        for (let p = start; p < stop; p++) inside[p].push(r);
      }),
    );
    const shown = told.lift.codes.shape[2]; // keys that have a lift; a growing canvas ends with one more
    const ranks = told.heads ? told.heads.keys.shape[3] : 0;
    const special = new Set(told.special);
    const unranked = lift.codes.includes(0);
    return {
      ...told,
      lift,
      uniform,
      anchors,
      heads,
      ranks,
      tokens,
      states,
      fresh,
      written,
      final,
      inside,
      shown,
      special,
      unranked,
    };
  }

  // What is chosen ---------------------------------------------------------------------------------------------------

  let sample = null;
  const at = { step: 0, layer: 0, head: -1, percent: false, fit: true, token: -1 };
  let playing = 0;

  const valueAt = ({ codes, values }, step, layer, key) =>
    key < sample.shown ? values[layer][codes[(step * values.length + layer) * sample.shown + key]] : NaN;
  const liftAt = (step, layer, key) => valueAt(sample.lift, step, layer, key);
  const uniformAt = (step, layer, key) => valueAt(sample.uniform, step, sample.masks[layer], key);
  // The top keys of a head with their lifts, best first.
  function headAt(step, layer, head) {
    const { count, keys, lift } = sample.heads;
    const from = ((step * sample.layers.length + layer) * count + head) * sample.ranks;
    const found = [];
    for (let i = from; i < from + sample.ranks; i++)
      if (keys[i]) found.push([keys[i] - 1, lift.values[layer][lift.codes[i]]]);
    return found;
  }
  function anchorAt(step) {
    if (at.head >= 0) return (headAt(step, at.layer, at.head)[0] || [-1])[0];
    return sample.anchors[step * sample.layers.length + at.layer] - 1;
  }

  // What a cached model's heads hold are the rows new in a step, for which the page has no percentages.
  const inPercent = () => at.percent && !(at.head >= 0 && sample.rows === "cache");

  // The number a key is coloured by at a step, of the chosen layer and head; NaN where there is none.
  function row(step) {
    const values = new Float64Array(sample.keys).fill(NaN);
    if (at.head >= 0) for (const [key, lift] of headAt(step, at.layer, at.head)) values[key] = lift;
    else for (let k = 0; k < sample.shown; k++) values[k] = liftAt(step, at.layer, k);
    if (inPercent()) for (let k = 0; k < sample.shown; k++) values[k] *= uniformAt(step, at.layer, k);
    return values;
  }

  // Colour ends: from what uniform attention would give to the largest of all runs, or of this layer.
  function ends() {
    const told = at.head >= 0 ? sample.heads.lift : sample.lift;
    let high = at.fit ? told.high[at.layer] : at.head >= 0 ? Math.max(...told.high) : data.highest_lift;
    if (!inPercent()) return [1, Math.max(high, 1.5)];
    const low = 100 / sample.keys;
    sample.most ||= largestPercents();
    if (at.head < 0 && at.fit) high = sample.most[at.layer];
    else if (at.head < 0) high = Math.max(...sample.most);
    else high *= Math.max(...sample.uniform.high);
    return [low, Math.max(high, 1.5 * low)];
  }
  function largestPercents() {
    return sample.layers.map((_, layer) => {
      let most = 0;
      for (let t = 0; t < sample.steps; t++)
        for (let k = 0; k < sample.shown; k++) {
          const received = liftAt(t, layer, k) * uniformAt(t, layer, k);
          if (received > most) most = received;
        }
      return most;
    });
  }
  function leveller() {
    const [low, high] = ends();
    const wide = (LEVELS - 1) / Math.log(high / low);
    return (v) => (v > low ? Math.min(LEVELS - 1, Math.round(Math.log(v / low) * wide)) : 0);
  }

  // The canvas as text -----------------------------------------------------------------------------------------------

  let tokens = []; // one span per position
  let breaks = []; // behind each: the line breaks its token ends with, so that no box reaches into the next line
  let looks = null; // what each of them looks like: level, state, fresh, anchor, in one number
  let texts = null; // the token id each of them shows
  let tops = null; // where each of them begins, from the top of the text
  let seen = 0; // the height of the text that is in sight
  const NEAR = 150;
  const classes = new Map();

  function classOf(look) {
    if (!classes.has(look)) {
      const [level, state, fresh, anchor, special] = [
        look & 255,
        (look >> 8) & 3,
        (look >> 10) & 1,
        (look >> 11) & 1,
        (look >> 12) & 1,
      ];
      classes.set(
        look,
        `t l${level} ${STATES[state]}${fresh ? " fresh" : ""}${anchor ? " anchor" : ""}${special ? " special" : ""}`,
      );
    }
    return classes.get(look);
  }
  const piece = (token) => (token < 0 ? "" : sample.pieces[token]);
  const written = (token) =>
    piece(token)
      .replace(/\n+$/, (ends) => "⏎".repeat(ends.length))
      .replace(/\n/g, "⏎\n") || "·";
  // Special tokens stand in rows of their own kind without a space; a line may end behind each.
  const lineBreaks = (token) => piece(token).match(/\n*$/)[0] || (sample.special.has(token) ? "\u200b" : "");
  const quoted = (token) => `“${piece(token).replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "␣")}”`;

  // What stands at a position at a step: the token just written there, the one it had, or none that is known yet.
  function named(step, p) {
    const now = sample.fresh[step].get(p);
    const state = sample.states[step * sample.keys + p];
    if (now) return quoted(now.token);
    return state === MASKED
      ? "a mask"
      : state === ABSENT
        ? "nothing yet"
        : quoted(sample.tokens[step * sample.keys + p]);
  }

  function build() {
    const fragment = document.createDocumentFragment();
    let run = null,
      of = "";
    breaks = [];
    tokens = Array.from({ length: sample.keys }, (_, p) => {
      if (!run || String(sample.inside[p]) !== of) {
        of = String(sample.inside[p]);
        run = element("span", { class: "region" }, fragment);
        const under = sample.inside[p].slice(-3).reverse(); // the innermost first
        run.style.boxShadow =
          under.map((r, i) => `0 ${2 + 2.5 * i}px 0 var(--g${r % data.region_colours})`).join(", ") || "none";
      }
      const span = element("span", { tabindex: "-1" }, run);
      span.dataset.p = p;
      run.append((breaks[p] = document.createTextNode("")));
      return span;
    });
    tops = null;
    looks = new Int32Array(sample.keys).fill(-1);
    texts = new Int32Array(sample.keys).fill(-2);
    parts.text.replaceChildren(fragment);
    parts.text.tabIndex = 0;
  }

  // The tokens that can be seen, and some more: only they are kept up to date. On paper that is all of them.
  function inSight() {
    if (!tops || theme.print) return [0, sample.keys];
    const from = parts.text.scrollTop - NEAR;
    const to = parts.text.scrollTop + seen + NEAR;
    const after = (y) => {
      let [low, high] = [0, tops.length];
      while (low < high) {
        const middle = (low + high) >> 1;
        if (tops[middle] < y) low = middle + 1;
        else high = middle;
      }
      return low;
    };
    return [after(from), after(to)];
  }
  function measure() {
    const held = parts.text.getBoundingClientRect();
    const start = held.top - parts.text.scrollTop;
    seen = held.height;
    tops = Float32Array.from(tokens, (token) => token.getBoundingClientRect().top - start);
  }

  function paintText() {
    const { keys, states, tokens: ids } = sample;
    const values = row(at.step);
    const level = leveller();
    const anchor = anchorAt(at.step);
    const fresh = sample.fresh[at.step];
    const [from, to] = inSight();
    for (let p = from; p < to; p++) {
      const state = states[at.step * keys + p];
      const now = fresh.get(p);
      const id = now ? now.token : state === MASKED || state === ABSENT ? sample.final[p] : ids[at.step * keys + p];
      if (texts[p] !== id) {
        tokens[p].textContent = written(id);
        if (breaks[p].data !== lineBreaks(id)) breaks[p].data = lineBreaks(id);
        texts[p] = id;
      }
      const look =
        level(values[p]) |
        (state << 8) |
        ((now ? 1 : 0) << 10) |
        ((p === anchor ? 1 : 0) << 11) |
        ((sample.special.has(id) ? 1 : 0) << 12);
      if (looks[p] !== look) {
        tokens[p].className = classOf(look);
        looks[p] = look;
      }
    }
  }

  // The temporal map -------------------------------------------------------------------------------------------------

  const LEFT = 34,
    TOP = 14,
    BOTTOM = 20;
  const heat = document.createElement("canvas"); // the cells, drawn once for a layer
  let heatOf = "";
  let box = { width: 0, height: 0, row: 0 };

  // A canvas cannot read CSS variables: they are looked up once for each of light and dark.
  const probe = element("i", { hidden: "" }, root);
  const font = `11px ${getComputedStyle(root).fontFamily}`;
  const known = {};
  function css(name) {
    const key = `${name} ${theme.dark}`;
    if (!known[key]) {
      probe.style.color = `var(${name})`;
      known[key] = getComputedStyle(probe).color;
    }
    return known[key];
  }

  function paintHeat() {
    const ratio = window.devicePixelRatio || 1;
    const wide = Math.max(1, Math.round((box.width - LEFT) * ratio));
    const now = [sample.label, sample.sample, at.layer, at.head, at.percent, at.fit, theme.dark, wide].join();
    if (now === heatOf) return;
    heatOf = now;
    heat.width = wide;
    heat.height = sample.steps;
    const context = heat.getContext("2d");
    const image = context.createImageData(wide, sample.steps);
    const pixels = new Uint32Array(image.data.buffer);
    const ramp = data.ramps[theme.dark ? "dark" : "light"].map((hex) => {
      const [r, g, b] = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
      return (255 << 24) | (b << 16) | (g << 8) | r;
    });
    const level = leveller();
    for (let t = 0; t < sample.steps; t++) {
      const values = row(t);
      for (let x = 0; x < wide; x++) {
        const from = Math.floor((x * sample.keys) / wide);
        const to = Math.max(from + 1, Math.floor(((x + 1) * sample.keys) / wide));
        let most = -1,
          there = false;
        for (let k = from; k < to; k++) {
          if (values[k] > most) most = values[k];
          there = there || sample.states[t * sample.keys + k] !== ABSENT;
        }
        pixels[t * wide + x] = most >= 0 ? ramp[level(most)] : there && at.head >= 0 ? ramp[0] : 0;
      }
    }
    context.putImageData(image, 0, 0);
  }

  function paintStrip() {
    const canvas = parts.strip;
    const ratio = window.devicePixelRatio || 1;
    const context = canvas.getContext("2d");
    paintHeat();
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, box.width, box.height + TOP + BOTTOM);
    context.imageSmoothingEnabled = false;
    context.fillStyle = css("--absent");
    context.fillRect(LEFT, TOP, box.width - LEFT, box.height);
    context.drawImage(heat, LEFT, TOP, box.width - LEFT, box.height);
    const cell = (box.width - LEFT) / sample.keys;
    const x = (key) => LEFT + (key + 0.5) * cell;
    const y = (step) => TOP + (step + 0.5) * box.row;

    sample.regions.forEach((region, r) => {
      context.fillStyle = css(`--g${r % data.region_colours}`);
      const lane = region.spans.length ? 4 * Math.min(2, sample.inside[region.spans[0][0]].indexOf(r)) : 0;
      for (const [start, stop] of region.spans)
        context.fillRect(LEFT + start * cell + 0.5, lane + 1, Math.max(1.5, (stop - start) * cell - 1), 3);
    });
    context.fillStyle = css("--muted");
    context.font = font;
    context.textAlign = "right";
    const apart = Math.max(1, Math.ceil(14 / box.row));
    for (let t = 0; t < sample.steps; t += apart)
      if (Math.abs(t - at.step) >= apart || t === at.step) context.fillText(t, LEFT - 7, y(t) + 4);
    context.textAlign = "center";
    const every = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000].find((n) => n * cell > 46) || 5000;
    for (let k = 0; k < sample.keys && x(k) < box.width - 10; k += every)
      context.fillText(k, Math.max(LEFT + 4, x(k)), TOP + box.height + 15);

    context.fillStyle = css("--commit");
    const size = Math.max(1.6, Math.min(3, cell / 2, box.row / 3));
    for (const [step, position] of sample.commits) {
      context.beginPath();
      context.arc(x(position), y(step), size, 0, 7);
      context.fill();
    }
    if (at.token >= 0) {
      context.strokeStyle = css("--ink");
      context.globalAlpha = 0.35;
      context.lineWidth = Math.max(1, Math.min(cell, 3));
      context.beginPath();
      context.moveTo(x(at.token), TOP);
      context.lineTo(x(at.token), TOP + box.height);
      context.stroke();
      context.globalAlpha = 1;
    }
    context.strokeStyle = context.fillStyle = css("--top");
    context.lineWidth = 1.75;
    context.lineJoin = "round";
    context.beginPath();
    for (let t = 0, begun = false; t < sample.steps; t++) {
      const key = anchorAt(t);
      if (key >= 0) context[begun ? "lineTo" : "moveTo"](x(key), y(t));
      begun = begun || key >= 0;
    }
    context.stroke();
    const top = anchorAt(at.step);
    if (top >= 0) {
      context.beginPath();
      context.arc(x(top), y(at.step), 4, 0, 7);
      context.fill();
    }
    context.strokeStyle = css("--ink");
    context.lineWidth = 1.5;
    context.strokeRect(LEFT - 0.75, TOP + at.step * box.row, box.width - LEFT, Math.max(2, box.row));
  }

  function sizeStrip() {
    const ratio = window.devicePixelRatio || 1;
    const wide = parts.strip.parentElement.clientWidth;
    const rows = Math.max(2 * (sample.steps <= 128), Math.min(16, 230 / sample.steps));
    box = { width: wide, height: Math.max(24, rows * sample.steps), row: Math.max(24 / sample.steps, rows) };
    parts.strip.width = Math.round(wide * ratio);
    parts.strip.height = Math.round((box.height + TOP + BOTTOM) * ratio);
    parts.strip.style.height = `${box.height + TOP + BOTTOM}px`;
    frame();
  }

  // What is said -----------------------------------------------------------------------------------------------------

  const times = (lift) => (Number.isNaN(lift) ? "not ranked: too few rows see it" : `${format(lift)} × uniform`);

  function paintWords() {
    parts["step-at"].textContent = `${at.step} of 0–${sample.steps - 1}`;
    parts["layer-at"].textContent =
      `${sample.layers[at.layer]} of ${sample.layers[0]}–${sample.layers[sample.layers.length - 1]}`;
    root.dataset.step = at.step;
    root.dataset.layer = sample.layers[at.layer];
    const anchor = anchorAt(at.step);
    const fresh = sample.fresh[at.step].size;
    const masked = countMasked(at.step);
    const writes = fresh
      ? `writes ${fresh} token${fresh > 1 ? "s" : ""}${masked ? ` of ${masked} masked` : ""}`
      : "writes nothing";
    const lift =
      anchor < 0 ? NaN : at.head >= 0 ? headAt(at.step, at.layer, at.head)[0][1] : liftAt(at.step, at.layer, anchor);
    const whose = `layer ${sample.layers[at.layer]}${at.head >= 0 ? `, head ${at.head}` : ""}`;
    const top = `position ${anchor}, ${anchor < 0 ? "" : named(at.step, anchor)}, ${times(lift)}`;
    parts.says.textContent =
      `Step ${at.step} ${writes}. ` +
      (anchor < 0 ? `There is no ranked key in ${whose}.` : `Top key of ${whose}: ${top}.`);
    parts.go.hidden = anchor < 0;
  }
  function countMasked(step) {
    let masked = 0;
    for (let p = 0; p < sample.keys; p++) masked += sample.states[step * sample.keys + p] === MASKED;
    return masked;
  }

  function paintScale() {
    const [low, high] = ends();
    const unit = inPercent() ? " %" : " ×";
    parts.scale.firstElementChild.textContent = inPercent() ? `≤ ${format(low)} %` : "≤ uniform";
    parts.scale.lastElementChild.textContent = format(high) + unit;
    const notes = [...sample.dropped];
    const rows = sample.rows === "cache" ? ", of the rows new in a step" : "";
    if (at.head >= 0)
      notes.push(
        `Of single heads the page holds the ${sample.ranks} top keys alone${rows}; all others are left unshaded.`,
      );
    else if (sample.rows === "cache") notes.push("A cached model: each step shows the attention of its whole prefix.");
    if (sample.unranked)
      notes.push("Grey in the map: keys that too few rows see to be ranked, or that are not there yet.");
    parts.note.textContent = notes.join(" ");
    parts.note.hidden = !notes.length;
  }

  function describe(p) {
    const t = at.step;
    const state = sample.states[t * sample.keys + p];
    const now = sample.fresh[t].get(p);
    const then = sample.written.get(p);
    let says = STATES[state];
    if (now) says = `${state === MASKED ? "masked, " : ""}written by this step (confidence ${format(now.confidence)})`;
    else if (state === COMMITTED && then) says = `written by step ${then.step} (confidence ${format(then.confidence)})`;
    else if (state === ABSENT) says = "not there yet";
    const rows = [{ label: "state", value: says }];
    if (at.head >= 0) {
      const rank = headAt(t, at.layer, at.head).findIndex(([key]) => key === p);
      if (rank >= 0) {
        const lift = headAt(t, at.layer, at.head)[rank][1];
        rows.push({ label: `lift, head ${at.head}`, value: `${times(lift)}, rank ${rank + 1}` });
        if (sample.rows !== "cache")
          rows.push({ label: "received", value: `${format(lift * uniformAt(t, at.layer, p))} %` });
      } else rows.push({ label: `lift, head ${at.head}`, value: "not among its top keys" });
    } else if (state !== ABSENT) {
      const lift = liftAt(t, at.layer, p);
      rows.push({ label: "lift", value: times(lift) });
      if (!Number.isNaN(lift)) rows.push({ label: "received", value: `${format(lift * uniformAt(t, at.layer, p))} %` });
    }
    if (sample.inside[p].length)
      rows.push({ label: "region", value: sample.inside[p].map((r) => sample.regions[r].name).join(", ") });
    if (p === anchorAt(t)) rows.push({ label: "marked", value: "top key of this step" });
    return { title: `position ${p}: ${named(t, p)}`, rows };
  }
  function showToken(p) {
    at.token = p;
    const told = describe(p);
    const where = () => {
      const place = tokens[p].getClientRects()[0]; // of a token in two lines, the part in the first
      return [place.left + Math.min(place.width, 40) / 2, place.top];
    };
    tip.show(where, told.title, told.rows);
    frame();
  }
  function hideToken() {
    at.token = -1;
    tip.hide();
    frame();
  }

  // Frames -----------------------------------------------------------------------------------------------------------

  let asked = false;
  function paint() {
    asked = false;
    if (!sample) return;
    paintText();
    paintWords();
    paintScale();
    paintStrip();
  }
  function frame() {
    if (!asked) requestAnimationFrame(paint);
    asked = true;
  }

  function go(step, layer) {
    at.step = Math.max(0, Math.min(sample.steps - 1, step));
    at.layer = Math.max(0, Math.min(sample.layers.length - 1, layer));
    parts.step.value = at.step;
    parts.layer.value = at.layer;
    frame();
    const focused = document.activeElement.dataset.p;
    if (focused !== undefined && root.contains(document.activeElement))
      requestAnimationFrame(() => showToken(Number(focused)));
    else if (at.token >= 0) hideToken();
  }

  function play(on) {
    clearInterval(playing);
    playing = 0;
    if (on) {
      if (at.step === sample.steps - 1) go(0, at.layer);
      playing = setInterval(
        () => {
          go(at.step + 1, at.layer);
          if (at.step === sample.steps - 1) play(false);
        },
        Math.max(60, Math.min(600, 12000 / sample.steps)),
      );
    }
    parts.play.textContent = playing ? "❚❚" : "▶";
    parts.play.setAttribute("aria-label", playing ? "Pause" : "Play");
  }

  // Scroll the text alone, never the page, until a token is in sight.
  function bring(p) {
    const place = tokens[p].getBoundingClientRect();
    const held = parts.text.getBoundingClientRect();
    if (place.top < held.top || place.bottom > held.bottom)
      parts.text.scrollTop += place.top - held.top - held.height / 2;
  }
  function focusToken(p) {
    tokens[p].focus({ preventScroll: true });
    bring(p);
    showToken(p);
  }

  // Choosing ---------------------------------------------------------------------------------------------------------

  const runs = [...new Set(data.samples.map((told) => told.label))];
  runs.forEach((label) => element("option", { value: label }, parts.run, label));

  function fillSamples() {
    parts.sample.replaceChildren();
    data.samples.forEach((told, i) => {
      if (told.label === parts.run.value) element("option", { value: i }, parts.sample, told.sample);
    });
  }
  async function choose() {
    play(false);
    const index = Number(parts.sample.value);
    const chosen = await read(index);
    if (index !== Number(parts.sample.value)) return; // another one was chosen meanwhile
    const depth = sample ? at.layer / Math.max(1, sample.layers.length - 1) : 0.5;
    sample = chosen;
    root.className = `explorer ${modelClass(sample.label)}`;
    parts.step.max = sample.steps - 1;
    parts.layer.max = sample.layers.length - 1;
    parts.play.disabled = sample.steps < 2;
    parts.head.replaceChildren();
    element("option", { value: -1 }, parts.head, "mean");
    const heads = sample.heads ? sample.heads.count : 0;
    for (let h = 0; h < heads; h++) element("option", { value: h }, parts.head, h);
    parts.head.disabled = !heads;
    if (at.head >= heads) at.head = -1;
    parts.head.value = at.head;
    parts.regions.replaceChildren();
    sample.regions.forEach((region, r) => {
      const item = element("button", { type: "button", class: `g${r % data.region_colours}` }, parts.regions);
      element("span", { class: "swatch", "aria-hidden": "true" }, item);
      item.append(region.name);
      item.addEventListener("click", () => region.spans.length && focusToken(region.spans[0][0]));
    });
    at.token = -1;
    build();
    go(0, Math.round(depth * (sample.layers.length - 1)));
    sizeStrip();
    const first = sample.states.indexOf(MASKED);
    requestAnimationFrame(() => {
      bring(first >= 0 ? first : sample.keys - 1);
      measure();
      root.dataset.ready = index;
    });
  }

  parts.run.addEventListener("change", () => {
    fillSamples();
    choose();
  });
  parts.sample.addEventListener("change", choose);
  parts.step.addEventListener("input", () => {
    play(false);
    go(Number(parts.step.value), at.layer);
  });
  parts.layer.addEventListener("input", () => go(at.step, Number(parts.layer.value)));
  parts.head.addEventListener("change", () => {
    at.head = Number(parts.head.value);
    frame();
  });
  parts.colour.addEventListener("change", () => {
    at.percent = parts.colour.value === "percent";
    frame();
  });
  parts.fit.addEventListener("change", () => {
    at.fit = parts.fit.checked;
    frame();
  });
  parts.play.addEventListener("click", () => play(!playing));
  parts.go.addEventListener("click", () => focusToken(anchorAt(at.step)));

  const tokenOf = (event) => (event.target.dataset.p === undefined ? null : Number(event.target.dataset.p));
  parts.text.addEventListener("pointerover", (event) => {
    const p = tokenOf(event);
    if (p !== null) showToken(p);
  });
  parts.text.addEventListener("pointerleave", hideToken);
  parts.text.addEventListener("focusin", (event) => {
    const p = tokenOf(event);
    if (p !== null) showToken(p);
  });
  parts.text.addEventListener("focusout", hideToken);

  const inStrip = (event) => {
    const place = parts.strip.getBoundingClientRect();
    return {
      step: Math.max(0, Math.min(sample.steps - 1, Math.floor((event.clientY - place.top - TOP) / box.row))),
      key: Math.floor(((event.clientX - place.left - LEFT) / (box.width - LEFT)) * sample.keys),
    };
  };
  parts.strip.addEventListener("pointerdown", (event) => {
    play(false);
    go(inStrip(event).step, at.layer);
  });
  parts.strip.addEventListener("pointermove", (event) => {
    const { step, key } = inStrip(event);
    if (event.buttons) go(step, at.layer);
    if (key < 0 || key >= sample.keys) return tip.hide();
    const number = row(step)[key];
    const place = parts.strip.getBoundingClientRect();
    const [x, y] = [event.clientX - place.left, event.clientY - place.top];
    const where = () => {
      const now = parts.strip.getBoundingClientRect();
      return [now.left + x, now.top + y];
    };
    tip.show(where, `step ${step}, position ${key}`, [
      { label: "token", value: named(step, key) },
      {
        label: inPercent() ? "received" : "lift",
        value: Number.isNaN(number) ? "not held" : inPercent() ? `${format(number)} %` : times(number),
      },
    ]);
  });
  parts.strip.addEventListener("pointerleave", tip.hide);

  // Space plays; arrows step and change layers; with Shift they walk over the tokens; A goes to the top key.
  root.addEventListener("keydown", (event) => {
    if (!sample || event.altKey || event.ctrlKey || event.metaKey || event.target.matches("select")) return;
    const slider = event.target.matches("input[type=range]");
    const sideways = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const upwards = { ArrowUp: 1, ArrowDown: -1 }[event.key];
    if (event.key === " ") {
      if (event.target.matches("button, input[type=checkbox]")) return;
      play(!playing);
    } else if (event.shiftKey && sideways) {
      const p = event.target.dataset.p === undefined ? anchorAt(at.step) - sideways : Number(event.target.dataset.p);
      focusToken(Math.max(0, Math.min(sample.keys - 1, p + sideways)));
    } else if (event.key === "a" || event.key === "A") {
      if (anchorAt(at.step) >= 0) focusToken(anchorAt(at.step));
    } else if (sideways && !slider) {
      play(false);
      go(at.step + sideways, at.layer);
    } else if (upwards && event.target !== parts.layer) go(at.step, at.layer + upwards);
    else return;
    event.preventDefault();
  });

  parts.text.addEventListener("scroll", frame, { passive: true });
  theme.follow(paint);
  new ResizeObserver(() => {
    if (!sample) return;
    sizeStrip();
    if (tops) measure();
  }).observe(parts.strip.parentElement);
  fillSamples();
  choose();
})();
