"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const FEW = 12; // up to so many runs each has its own line; of more, a band and the chosen ones
const $ = id => document.getElementById(id);

function add(parent, tag, text, kind) {
  const made = document.createElement(tag);
  if (text !== undefined && text !== "") made.textContent = text;
  if (kind) made.className = kind;
  return parent.appendChild(made);
}

// ---- Numbers as people write them: 1e-5, 0.03125, 12,500.
function number(value, digits = 4, isPadded = false) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e7 || size < 1e-3) {
    const [front, back] = value.toExponential(digits - 1).split("e");
    return `${Number(front)}e${Number(back)}`;
  }
  if (size >= 1000) return value.toLocaleString("en-US", { maximumFractionDigits: size < 1e4 ? 1 : 0 });
  return isPadded ? value.toPrecision(digits) : String(Number(value.toPrecision(digits)));
}
function duration(seconds) {
  for (const [unit, length, lower, part] of [["d", 86400, "h", 3600], ["h", 3600, "min", 60], ["min", 60, "s", 1]])
    if (seconds >= length) return `${Math.floor(seconds / length)} ${unit} ${Math.floor(seconds % length / part)} ${lower}`;
  return `${seconds.toFixed(1)} s`;
}
const plural = (count, word) => `${count.toLocaleString("en-US")} ${word}${count === 1 ? "" : "s"}`;

DATA.settings.sort((a, b) => a.minor - b.minor);

// ---- Curves: the steps are stored as differences.
for (const curve of DATA.curves)
  for (const each of curve.of)
    if (each) {
      let step = 0;
      each.x = Float64Array.from(each.x, more => step += more);
      each.y = Float64Array.from(each.y, value => value === null ? NaN : value);
    }
const CURVES = new Map(DATA.curves.map(each => [each.name, each]));
const isBetter = (curve, one, other) => curve.less ? one < other : one > other;
const best = (curve, run) => { const of = curve && curve.of[run], found = of && (curve.less ? of.least : of.most); return found ? found[0] : null; };
const last = (curve, run) => curve && curve.of[run] ? curve.of[run].last : null;

// A trial of a search has its own state and values.
const TRIALS = new Map();
DATA.searches.forEach(search => (search.trials || []).forEach(trial => trial.run === null || TRIALS.set(trial.run, { ...trial, search })));
RUNS.forEach((run, place) => {
  const trial = TRIALS.get(place);
  if (trial && trial.state !== "complete" && run.state === "finished") run.state = trial.state;
});

const trialValue = run => { const trial = TRIALS.get(run), value = trial && trial.state === "complete" ? trial.values[trial.search.objectives[0]] : null; return typeof value === "number" ? value : null; };

// ---- What the reader has chosen; it outlives a reload.
const KEY = `drivetrain report ${DATA.title}`;
const state = { chosen: null, sort: null, filter: "", section: "all", only: "", smooth: 0, log: false, colour: "", metric: DATA.metric, zoom: null, large: [], scroll: 0, theme: "", steps: {} };
try { Object.assign(state, JSON.parse(sessionStorage.getItem(KEY) || "{}")); } catch { /* another program's */ }
function keep() {
  state.scroll = scrollY;
  try { sessionStorage.setItem(KEY, JSON.stringify({ ...state, chosen: [...chosen].map(run => RUNS[run].name), known: RUNS.map(run => run.name) })); } catch { /* no storage here */ }
}
if (!CURVES.has(state.metric)) state.metric = CURVES.has(DATA.metric) ? DATA.metric : DATA.curves[0]?.name;
const theme = new URLSearchParams(location.search).get("theme") || state.theme;
if (theme) document.documentElement.dataset.theme = theme;

const many = RUNS.length > FEW;
const metric = () => CURVES.get(state.metric);
const byBest = () => {
  const curve = metric(), found = RUNS.map((_, run) => [TRIALS.has(run) ? trialValue(run) : best(curve, run), run]).filter(each => each[0] !== null);
  return found.sort((a, b) => isBetter(curve, a[0], b[0]) ? -1 : 1).map(each => each[1]);
};
const first = () => many ? byBest().slice(0, 5) : RUNS.keys();
const isKept = name => state.chosen.includes(name) || (!many && !state.known.includes(name)); // few: a new run is shown
const chosen = new Set(state.chosen ? [...RUNS.keys()].filter(run => isKept(RUNS[run].name)) : first());
let hovered = null, shown = RUNS.map(() => true);

// ---- Colours. Okabe and Ito's are safe for people who are blind to some; viridis is for numbers.
const probe = add(document.documentElement, "span");
probe.hidden = true;
const tones = {};
function tone(name) {
  if (!tones[name]) { probe.style.color = `var(--${name})`; tones[name] = getComputedStyle(probe).color; }
  return tones[name];
}
const isDark = () => { const [r, g, b] = tone("back").match(/[\d.]+/g).map(Number); return r + g + b < (tone("back").startsWith("color") ? 1.5 : 382); };
const LIGHT = ["#0072B2", "#D55E00", "#009E73", "#B5579A", "#C48A00", "#3FA0D8", "#6b5b95"];
const DARK = ["#56B4E9", "#E69F00", "#2BC49A", "#E58FC0", "#F0E442", "#E8703A", "#A8A4F0"];
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3], [14, 4]];
const VIRIDIS = ["#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725"];
const slots = new Map();
function slot(run) {
  if (!many) return run;
  if (!slots.has(run)) {
    for (const old of slots.keys()) if (!chosen.has(old)) slots.delete(old);
    const taken = new Set(slots.values());
    let free = 0;
    while (taken.has(free)) free++;
    slots.set(run, free);
  }
  return slots.get(run);
}
[...chosen].forEach(slot);
const palette = place => (isDark() ? DARK : LIGHT)[place % LIGHT.length];
const dashOf = place => DASHES[Math.floor(place / LIGHT.length) % DASHES.length];
function viridis(part) {
  const [from, to] = isDark() ? [0.22, 1] : [0, 0.88];
  const at = (from + (to - from) * Math.min(1, Math.max(0, part))) * (VIRIDIS.length - 1), low = Math.min(VIRIDIS.length - 2, Math.floor(at));
  const parts = [VIRIDIS[low], VIRIDIS[low + 1]].map(hex => [1, 3, 5].map(place => parseInt(hex.slice(place, place + 2), 16)));
  return `rgb(${parts[0].map((value, place) => Math.round(value + (parts[1][place] - value) * (at - low))).join(",")})`;
}

// A scale gives each run a colour by a setting or a value; without one a run has its own.
let scale = null;
function settingOf(name) { const found = DATA.settings.find(each => each.name === name); return found ? found.of : []; }
function makeScale() {
  scale = null;
  const [kind, ...rest] = state.colour.split(":"), name = rest.join(":");
  if (!name) return;
  const curve = CURVES.get(name);
  const raw = kind === "setting" ? settingOf(name) : RUNS.map((_, run) => kind === "best" ? best(curve, run) : last(curve, run));
  const values = raw.map(value => value === null || value === "" ? NaN : Number(value)), finite = values.filter(Number.isFinite);
  if (finite.length && (kind !== "setting" || raw.every((value, run) => Number.isFinite(values[run]) || /^(None|not given|unknown|nan|-?inf)$/.test(value)))) {
    // A diverged run must not take all of the scale: of values, 95 of 100 decide.
    const sorted = [...finite].sort((a, b) => a - b), end = kind === "setting" ? 1 : 0.95;
    let low = sorted[0], high = sorted[Math.min(sorted.length - 1, Math.ceil((sorted.length - 1) * end))];
    const logs = low > 0 && high / low > 20, place = logs ? Math.log : value => value;
    scale = { name, kind, low, high, of: run => Number.isFinite(values[run]) ? viridis(high > low ? (place(values[run]) - place(low)) / (place(high) - place(low)) : 0.5) : tone("band") };
  } else if (finite.length || kind === "setting") {
    const names = [...new Set(raw)].sort((a, b) => String(a).localeCompare(String(b), "en", { numeric: true }));
    scale = { name, kind, names, of: run => palette(names.indexOf(raw[run])) };
  }
}
const isLoose = run => many && !chosen.has(run); // a run that has no colour of its own
const colourOf = run => scale ? scale.of(run) : isLoose(run) ? tone("ink") : palette(slot(run));
const dash = run => scale || isLoose(run) ? [] : dashOf(slot(run));

function swatch(parent, colour, pattern) {
  const canvas = add(parent, "canvas", "", "swatch"), pen = canvas.getContext("2d");
  canvas.width = 48; canvas.height = 24;
  pen.scale(2, 2);
  pen.strokeStyle = colour; pen.lineWidth = 2.4; pen.setLineDash(pattern);
  pen.beginPath(); pen.moveTo(0, 6); pen.lineTo(24, 6); pen.stroke();
  return canvas;
}

// ---- Axes.
function ticks(low, high, most) {
  const rough = (high - low) / Math.max(1, most), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(each => each * power).find(each => each >= rough * 0.999) || rough;
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9 && found.length < 30; at++) found.push(at * step);
  const size = Math.max(Math.abs(low), Math.abs(high)), places = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const text = value => {
    if (Math.abs(value) < step / 1e6) return "0";
    return size >= 1e7 || size < 1e-3 ? number(value, 3) : value.toLocaleString("en-US", { minimumFractionDigits: places, maximumFractionDigits: places });
  };
  return found.map(value => [value, text(value)]);
}
function logTicks(low, high, most) { // of base-10 logarithms
  const found = [];
  const parts = high - low < 1.2 ? [1, 2, 3, 5, 7] : high - low < 2.5 ? [1, 2, 5] : [1], skip = Math.max(1, Math.ceil((high - low) / most));
  for (let power = Math.floor(low); power <= high; power++)
    for (const part of parts) {
      const at = power + Math.log10(part);
      if (at >= low - 1e-9 && at <= high + 1e-9 && power % skip === 0) found.push([at, number(part * 10 ** power, 3)]);
    }
  return found.length > 1 ? found : ticks(10 ** low, 10 ** high, 3).map(([value, text]) => [Math.log10(value), text]);
}

// ---- Charts of curves.
// The exponential moving average with the correction for its start (Kingma and Ba, "Adam", section 3).
function smoothed(values, by) {
  if (!by) return values;
  let mean = 0, count = 0;
  return values.map(value => {
    if (Number.isNaN(value)) return value;
    mean = by * mean + (1 - by) * value;
    return mean / (1 - by ** ++count);
  });
}

class Chart {
  constructor(grid, title, parts) {
    this.title = title; this.parts = parts; // [{ curve, label }]: several only where the report has one run
    this.card = add(grid, "article", "", "card");
    const head = add(this.card, "div", "", "head");
    add(head, "h3", title);
    if (parts.length > 1) parts.forEach((part, place) => { const key = add(head, "span", "", "local-key"); part.key = () => { key.replaceChildren(); swatch(key, palette(place), place ? DASHES[1] : []); key.append(part.label); }; });
    const size = add(head, "button", "⤢");
    size.title = "larger or smaller";
    size.setAttribute("aria-label", `larger or smaller: ${title}`);
    this.card.classList.toggle("large", state.large.includes(title));
    size.onclick = () => {
      const is = this.card.classList.toggle("large");
      state.large = state.large.filter(each => each !== title).concat(is ? [title] : []);
      keep();
    };
    this.plot = add(this.card, "div", "", "plot");
    this.canvas = add(this.plot, "canvas"); this.over = add(this.plot, "canvas");
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", `curves of ${title}`);
    this.note = add(this.card, "p", "", "note");
    this.isNear = false; this.isStale = true;
    this.listen();
  }

  // The lines: { run, x, y, colour, dash }. Those of runs that are not chosen are in the band.
  lines(isForBand) {
    const found = [];
    this.parts.forEach((part, place) => part.curve.of.forEach((each, run) => {
      if (!each || !shown[run]) return;
      const isDrawn = chosen.has(run) || (scale && many);
      if (!isForBand && !isDrawn && run !== hovered) return;
      const alone = this.parts.length > 1;
      found.push({ run, part: place, x: each.x, y: smoothed(each.y, state.smooth), raw: each.y, colour: alone ? palette(place) : colourOf(run), dash: alone ? (place ? DASHES[1] : []) : dash(run), isChosen: chosen.has(run) });
    }));
    return found;
  }

  draw() {
    const box = this.plot.getBoundingClientRect(), ratio = devicePixelRatio || 1;
    if (!box.width) return;
    for (const canvas of [this.canvas, this.over]) { canvas.width = box.width * ratio; canvas.height = box.height * ratio; }
    const pen = this.pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    this.isStale = false;
    this.parts.forEach(part => part.key && part.key());
    const all = this.lines(true), lines = this.lines(false).filter(line => line.run !== hovered || line.isChosen || (scale && many));
    const xs = state.zoom || range(all.map(line => [line.x[0], line.x[line.x.length - 1]]));
    if (!xs) { this.view = null; this.note.textContent = "No shown run has this value."; return; }
    this.band = many && !scale ? band(all, xs) : null;
    const above = value => state.log ? (value > 0 ? Math.log10(value) : NaN) : value;
    const inside = lines.map(line => extent(line, xs, above));
    if (this.band) inside.push(range([...this.band.low.map(v => [above(v), above(v)]), ...this.band.high.map(v => [above(v), above(v)])]));
    if (scale && many) inside.splice(0, inside.length, robust(lines, xs, above)); // one diverged run must not flatten the others
    let ys = range(inside.filter(Boolean));
    if (!ys) ys = [0, 1];
    if (ys[0] === ys[1]) ys = [ys[0] - (Math.abs(ys[0]) * 0.1 || 1), ys[1] + (Math.abs(ys[1]) * 0.1 || 1)];
    const more = (ys[1] - ys[0]) * 0.05;
    ys = [ys[0] - more, ys[1] + more];
    const width = box.width, height = box.height, bottom = height - 20, top = 8;
    pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    const yticks = (state.log ? logTicks : ticks)(ys[0], ys[1], Math.max(2, Math.floor(height / 36)));
    const left = Math.ceil(Math.max(24, ...yticks.map(each => pen.measureText(each[1]).width))) + 8, right = width - 6;
    const X = value => left + (value - xs[0]) / (xs[1] - xs[0] || 1) * (right - left), Y = value => bottom - (above(value) - ys[0]) / (ys[1] - ys[0]) * (bottom - top);
    this.view = { xs, left, right, top, bottom, X, Y };
    pen.fillStyle = tone("faint"); pen.strokeStyle = tone("grid"); pen.lineWidth = 1; pen.textBaseline = "middle"; pen.textAlign = "right";
    for (const [at, text] of yticks) {
      const y = Math.round(bottom - (at - ys[0]) / (ys[1] - ys[0]) * (bottom - top)) + 0.5;
      pen.beginPath(); pen.moveTo(left, y); pen.lineTo(right, y); pen.stroke();
      pen.fillText(text, left - 6, y);
    }
    pen.textBaseline = "alphabetic"; pen.textAlign = "center";
    let free = left - 12;
    const unit = pen.measureText("step").width;
    for (const [at, text] of ticks(xs[0], xs[1], Math.max(2, Math.floor((right - left) / 75)))) {
      const half = pen.measureText(text).width / 2, x = Math.min(X(at), right - half);
      if (x - half < free + 8 || x + half > right - unit - 8) continue;
      pen.fillText(text, x, height - 4);
      free = x + half;
    }
    pen.textAlign = "right";
    pen.fillText("step", right, height - 4);
    pen.save();
    pen.beginPath(); pen.rect(left - 3, 0, right - left + 6, bottom + 1); pen.clip();
    if (this.band) this.drawBand(pen);
    if (state.smooth) for (const line of lines) if (line.isChosen) this.stroke(pen, { ...line, y: line.raw }, 1, 0.25);
    for (const line of lines) if (!line.isChosen) this.stroke(pen, line, 1, 0.65);
    for (const line of lines) if (line.isChosen) this.stroke(pen, line, scale && many ? 2.4 : 1.7, 1);
    pen.restore();
    this.notes(all, lines, xs);
    this.drawOver();
  }

  notes(all, lines, xs) {
    const gaps = all.map(line => this.parts[line.part].curve.of[line.run].gaps).reduce((sum, each) => sum + each, 0);
    const outside = all.filter(line => { const most = extent(line, xs, value => value); return most && this.view && this.view.Y(most[1]) < -1; }).length;
    const notes = [];
    if (gaps) notes.push(`${plural(gaps, "value")} ${gaps === 1 ? "is" : "are"} NaN or infinite: the gap${gaps === 1 ? "" : "s"}`);
    if (outside && many) notes.push(`${plural(outside, "run")} above the axis`);
    this.note.textContent = notes.join(" · ");
  }

  drawBand(pen) {
    const { X, Y } = this.view, { x, low, high, inner, outer, middle } = this.band;
    const area = (under, over, opacity) => {
      pen.globalAlpha = opacity; pen.fillStyle = tone("band");
      pen.beginPath();
      x.forEach((at, place) => pen.lineTo(X(at), clamp(Y(over[place]))));
      for (let place = x.length - 1; place >= 0; place--) pen.lineTo(X(x[place]), clamp(Y(under[place])));
      pen.fill();
      pen.globalAlpha = 1;
    };
    area(low, high, 0.16);
    area(inner, outer, 0.22);
    this.stroke(pen, { x, y: middle, colour: tone("band"), dash: [] }, 1.4, 0.9);
  }

  stroke(pen, line, width, opacity) {
    const { X, Y, xs } = this.view;
    pen.globalAlpha = opacity; pen.strokeStyle = pen.fillStyle = line.colour; pen.lineWidth = width; pen.lineJoin = "round"; pen.setLineDash(line.dash);
    pen.beginPath();
    let before = false;
    const points = [], { x, y } = line;
    for (let place = 0; place < x.length; place++) {
      if (x[place + 1] < xs[0] || x[place - 1] > xs[1]) continue;
      const at = clamp(Y(y[place]));
      if (Number.isNaN(at)) { before = false; continue; }
      if (before) pen.lineTo(X(x[place]), at); else { pen.moveTo(X(x[place]), at); if (!(Math.abs(Y(y[place + 1])) < 1e6)) points.push([X(x[place]), at]); }
      before = true;
    }
    pen.stroke();
    pen.setLineDash([]);
    for (const [px, py] of points) { pen.beginPath(); pen.arc(px, py, 2.5, 0, 7); pen.fill(); } // a value between two gaps
    pen.globalAlpha = 1;
  }

  // The run under the pointer, and the place of the pointer in all charts.
  drawOver() {
    const pen = this.over.getContext("2d"), ratio = devicePixelRatio || 1;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, this.over.width, this.over.height);
    if (!this.view) return;
    const { left, right, top, bottom, X } = this.view;
    pen.save();
    pen.beginPath(); pen.rect(left, 0, right - left, bottom + 1); pen.clip();
    if (hovered !== null && RUNS.length > 1)
      for (const line of this.lines(false).filter(each => each.run === hovered)) {
        this.stroke(pen, { ...line, colour: tone("card"), dash: [] }, 5, 0.9);
        this.stroke(pen, { ...line, colour: chosen.has(hovered) || scale ? line.colour : tone("ink") }, 2.6, 1);
      }
    pen.strokeStyle = tone("faint"); pen.lineWidth = 1;
    if (at !== null && X(at) >= left && X(at) <= right) { pen.beginPath(); pen.moveTo(Math.round(X(at)) + 0.5, top); pen.lineTo(Math.round(X(at)) + 0.5, bottom); pen.stroke(); }
    if (this.drag) { pen.fillStyle = tone("accent"); pen.globalAlpha = 0.15; pen.fillRect(Math.min(...this.drag), top, Math.abs(this.drag[1] - this.drag[0]), bottom - top); }
    pen.restore();
  }

  listen() {
    const place = event => event.clientX - this.plot.getBoundingClientRect().left;
    this.plot.addEventListener("pointermove", event => {
      if (!this.view) return;
      const x = place(event), { left, right, xs } = this.view;
      if (this.drag) this.drag[1] = Math.min(right, Math.max(left, x));
      at = x < left || x > right ? null : xs[0] + (x - left) / (right - left) * (xs[1] - xs[0]);
      this.tell(event);
      drawOver();
    });
    this.plot.addEventListener("pointerleave", () => { at = null; this.tip?.remove(); this.tip = null; hover(null); });
    this.plot.addEventListener("pointerdown", event => {
      if (event.pointerType !== "mouse" || event.button || !this.view) return;
      this.plot.setPointerCapture(event.pointerId);
      this.drag = [place(event), place(event)];
    });
    this.plot.addEventListener("pointerup", () => {
      if (!this.drag) return;
      const [from, to] = this.drag.sort((a, b) => a - b), { left, right, xs } = this.view;
      this.drag = null;
      const back = x => xs[0] + (x - left) / (right - left) * (xs[1] - xs[0]);
      if (to - from > 6) { state.zoom = [back(Math.max(from, left)), back(Math.min(to, right))]; redraw(); }
      else if (hovered !== null && RUNS.length > 1) choose(hovered);
    });
    this.plot.addEventListener("dblclick", () => { state.zoom = null; redraw(); });
  }

  // What the lines are at the pointer: the nearest is marked.
  tell(event) {
    if (at === null) { this.tip?.remove(); this.tip = null; return; }
    const box = this.plot.getBoundingClientRect(), y = event.clientY - box.top, { X, Y, xs } = this.view;
    const found = this.lines(true).map(line => ({ ...line, ...valueAt(line, at, (xs[1] - xs[0]) / 2) })).filter(line => line.value !== null);
    const near = found.reduce((one, other) => !one || Math.abs(Y(other.value) - y) < Math.abs(Y(one.value) - y) ? other : one, null);
    const is = near && Math.abs(Y(near.value) - y) < 24 ? near.run : null;
    if (is !== hovered) hover(is);
    const rows = found.filter(line => line.isChosen || line.run === is).sort((a, b) => b.value - a.value).slice(0, 13);
    if (!this.tip) this.tip = add(this.card, "div", "", "tip");
    this.tip.replaceChildren();
    add(this.tip, "b", `step ${number(Math.round(near ? near.step : at), 7)}`);
    for (const line of rows) {
      const row = add(this.tip, "div");
      swatch(row, line.colour, line.dash);
      add(row, line.run === is && RUNS.length > 1 ? "b" : "span", this.parts.length > 1 ? this.parts[line.part].label : RUNS[line.run].name).style.flex = 1;
      add(row, "span", number(line.value)).style.flex = "none";
    }
    const width = this.card.clientWidth, x = X(at) + 12, isRight = x > width / 2;
    this.tip.style.left = isRight ? "" : `${x + 16}px`;
    this.tip.style.right = isRight ? `${Math.max(4, width - x + 12)}px` : "";
    this.tip.style.top = `${this.plot.offsetTop + Math.min(y + 14, 90)}px`;
  }
}

let at = null; // the step under the pointer
const clamp = value => Math.max(-1e4, Math.min(1e4, value));
function range(pairs) {
  let low = Infinity, high = -Infinity;
  for (const [from, to] of pairs) { if (from < low) low = from; if (to > high) high = to; }
  return low <= high ? [low, high] : null;
}
function extent(line, xs, above) {
  let low = Infinity, high = -Infinity;
  for (let place = 0; place < line.x.length; place++) {
    if (line.x[place] < xs[0] || line.x[place] > xs[1]) continue;
    const value = above(line.y[place]);
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : null;
}
function robust(lines, xs, above) {
  const found = lines.map(line => extent(line, xs, above)).filter(Boolean);
  if (!found.length) return null;
  const lows = found.map(each => each[0]).sort((a, b) => a - b), highs = found.map(each => each[1]).sort((a, b) => a - b);
  return [lows[Math.floor((lows.length - 1) * 0.02)], highs[Math.ceil((highs.length - 1) * 0.98)]];
}
function valueAt(line, x, most) { // the nearest point
  let low = 0, high = line.x.length - 1;
  while (low < high) { const half = (low + high) >> 1; if (line.x[half] < x) low = half + 1; else high = half; }
  if (low > 0 && x - line.x[low - 1] < line.x[low] - x) low--;
  const value = line.y[low];
  return Number.isNaN(value) || value === undefined || Math.abs(line.x[low] - x) > most ? { value: null } : { value, step: line.x[low] };
}
function interpolate(line, x) {
  const { x: xs, y } = line;
  if (!xs.length || x < xs[0] || x > xs[xs.length - 1]) return NaN;
  let low = 0, high = xs.length - 1;
  while (low < high) { const half = (low + high) >> 1; if (xs[half] < x) low = half + 1; else high = half; }
  if (xs[low] === x || !low) return y[low];
  return y[low - 1] + (y[low] - y[low - 1]) * (x - xs[low - 1]) / (xs[low] - xs[low - 1]);
}
// Of all runs at each place: the middle one, half of them, and all but the 2 of 100 that are lowest and highest.
function band(lines, xs) {
  const found = { x: [], low: [], high: [], inner: [], outer: [], middle: [] };
  for (let place = 0; place <= 140; place++) {
    const x = xs[0] + (xs[1] - xs[0]) * place / 140;
    const values = Float64Array.from(lines.map(line => interpolate(line, x)).filter(value => !Number.isNaN(value))).sort();
    if (!values.length) continue;
    const part = of => values[Math.round((values.length - 1) * of)];
    found.x.push(x);
    [["low", 0.02], ["inner", 0.25], ["middle", 0.5], ["outer", 0.75], ["high", 0.98]].forEach(([name, of]) => found[name].push(part(of)));
  }
  return found;
}

const charts = [];
const watcher = new IntersectionObserver(seen => seen.forEach(each => {
  const chart = charts.find(one => one.plot === each.target);
  chart.isNear = each.isIntersecting;
  if (chart.isNear && chart.isStale) chart.draw();
}), { rootMargin: "300px" });
const sizes = new ResizeObserver(seen => seen.forEach(each => { const chart = charts.find(one => one.plot === each.target); chart.isStale = true; if (chart.isNear) chart.draw(); }));

// With one run, curves of one name in training and validation share a chart.
function chartsOf() {
  const found = new Map();
  for (const curve of DATA.curves) {
    const [stage, ...rest] = curve.name.split("/"), isShared = RUNS.length === 1 && ["train", "validation", "test"].includes(stage);
    const title = isShared ? rest.join("/") : curve.name, key = isShared ? `shared ${title}` : title;
    if (!found.has(key)) found.set(key, { title: curve.name, parts: [], groups: new Set() });
    const chart = found.get(key);
    chart.parts.push({ curve, label: stage });
    chart.groups.add(curve.group);
    if (chart.parts.length > 1) chart.title = title;
  }
  return [...found.values()];
}

function drawCurves() {
  const section = $("curves");
  if (!DATA.curves.length) { add(section, "h2", "Curves"); add(section, "p", "No values were logged, or by no logger whose files are in the run's directory: \"csv\", \"jsonl\" and \"tensorboard\" write them there.", "faint"); return; }
  if (many) { const note = add(section, "p", "", "faint"); note.id = "band"; }
  const grid = add(section, "div", "", "grid");
  for (const { title, parts, groups } of chartsOf()) {
    const chart = new Chart(grid, title, parts);
    chart.groups = groups;
    charts.push(chart);
    watcher.observe(chart.plot);
    sizes.observe(chart.plot);
  }
}
function redraw() {
  makeScale();
  $("unzoom").hidden = !state.zoom;
  if ($("band")) $("band").textContent = scale ? `A line for each run, coloured by ${scale.name}; a click on a line or on a row makes its run bold.` : "The line and the shades are the median, the middle half and 96 of 100 runs; the chosen runs are in colour. Click on a line or on a row to choose.";
  for (const chart of charts) { chart.isStale = true; if (chart.isNear) chart.draw(); }
  drawKeys();
  markRows();
  drawSearches();
  drawTime();
  drawMedia();
  keep();
}
function drawOver() { for (const chart of charts) if (chart.isNear && !chart.isStale) chart.drawOver(); }
function hover(run) {
  if (run === hovered) { drawOver(); return; }
  hovered = run;
  drawOver();
  for (const draw of highlights) draw();
  document.querySelectorAll("#runs tbody tr").forEach(row => row.classList.toggle("over", Number(row.dataset.run) === run));
}
const highlights = [];
function pick(run) { chosen.add(run); slot(run); }
function choose(run) {
  if (!chosen.delete(run)) pick(run);
  redraw();
}

// ---- The bar.
const curvesShown = chart => (state.section === "all" || chart.groups.has(state.section)) && chart.parts.some(part => part.curve.name.toLowerCase().includes(state.only.toLowerCase()));
function select() {
  for (const chart of charts) chart.card.hidden = !curvesShown(chart);
  for (const button of $("sections").children) button.setAttribute("aria-pressed", button.dataset.section === state.section);
  keep();
}
function drawBar() {
  const groups = new Map();
  for (const chart of charts) for (const group of chart.groups) groups.set(group, (groups.get(group) || 0) + 1);
  if (!groups.has(state.section)) state.section = "all";
  for (const [group, count] of groups.size > 1 && charts.length > 2 ? [["all", charts.length], ...groups] : []) {
    const button = add($("sections"), "button", group);
    add(button, "small", count);
    button.dataset.section = group;
    button.onclick = () => { state.section = group; select(); };
  }
  const bind = (id, name, event, read, then) => {
    const input = $(id);
    if (input.type === "checkbox") input.checked = state[name]; else input.value = state[name];
    input.addEventListener(event, () => { state[name] = read(input); then(); });
  };
  bind("only", "only", "input", input => input.value, select);
  bind("smooth", "smooth", "input", input => Number(input.value), redraw);
  bind("log", "log", "change", input => input.checked, redraw);
  $("unzoom").onclick = () => { state.zoom = null; redraw(); };
  $("paint").hidden = RUNS.length < 2;
  const choices = $("colour"), option = (value, text) => { add(choices, "option", text).value = value; };
  option("", many ? "chosen runs" : "run");
  DATA.settings.filter(each => !each.minor && new Set(each.of).size > 1).forEach(each => option(`setting:${each.name}`, short(each.name)));
  DATA.curves.filter(each => each.of.some(Boolean)).slice(0, 60).forEach(each => { option(`last:${each.name}`, `last ${each.name}`); });
  bind("colour", "colour", "change", input => input.value, redraw);
  if (choices.selectedIndex < 0) choices.value = state.colour = "";
  $("theme").onclick = () => {
    const next = { "": "dark", dark: "light", light: "" }[document.documentElement.dataset.theme || ""];
    document.documentElement.dataset.theme = state.theme = next;
    repaint();
  };
}
function repaint() { for (const name of Object.keys(tones)) delete tones[name]; redraw(); }
function drawKeys() {
  const keys = $("keys");
  keys.replaceChildren();
  if (RUNS.length < 2) return;
  if (scale) {
    const key = add(keys, "div", "", "scale");
    if (scale.names) for (const name of scale.names.slice(0, 30)) { swatch(key, palette(scale.names.indexOf(name)), []); add(key, "span", name); }
    else {
      add(key, "span", number(scale.low, 3));
      add(key, "i").style.background = `linear-gradient(90deg, ${[0, 0.25, 0.5, 0.75, 1].map(viridis).join(",")})`;
      add(key, "span", number(scale.high, 3));
      if (scale.kind !== "setting") add(key, "span", "(and more)");
    }
  }
  for (const run of many ? [...chosen].filter(each => shown[each]) : RUNS.keys()) {
    if (!shown[run]) continue;
    const key = add(keys, "button");
    swatch(key, colourOf(run), dash(run));
    add(key, "span", RUNS[run].name);
    key.title = many ? "remove from the chosen runs" : "show or hide";
    key.setAttribute("aria-pressed", chosen.has(run));
    key.onclick = () => choose(run);
    key.onmouseenter = () => hover(run);
    key.onmouseleave = () => hover(null);
  }
}

// ---- The table of runs.
function short(name) {
  const parts = name.split("."), end = parts[parts.length - 1];
  return DATA.settings.some(each => each.name !== name && each.name.split(".").at(-1) === end) ? name.replace(/^(trainer|task)\./, "").replace("hparams.", "") : end;
}
const isBad = text => !["finished", "running", "complete", "pruned"].includes(text);
const compare = new Intl.Collator("en", { numeric: true }).compare;
function columns() {
  const settings = DATA.settings.filter(each => !each.minor && new Set(each.of).size > 1);
  // An optimizer's rate is the task's argument under another name: of equal columns one is enough.
  const rank = each => each.name.startsWith("task.") ? 0 : /seed/.test(each.name) ? 2 : 1;
  settings.sort((a, b) => rank(a) - rank(b));
  const distinct = settings.filter((each, place) => !settings.slice(0, place).some(other => other.of.every((value, run) => value === each.of[run])));
  const of = metric();
  const found = [{ key: "run", title: "run", of: run => RUNS[run].name }];
  if (TRIALS.size) found.push({ key: "trial", title: "trial", isNumber: true, of: run => TRIALS.get(run)?.number ?? null }, { key: "value", title: DATA.searches.length > 1 ? "value of the trial" : `trial's ${DATA.searches[0].objectives[0]}`, isNumber: true, of: trialValue, text: padded });
  found.push({ key: "state", title: "state", of: run => RUNS[run].state });
  if (of) found.push({ key: "best", title: `best ${of.name}`, isNumber: true, of: run => best(of, run), text: padded }, { key: "last", title: "last", isNumber: true, of: run => last(of, run), text: padded });
  found.push({ key: "steps", title: "steps", isNumber: true, of: run => RUNS[run].steps }, { key: "duration", title: "duration", isNumber: true, of: run => RUNS[run].seconds, text: duration }, { key: "goodput", title: "goodput", of: run => RUNS[run].goodput });
  for (const each of distinct) found.push({ key: each.name, title: short(each.name), ...settingColumn(each) });
  return found;
}
const padded = value => number(value, 4, true);
function settingColumn(setting) {
  const isNumber = setting.of.every(value => value !== "" && Number.isFinite(Number(value)));
  return isNumber ? { isNumber, of: run => Number(setting.of[run]), text: value => number(value) } : { of: run => setting.of[run] };
}
function isMatch(run, filter) {
  return filter.trim().toLowerCase().split(/\s+/).every(term => {
    const [, name, sign, value] = term.match(/^([^<>=]+)(<=|>=|<|>|=)(.+)$/) || [];
    if (!name) return !term || [RUNS[run].name, RUNS[run].state, ...DATA.settings.filter(each => !each.minor).map(each => `${short(each.name)}=${each.of[run]}`)].some(text => text.toLowerCase().includes(term));
    const column = columns().find(each => each.key.toLowerCase() === name || each.title.toLowerCase() === name);
    const own = column ? column.of(run) : settingOf(DATA.settings.find(each => short(each.name).toLowerCase() === name || each.name.toLowerCase() === name)?.name)[run];
    if (own === null || own === undefined) return false;
    if (sign === "=") return String(own).toLowerCase() === value || (own !== "" && Number(own) === Number(value));
    return { "<": Number(own) < Number(value), ">": Number(own) > Number(value), "<=": Number(own) <= Number(value), ">=": Number(own) >= Number(value) }[sign];
  });
}
function stack(parent, seconds, kind = "stack") {
  const bar = add(parent, "div", "", kind), sum = seconds.reduce((all, each) => all + each, 0) || 1;
  seconds.forEach((each, place) => {
    if (each <= 0) return;
    const part = add(bar, "i");
    part.style.cssText = `flex: ${each / sum} 0 0; background: ${kindColour(place)}`;
    part.title = `${DATA.kinds[place]} ${duration(each)}, ${(100 * each / sum).toFixed(1)}%`;
  });
}
// "compute" is what one wants; what is lost is orange.
const kindColour = place => isDark() ? ["#2F7FB8", "#E69F00", "#2BC49A", "#A8A4F0", "#7d7fc9", "#8a929c", "#E8703A", "#525a65"][place] : ["#0072B2", "#E69F00", "#009E73", "#B5579A", "#7a6fae", "#9aa2ad", "#D55E00", "#d3d6da"][place];
function drawFacts() {
  const facts = $("facts"), counts = new Map();
  RUNS.forEach(run => counts.set(run.state, (counts.get(run.state) || 0) + 1));
  if (DATA.refresh) add(facts, "span", `running, page of ${new Date(DATA.written * 1000).toLocaleTimeString("en-GB")}`, "live");
  if (RUNS.length > 1) for (const [name, count] of [...counts].sort((a, b) => b[1] - a[1])) {
    const button = add(facts, "button", `${count.toLocaleString("en-US")} ${name === "silent" ? "without an end" : name}`, isBad(name) ? "state-bad" : "");
    button.title = "show these runs only; again: all";
    button.onclick = () => { state.filter = state.filter === `state=${name.toLowerCase()}` ? "" : `state=${name.toLowerCase()}`; $("filter").value = state.filter; filter(); };
  }
  add(facts, "span", plural(DATA.curves.length, "curve"));
  if (!DATA.refresh) add(facts, "span", `written ${new Date(DATA.written * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" })}`);
}
function drawTiles() {
  const run = RUNS[0], of = metric(), tiles = add($("runs"), "div", "", "tiles");
  const found = of && of.of[0] && (of.less ? of.of[0].least : of.of[0].most);
  for (const [text, what] of [[run.state === "silent" ? "no end" : run.state, run.state === "silent" ? "killed, or hangs" : "state"], [run.steps.toLocaleString("en-US"), "steps"], [duration(run.seconds), run.attempts > 1 ? `in ${run.attempts} attempts` : "duration"], [`${(100 * run.goodput).toFixed(1)}%`, "goodput: time for steps that count"], ...(found ? [[number(found[0]), `best ${of.name}, step ${number(found[1], 7)}`], [number(last(of, 0)), `last ${of.name}`]] : [])]) {
    const tile = add(tiles, "div");
    add(tile, "b", text, what === "state" && isBad(text) ? "state-bad" : "");
    add(tile, "span", what);
  }
}
function drawRuns() {
  const section = $("runs");
  section.replaceChildren();
  if (RUNS.length === 1) return drawTiles();
  const tools = add(section, "div", "", "tools");
  add(tools, "h2", "Runs");
  const input = add(add(tools, "label"), "input");
  Object.assign(input, { type: "search", id: "filter", value: state.filter, placeholder: "filter, such as lr<0.01 finished" });
  input.setAttribute("aria-label", "filter the runs: words, or a column with < > =");
  input.addEventListener("input", () => { state.filter = input.value; filter(); });
  if (DATA.curves.length > 1) {
    const label = add(tools, "label", "value "), choices = add(label, "select");
    DATA.curves.forEach(each => add(choices, "option", each.name).value = each.name);
    choices.value = state.metric || "";
    choices.onchange = () => { state.metric = choices.value; drawTable(); keep(); };
  }
  if (many) {
    const five = add(tools, "button", "best 5"), none = add(tools, "button", "none");
    five.onclick = () => { chosen.clear(); byBest().filter(run => shown[run]).slice(0, 5).forEach(pick); redraw(); };
    none.onclick = () => { chosen.clear(); redraw(); };
  }
  add(tools, "span", "", "faint").id = "count";
  add(section, "div", "", "wide").id = "table";
  drawTable();
}
function drawTable() {
  const wide = $("table"), head = columns();
  wide.replaceChildren();
  const table = add(wide, "table"), top = add(add(table, "thead"), "tr");
  const sort = state.sort || { key: TRIALS.size ? "value" : many ? "best" : "run", up: TRIALS.size || many ? (metric() ? metric().less : true) : true };
  for (const column of head) {
    const cell = add(top, "th", "", column.isNumber ? "number" : ""), button = add(cell, "button", column.title);
    if (sort.key === column.key) cell.setAttribute("aria-sort", sort.up ? "ascending" : "descending");
    button.onclick = () => { state.sort = { key: column.key, up: sort.key === column.key ? !sort.up : true }; drawTable(); keep(); };
  }
  const by = head.find(each => each.key === sort.key) || head[0];
  const value = run => { const own = by.of(run); return own === null || own === "" || (by.isNumber && Number.isNaN(Number(own))) ? null : own; };
  const order = [...RUNS.keys()].sort((a, b) => {
    const one = value(a), other = value(b);
    if (one === null || other === null) return (one === null) - (other === null) || a - b;
    return (by.isNumber || by.key === "goodput" ? one - other : compare(one, other)) * (sort.up ? 1 : -1) || a - b;
  });
  const body = add(table, "tbody");
  for (const run of order) {
    const row = add(body, "tr");
    row.dataset.run = run;
    row.onclick = () => choose(run);
    row.onmouseenter = () => hover(run);
    row.onmouseleave = () => hover(null);
    for (const column of head) {
      const own = column.of(run), cell = add(row, "td", "", column.isNumber ? "number" : "");
      if (column.key === "run") { const pick = add(cell, "button", "", "pick"); pick.title = RUNS[run].path; }
      else if (column.key === "goodput") { stack(cell, RUNS[run].time); cell.title = `${(100 * own).toFixed(1)}% of the time went to steps that count`; }
      else if (column.key === "state") { cell.textContent = own === "silent" ? "no end" : own; if (isBad(own)) cell.className = "state-bad"; cell.title = own === "silent" ? "killed, or it hangs" : TRIALS.get(run)?.failure || ""; }
      else cell.textContent = column.text ? column.text(own) : typeof own === "number" ? number(own) : own ?? "";
    }
  }
  filter(true);
}
function filter(isFirst) {
  shown = RUNS.map((_, run) => isMatch(run, state.filter));
  document.querySelectorAll("#runs tbody tr").forEach(row => { row.hidden = !shown[row.dataset.run]; });
  if ($("count")) $("count").textContent = state.filter ? `${shown.filter(Boolean).length} of ${RUNS.length}` : "";
  if (isFirst) markRows(); else redraw();
}
function markRows() {
  document.querySelectorAll("#runs tbody tr").forEach(row => {
    const run = Number(row.dataset.run), pick = row.querySelector(".pick");
    row.classList.toggle("chosen", chosen.has(run) && many);
    pick.replaceChildren();
    swatch(pick, chosen.has(run) || (scale && many) ? colourOf(run) : tone("band"), chosen.has(run) ? dash(run) : []);
    add(pick, "span", RUNS[run].name);
    pick.setAttribute("aria-pressed", chosen.has(run));
  });
}

// ---- A plain table, and the last, least and most of each value.
function table(parent, head, rows, numbers = []) {
  const made = add(add(parent, "div", "", "wide"), "table"), top = add(add(made, "thead"), "tr"), body = add(made, "tbody");
  head.forEach((each, place) => add(top, "th", each, numbers.includes(place) ? "number" : ""));
  for (const row of rows) { const line = add(body, "tr"); row.forEach((each, place) => add(line, "td", typeof each === "number" ? number(each, 6) : each ?? "", numbers.includes(place) ? "number" : /message|error/.test(head[place]) ? "text" : "")); }
  return made;
}
function drawValues() {
  if (many || !DATA.curves.length) return;
  const details = add($("curves"), "details");
  add(details, "summary", "values as a table");
  if (RUNS.length === 1) table(details, ["value", "last", "least", "at step", "most", "at step"], DATA.curves.map(({ name, of: [of] }) => [name, of.last, ...(of.least || ["", ""]), ...(of.most || ["", ""])]), [1, 2, 3, 4, 5]);
  else table(details, ["last value", ...RUNS.map(run => run.name)], DATA.curves.map(curve => [curve.name, ...RUNS.map((_, run) => last(curve, run))]), RUNS.map((_, run) => run + 1));
}

// ---- A search.
function panel(parent, title, kind, height, draw) {
  const card = add(parent, "article", "", `card ${kind}`);
  add(add(card, "div", "", "head"), "h3", title);
  const plot = add(card, "div", "", "plot"), canvas = add(plot, "canvas");
  if (height) plot.style.height = height;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", title);
  const note = add(card, "p", "", "note");
  const paint = () => {
    const { width, height } = plot.getBoundingClientRect(), ratio = devicePixelRatio || 1, pen = canvas.getContext("2d");
    canvas.width = width * ratio; canvas.height = height * ratio;
    pen.scale(ratio, ratio);
    pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    return draw(pen, width, height, note);
  };
  let marks = [];
  const again = () => { marks = paint() || []; };
  highlights.push(again);
  new ResizeObserver(again).observe(plot);
  const near = event => {
    const box = plot.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    const found = marks.map(mark => [mark.far ? mark.far(x, y) : Math.hypot(mark.x - x, mark.y - y), mark.run]).sort((a, b) => a[0] - b[0])[0];
    return found && found[0] < 20 ? found[1] : null;
  };
  plot.addEventListener("pointermove", event => hover(near(event)));
  plot.addEventListener("pointerleave", () => hover(null));
  plot.addEventListener("click", event => { const run = near(event); if (run !== null) choose(run); });
}
const searchPainters = [];
function drawSearches() { searchPainters.forEach(each => each()); }
function makeSearches() {
  for (const search of DATA.searches) {
    const section = add($("searches"), "div");
    const head = add(section, "h2", `Search ${search.directory} `);
    if (search.problem) { add(section, "p", search.problem, "faint"); continue; }
    const { trials, objectives: [objective], directions: [direction] } = search, counts = new Map();
    trials.forEach(each => counts.set(each.state, (counts.get(each.state) || 0) + 1));
    add(head, "small", [...counts].map(([name, count]) => `${count} ${name}`).join(" · "));
    const winners = trials.filter(each => search.best.includes(each.number));
    if (winners.length === 1) { const [it] = winners; add(section, "p", `Best: trial ${it.number}, ${objective} ${number(it.values[objective])}, with ${Object.entries(it.parameters).map(([name, value]) => `${name} ${shownSetting(value)}`).join(", ")}. ${it.run === null ? "This report is without its run." : `Its curves are among the ${many ? "chosen" : "drawn"} ones.`}`); if (many && !state.chosen && it.run !== null) pick(it.run); }
    else add(section, "p", winners.length ? `No other trial beats ${winners.length} trials in all objectives: ${winners.map(each => each.number).join(", ")}.` : "No trial is complete.");
    const grid = add(section, "div", "", "grid"), begin = highlights.length;
    parallel(grid, search, trials, objective, direction);
    for (const [place, name] of search.objectives.entries()) history(grid, search, trials, name, search.directions[place]);
    if (search.objectives.length > 1) pareto(grid, search, trials);
    for (const name of search.objectives) importance(grid, search, name);
    const failed = trials.filter(each => each.failure);
    if (failed.length) table(add(section, "details"), ["trial", "error"], failed.map(each => [each.number, each.failure]), [0]).closest("details").prepend(Object.assign(document.createElement("summary"), { textContent: `why ${plural(failed.length, "trial")} failed` }));
    searchPainters.push(...highlights.slice(begin));
  }
}
const shownSetting = value => typeof value === "number" ? number(value) : String(value);
const valueOf = (trial, name) => typeof trial.values[name] === "number" ? trial.values[name] : null;
function objectiveColour(trials, name, direction) {
  const values = trials.filter(each => each.state === "complete").map(each => valueOf(each, name)).filter(value => value !== null).sort((a, b) => a - b);
  const low = values[0], high = values[Math.floor((values.length - 1) * 0.9)];
  return value => { const part = high > low ? (value - low) / (high - low) : 0; const good = direction === "min" ? 1 - part : part; return viridis(isDark() ? good : 1 - good); };
}
function parallel(grid, search, trials, objective, direction) {
  const names = Object.keys(search.parameters), done = trials.filter(each => Object.keys(each.parameters).length && (each.state === "complete" || each.state === "pruned"));
  panel(grid, `All parameters of each trial, and ${objective}`, "large", "300px", (pen, width, height, note) => {
    if (!done.length) { note.textContent = "No trial has ended."; return []; }
    const colour = objectiveColour(trials, objective, direction), top = 26, bottom = height - 14, left = 46, right = width - 46;
    const axes = [...names, objective].map((name, place, all) => {
      const isObjective = place === all.length - 1, of = trial => isObjective ? (trial.state === "complete" ? valueOf(trial, name) : null) : trial.parameters[name];
      const values = done.map(of).filter(value => value !== null && value !== undefined), x = left + (right - left) * place / Math.max(1, all.length - 1);
      if (!values.length) return { name, x, of, y: () => null, ticks: [] };
      if (isObjective || (search.parameters[name] !== "choice" && values.every(value => typeof value === "number"))) {
        const isLog = isObjective ? Math.min(...values) > 0 && Math.max(...values) / Math.min(...values) > 20 : search.parameters[name] === "log", to = isLog ? Math.log10 : value => value;
        let [low, high] = range(values.map(value => [to(value), to(value)]));
        if (low === high) [low, high] = [low - 0.5, high + 0.5];
        const y = value => value === null || value === undefined ? null : bottom - (to(value) - low) / (high - low) * (bottom - top);
        const marks = (isLog ? logTicks : ticks)(low, high, 5).map(([at, text]) => [bottom - (at - low) / (high - low) * (bottom - top), text]);
        return { name, x, of, y, ticks: marks };
      }
      const kinds = [...new Set(values.map(String))].sort(compare), y = value => value === undefined || value === null && !kinds.includes("null") ? null : bottom - (kinds.indexOf(String(value)) + 0.5) / kinds.length * (bottom - top);
      return { name, x, of, y, ticks: kinds.slice(0, 12).map(kind => [bottom - (kinds.indexOf(kind) + 0.5) / kinds.length * (bottom - top), kind]) };
    });
    const path = trial => axes.map(axis => [axis.x, axis.y(axis.of(trial))]).filter(each => each[1] !== null);
    const stroke = (trial, strong) => {
      const isPruned = trial.state === "pruned", points = path(trial);
      pen.globalAlpha = strong ? 1 : isPruned ? 0.35 : 0.7; pen.lineWidth = strong ? 3 : 1.3; pen.setLineDash(isPruned ? [4, 4] : []);
      pen.strokeStyle = isPruned ? tone("band") : strong && hovered === trial.run && !chosen.has(trial.run) ? tone("ink") : colour(valueOf(trial, objective));
      pen.beginPath();
      points.forEach(([x, y], place) => { if (!place) return pen.moveTo(x, y); const [px, py] = points[place - 1], half = (px + x) / 2; pen.bezierCurveTo(half, py, half, y, x, y); });
      pen.stroke();
      pen.globalAlpha = 1; pen.setLineDash([]);
    };
    const visible = done.filter(each => each.run === null || shown[each.run]);
    const rank = trial => valueOf(trial, objective) === null || trial.state === "pruned" ? -Infinity : (direction === "min" ? -1 : 1) * valueOf(trial, objective);
    visible.sort((a, b) => rank(a) - rank(b)).forEach(each => stroke(each, search.best.includes(each.number)));
    visible.filter(each => each.run !== null && each.run === hovered).forEach(each => stroke(each, true));
    pen.textBaseline = "middle";
    for (const axis of axes) {
      pen.strokeStyle = tone("faint"); pen.lineWidth = 1;
      pen.beginPath(); pen.moveTo(axis.x, top); pen.lineTo(axis.x, bottom); pen.stroke();
      const isLast = axis === axes[axes.length - 1], isFirst = axis === axes[0];
      pen.textAlign = isFirst ? "left" : isLast ? "right" : "center";
      pen.fillStyle = tone("ink"); pen.font = pen.font.replace(/^(600 )?/, "600 ");
      pen.fillText(fit(pen, axis.name, (right - left) / Math.max(1, axes.length - 1) - 10), isFirst ? axis.x - 42 : isLast ? axis.x + 42 : axis.x, 9);
      pen.font = pen.font.replace(/^600 /, ""); pen.fillStyle = tone("ink"); pen.textAlign = isLast ? "left" : "right";
      for (const [y, text] of axis.ticks) { pen.lineWidth = 3; pen.strokeStyle = tone("card"); pen.strokeText(fit(pen, text, 60), axis.x + (isLast ? 5 : -5), y); pen.fillText(fit(pen, text, 60), axis.x + (isLast ? 5 : -5), y); }
    }
    const pruned = done.filter(each => each.state === "pruned").length;
    note.textContent = `The ${isDark() ? "brightest" : "darkest"} line is the best${pruned ? `; ${plural(pruned, "pruned trial")}, dashed` : ""}.`;
    return visible.filter(each => each.run !== null).map(trial => { const points = path(trial); return { run: trial.run, far: (x, y) => { for (let place = 1; place < points.length; place++) { const [px, py] = points[place - 1], [qx, qy] = points[place]; if (x >= px && x <= qx) { const part = (x - px) / (qx - px || 1), smooth = part * part * (3 - 2 * part); return Math.abs(py + (qy - py) * smooth - y); } } return Infinity; } }; });
  });
}
function fit(pen, text, most) {
  if (pen.measureText(text).width <= most) return text;
  let end = text.length;
  while (end > 1 && pen.measureText(`${text.slice(0, end)}…`).width > most) end--;
  return `${text.slice(0, end)}…`;
}
// Points on two axes: { x, y, run, mark }. A mark is "dot", "cross" (pruned) or "tick" (failed, at the foot).
function scatter(pen, width, height, points, names, logs, line) {
  const numbers = points.filter(each => each.y !== null), xs = range(points.map(each => [each.x, each.x])), to = [logs[0] ? Math.log10 : v => v, logs[1] ? Math.log10 : v => v];
  let ys = range(numbers.map(each => [to[1](each.y), to[1](each.y)]));
  if (!xs || !ys) return [];
  if (ys[0] === ys[1]) ys = [ys[0] - (Math.abs(ys[0]) * 0.1 || 1), ys[1] + (Math.abs(ys[1]) * 0.1 || 1)];
  ys = [ys[0] - (ys[1] - ys[0]) * 0.06, ys[1] + (ys[1] - ys[0]) * 0.06];
  const wide = [xs[0] - (xs[1] - xs[0] || 1) * 0.02, xs[1] + (xs[1] - xs[0] || 1) * 0.02], top = 8, bottom = height - 20, right = width - 8;
  const yticks = (logs[1] ? logTicks : ticks)(ys[0], ys[1], Math.floor(height / 36)), left = Math.max(24, ...yticks.map(each => pen.measureText(each[1]).width)) + 8;
  const X = value => left + (value - wide[0]) / (wide[1] - wide[0]) * (right - left), Y = value => bottom - (to[1](value) - ys[0]) / (ys[1] - ys[0]) * (bottom - top);
  pen.fillStyle = tone("faint"); pen.strokeStyle = tone("grid"); pen.textAlign = "right"; pen.textBaseline = "middle"; pen.lineWidth = 1;
  for (const [at, text] of yticks) { const y = Math.round(bottom - (at - ys[0]) / (ys[1] - ys[0]) * (bottom - top)) + 0.5; pen.beginPath(); pen.moveTo(left, y); pen.lineTo(right, y); pen.stroke(); pen.fillText(text, left - 6, y); }
  pen.textBaseline = "alphabetic";
  pen.fillText(names[0], right, height - 4);
  pen.textAlign = "center";
  for (const [at, text] of ticks(...wide, Math.floor((right - left) / 75))) if (X(at) > left && X(at) + 20 < right - pen.measureText(names[0]).width - 6) pen.fillText(text, X(at), height - 4);
  if (line) { pen.strokeStyle = tone("accent"); pen.lineWidth = 1.6; pen.beginPath(); line.forEach(([x, y], place) => { if (place) pen.lineTo(X(x), Y(line[place - 1][1])); pen[place ? "lineTo" : "moveTo"](X(x), Y(y)); }); if (line.length) pen.lineTo(X(xs[1]), Y(line[line.length - 1][1])); pen.stroke(); }
  const marks = points.map(each => ({ ...each, x: X(each.x), y: each.y === null ? bottom - 4 : Y(each.y) }));
  for (const { x, y, mark, colour, run } of marks) {
    const size = run !== null && run === hovered ? 6 : 3.5;
    pen.fillStyle = pen.strokeStyle = colour; pen.lineWidth = 1.5;
    pen.beginPath();
    if (mark === "dot") { pen.arc(x, y, size, 0, 7); pen.fill(); }
    else if (mark === "cross") { pen.moveTo(x - size, y - size); pen.lineTo(x + size, y + size); pen.moveTo(x + size, y - size); pen.lineTo(x - size, y + size); pen.stroke(); }
    else { pen.moveTo(x, y - size); pen.lineTo(x, y + size); pen.stroke(); }
  }
  return marks.filter(each => each.run !== null);
}
function history(grid, search, trials, name, direction) {
  panel(grid, `${name} by trial`, "", "", (pen, width, height, note) => {
    const better = (a, b) => direction === "min" ? a < b : a > b, line = [];
    const points = trials.filter(each => each.run === null || shown[each.run]).map(trial => {
      const curve = CURVES.get(name), value = trial.state === "complete" ? valueOf(trial, name) : trial.state === "pruned" && trial.run !== null ? Number(last(curve, trial.run) ?? NaN) : null;
      if (trial.state === "complete" && value !== null && (!line.length || better(value, line[line.length - 1][1]))) line.push([trial.number, value]);
      return { x: trial.number, y: Number.isFinite(value) ? value : null, run: trial.run, mark: { complete: "dot", pruned: "cross" }[trial.state] || "tick", colour: trial.state === "complete" ? (search.best.includes(trial.number) ? tone("bad") : tone("accent")) : trial.state === "pruned" ? tone("band") : tone("bad") };
    });
    const values = points.map(each => each.y).filter(each => each !== null), isLog = Math.min(...values) > 0 && Math.max(...values) / Math.min(...values) > 20;
    note.textContent = values.length ? "The line is the best so far; a cross is a pruned trial, a tick at the foot a failed one." : "No trial has a value.";
    return scatter(pen, width, height, points, ["trial", name], [false, isLog], line);
  });
}
function pareto(grid, search, trials) {
  const [one, other] = search.objectives;
  panel(grid, `${other} over ${one}`, "", "", (pen, width, height, note) => {
    note.textContent = "No trial beats the orange ones in all objectives.";
    const points = trials.filter(each => each.state === "complete" && (each.run === null || shown[each.run])).map(trial => ({ x: valueOf(trial, one), y: valueOf(trial, other), run: trial.run, mark: "dot", colour: search.best.includes(trial.number) ? tone("bad") : tone("band") })).filter(each => each.x !== null);
    return scatter(pen, width, height, points, [one, other], [false, false]);
  });
}
function importance(grid, search, name) {
  const card = add(grid, "article", "", "card"), found = Object.entries(search.importances[name] || {});
  add(add(card, "div", "", "head"), "h3", `Which parameters matter for ${name}`);
  if (!found.length) { add(card, "p", "Unknown: too few trials are complete.", "faint"); return; }
  const bars = add(card, "div", "", "bars");
  for (const [parameter, share] of found) {
    add(bars, "span", parameter);
    add(bars, "i").style.width = `${100 * share / found[0][1]}%`;
    add(bars, "span", `${(100 * share).toFixed(1)}%`);
  }
}

// ---- Time, messages, settings.
function drawTime() {
  const section = $("time");
  section.replaceChildren();
  add(section, "h2", "Where the time went");
  const kinds = add(section, "div", "", "kinds"), sums = DATA.kinds.map((_, kind) => RUNS.reduce((sum, run, place) => sum + (shown[place] ? run.time[kind] : 0), 0));
  DATA.kinds.forEach((kind, place) => { if (sums[place] <= 0) return; const key = add(kinds, "span"); add(key, "i").style.background = kindColour(place); key.append(kind); });
  const wide = add(section, "div", "", "wide"), body = add(add(wide, "table"), "tbody");
  const row = (name, seconds) => { const line = add(body, "tr"); add(line, "td", name); const cell = add(line, "td"); cell.style.width = "70%"; stack(cell, seconds, "stack tall"); add(line, "td", duration(seconds.reduce((sum, each) => sum + each, 0)), "number"); };
  if (RUNS.length > 1) row(`all ${shown.filter(Boolean).length} runs`, sums);
  RUNS.forEach((run, place) => { if (shown[place] && (!many || chosen.has(place))) row(run.name, run.time); });
}
function drawMessages() {
  const section = $("messages"), groups = new Map(); // a sweep has one warning in each of its runs
  for (const run of RUNS) for (const [attempt, kind, text] of run.messages) {
    const key = JSON.stringify([kind, text]), where = RUNS.length === 1 ? `attempt ${attempt}` : run.attempts > 1 ? `${run.name}, attempt ${attempt}` : run.name;
    groups.set(key, [...(groups.get(key) || []), where]);
  }
  const rows = [...groups].map(([key, where]) => [where.length > 3 ? `${where[0]} and ${where.length - 1} more` : where.join(", "), ...JSON.parse(key)]);
  add(section, "h2", "Warnings and failures");
  if (!rows.length) add(section, "p", "None was recorded.", "faint");
  else table(section, ["where", "kind", "message"], rows);
}
function drawSettings() {
  const section = $("settings"), isOne = RUNS.length === 1;
  add(section, "h2", isOne ? "Settings" : "Settings that differ");
  if (DATA.unknown.length) add(section, "p", isOne ? "They are unknown: no logger wrote config.json." : `Unknown, because no logger wrote config.json: ${DATA.unknown.slice(0, 12).join(", ")}${DATA.unknown.length > 12 ? ", ..." : ""}`, "faint");
  if (!DATA.settings.length) { if (!DATA.unknown.length) add(section, "p", "None: the runs have the same.", "faint"); return; }
  if (isOne) { const details = add(section, "details"); add(details, "summary", plural(DATA.settings.length, "setting")); table(details, ["setting", "value"], DATA.settings.map(each => [each.name, each.of[0]])); }
  else if (many) table(section, ["setting", "different values", "such as"], DATA.settings.map(each => { const values = [...new Set(each.of)].sort(compare); return [each.name, values.length, values.slice(0, 6).join(", ") + (values.length > 6 ? ", ..." : "")]; }), [1]);
  else table(section, ["setting", ...RUNS.map(run => run.name)], DATA.settings.map(each => [each.name, ...each.of]));
}

// ---- Pictures, tables, texts and sounds.
function drawMedia() {
  const section = $("media"), names = new Map();
  section.replaceChildren();
  add(section, "h2", "Pictures, tables, texts and sounds");
  if (!DATA.media.length) { add(section, "p", "The run's directory has none; the logger \"tensorboard\" writes them there.", "faint"); return; }
  for (const each of DATA.media) names.set(each.name, [...(names.get(each.name) || []), each]);
  if (DATA.mediaLeftOut) add(section, "p", `${plural(DATA.mediaLeftOut, "value")} left out: there was no room on the page.`, "faint");
  const grid = add(section, "div", "", "grid");
  for (const [name, of] of names) {
    const card = add(grid, "article", "", `card${of[0].kind === "table" || of.length > 2 ? " large" : ""}`);
    add(add(card, "div", "", "head"), "h3", name);
    const wanted = of.filter(each => shown[each.run] && chosen.has(each.run)).slice(0, FEW);
    if (!wanted.length) { add(card, "p", "Choose a run that has logged it.", "faint"); continue; }
    const steps = [...new Set(wanted.flatMap(each => each.items.map(item => item.step)))].sort((a, b) => a - b);
    const bar = add(card, "div", "", "steps"), label = add(bar, "span"), box = add(card, "div", "", "media");
    const draw = place => {
      const step = steps[place];
      label.textContent = `step ${number(step, 7)}`;
      box.replaceChildren();
      for (const each of wanted) {
        const item = each.items.filter(one => one.step <= step).pop();
        if (!item) continue;
        const figure = add(box, "figure");
        show(figure, each.kind, item, name);
        const caption = add(figure, "figcaption");
        if (RUNS.length > 1) { swatch(caption, colourOf(each.run), dash(each.run)); caption.append(RUNS[each.run].name); }
        const notes = [item.step === step ? "" : `step ${number(item.step, 7)}`, item.size ? `${item.size.join(" × ")} pixels, made smaller` : "", item.more ? `the first of ${item.more}` : "", each.steps > each.items.length ? `${each.items.length} of ${each.steps} steps are here` : ""].filter(Boolean);
        if (notes.length) add(caption, "span", notes.join(" · "));
      }
    };
    let place = steps.length - 1;
    if (steps.length > 1) {
      const input = add(bar, "input");
      place = Math.min(place, state.steps[name] ?? place);
      Object.assign(input, { type: "range", min: 0, max: steps.length - 1, value: place });
      input.setAttribute("aria-label", `step of ${name}`);
      input.addEventListener("input", () => { state.steps[name] = Number(input.value); draw(Number(input.value)); keep(); });
      add(bar, "span", `of ${plural(steps.length, "step")}`);
    }
    draw(place);
  }
}
function show(figure, kind, item, name) {
  if (item.left) add(figure, "p", item.left, "faint");
  else if (item.rows) table(figure, item.columns, item.rows);
  else if (item.text !== undefined) add(figure, "pre", item.text);
  else if (kind === "audio") { const sound = add(figure, "audio"); sound.controls = true; sound.src = item.src; }
  else {
    const picture = add(figure, "img");
    picture.alt = `${name}, step ${item.step}`;
    picture.onload = () => picture.classList.toggle("small", picture.naturalWidth < 128);
    picture.src = item.src;
  }
}

drawFacts();
drawRuns();
makeScale();
makeSearches();
drawCurves();
drawBar();
drawValues();
drawMessages();
drawSettings();
select();
redraw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
addEventListener("scroll", () => { clearTimeout(keep.later); keep.later = setTimeout(keep, 200); }, { passive: true });
if (state.scroll) scrollTo(0, state.scroll);
// A run under way: the page loads itself again, but not while it is in use or out of sight.
const isUsed = () => charts.some(each => each.drag) || document.activeElement.matches("input[type=search], select") || [...document.querySelectorAll("audio")].some(each => !each.paused);
if (DATA.refresh) setInterval(() => { if (document.visibilityState === "visible" && !isUsed()) { keep(); location.reload(); } }, DATA.refresh * 1000);
