"use strict";
// Tables to sort and filter, and charts. Texts of records reach the page by textContent alone.

const PAGE_ROWS = 200;
const COLOURS = ["#1f77d0", "#d55e00", "#00896a", "#b8558b", "#a87900", "#7a62d3", "#2a93b8", "#7d7d7d"];
const SHAPES = ["circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "triangle-right", "triangle-left"];

function element(tag, fields = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(fields)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// ---- what is wider than the page says so

for (const region of document.querySelectorAll(".scroll")) {
  const hint = element("p", { class: "hint", hidden: true }, "more to the right: scroll →");
  region.after(hint);
  const show = () => {
    const more = region.scrollLeft + region.clientWidth < region.scrollWidth - 2;
    region.classList.toggle("more", more);
    hint.hidden = !more;
  };
  region.addEventListener("scroll", show, { passive: true });
  const watched = new ResizeObserver(show);
  watched.observe(region);
  for (const table of region.children) watched.observe(table);
}

// ---- sorting: numbers before texts, nothing last

function compareKeys(a, b) {
  const absent = (value) => value === null || value === undefined || value === "" || value === "–";
  if (absent(a) || absent(b)) return absent(a) - absent(b);
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

function sortRows(rows, keyOf, direction) {
  const absent = (row) => [null, undefined, "", "–"].includes(keyOf(row));
  return [...rows].sort((a, b) => (absent(a) || absent(b) ? absent(a) - absent(b) : direction * compareKeys(keyOf(a), keyOf(b))));
}

function headings(cells, sorted) {
  // A second click reverses the order.
  const state = { cell: null, direction: 1 };
  cells.forEach((cell, index) => {
    const button = element("button", { type: "button", onclick: () => {
      state.direction = state.cell === cell ? -state.direction : 1;
      state.cell = cell;
      cells.forEach((other) => other.removeAttribute("aria-sort"));
      cell.setAttribute("aria-sort", state.direction > 0 ? "ascending" : "descending");
      sorted(index, state.direction);
    } }, ...cell.childNodes);
    cell.replaceChildren(button);
  });
}

// A figure with its unit, as the tables print it: "12.3 ms", "1.5M", "64.0 MiB".
const UNITS = { ns: 1e-9, "µs": 1e-6, ms: 1e-3, s: 1, B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40, k: 1e3, K: 1024, M: 1e6, G: 1e9, "%": 0.01, x: 1, "": 1 };
function keyOfText(text) {
  const found = /^(-?[\d.]+)\s*(ns|µs|ms|s|[KMGT]iB|B|[kKMG]|%|x)?(?![\w.])/.exec(text);
  return found ? Number(found[1]) * UNITS[found[2] || ""] : text;
}

for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  headings([...table.tHead.rows[0].cells], (index, direction) => {
    body.append(...sortRows([...body.rows], (row) => keyOfText(row.cells[index].textContent), direction));
  });
}

// ---- charts

const charts = typeof vegaEmbed === "function";
const CONFIG = {
  background: "transparent",
  font: "system-ui, sans-serif",
  view: { stroke: null },
  axis: { labelColor: "currentColor", titleColor: "currentColor", domainColor: "currentColor", tickColor: "currentColor", gridColor: "currentColor", gridOpacity: 0.14, labelFontSize: 12, titleFontSize: 12, titleFontWeight: 500, labelOverlap: "parity" },
  legend: { labelColor: "currentColor", titleColor: "currentColor", labelFontSize: 12, labelLimit: 420, symbolSize: 90, symbolOpacity: 1, orient: "bottom", direction: "vertical", title: null },
  text: { color: "currentColor" },
};

function draw(target, spec) {
  if (!charts) return;
  const full = { $schema: "https://vega.github.io/schema/vega-lite/v6.json", width: "container", config: CONFIG, ...spec };
  vegaEmbed(target, full, { actions: false, renderer: "svg", ast: false }).catch((error) => console.error(error));
}

// A page may hold many charts: those near the window are drawn first, the others one by one while nothing else is done,
// and all of them before the page is printed.
const waiting = new Set();
const nearby = "IntersectionObserver" in window ? new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) drawNow(entry.target);
}, { rootMargin: "600px" }) : null;
const whenIdle = window.requestIdleCallback ? (next) => window.requestIdleCallback(next) : (next) => setTimeout(next, 50);

function drawNow(target) {
  if (!waiting.delete(target)) return;
  if (nearby) nearby.unobserve(target);
  target.drawChart();
}

function drawNext() {
  // What is hidden has no width yet.
  const next = [...waiting].find((target) => target.clientWidth > 0);
  if (next) { drawNow(next); whenIdle(drawNext); }
}

function whenNear(target, drawChart) {
  target.drawChart = drawChart;
  waiting.add(target);
  if (nearby) nearby.observe(target); else drawNow(target);
}

window.addEventListener("load", () => whenIdle(drawNext));
window.addEventListener("beforeprint", () => [...waiting].forEach(drawNow));

function lengthText(n) {
  for (const [unit, size] of [["G", 2 ** 30], ["M", 2 ** 20], ["K", 2 ** 10]]) if (n >= size && n % (size / 4) === 0) return n / size + unit;
  return String(n);
}

// Plain numbers where they are short: 0.05, 12, 5,000, 20k, 1.5M.
const VALUE = "datum.value >= 10000 ? format(datum.value, '~s') : format(datum.value, ',~r')";

// Powers of ten over many decades, with 2 and 5 between them over few.
function decades(low, high) {
  const values = [], steps = high / low < 1e3 ? [1, 2, 5] : [1];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
    for (const step of steps) values.push(step * 10 ** power);
  return values.filter((value) => value >= low / 1.5 && value <= high * 1.5);
}

const isLength = (title) => title.startsWith("sequence length");

// A legend of more would be longer than the chart; the tooltips name every row.
const MOST_NAMED = 24;

// One colour and one mark for a series in all charts of the page, in the order of the page's data; no two of the first
// 64 share both.
const looks = new Map();
function lookOf(label) {
  const name = label.replace(" (yardstick: another function)", "");
  if (!looks.has(name)) looks.set(name, looks.size);
  const index = looks.get(name);
  return { colour: COLOURS[index % COLOURS.length], shape: SHAPES[(index + Math.floor(index / COLOURS.length)) % SHAPES.length] };
}

function scaled(labels) {
  const legend = labels.length > 1 && labels.length <= MOST_NAMED ? {} : null;
  const chosen = labels.map(lookOf);
  return {
    color: { field: "series", type: "nominal", scale: { domain: labels, range: chosen.map((look) => look.colour) }, legend },
    shape: { field: "series", type: "nominal", scale: { domain: labels, range: chosen.map((look) => look.shape) }, legend },
  };
}

// points: {x, y, lo, hi, series, fitted}
function curves({ points, xTitle, yTitle, joined = true, unit = "", linearX = false, spans = [], spanLabel = "" }) {
  const labels = [...new Set(points.map((point) => point.series))];
  const xs = [...new Set(points.map((point) => point.x))].sort((a, b) => a - b);
  const shown = xs.filter((_, index) => (xs.length - 1 - index) % Math.ceil(xs.length / 10) === 0);
  const lengths = isLength(xTitle);
  const axis = lengths ? { values: shown, labelExpr: "datum.value >= 1073741824 && datum.value % 268435456 == 0 ? datum.value / 1073741824 + 'G' : datum.value >= 1048576 && datum.value % 262144 == 0 ? datum.value / 1048576 + 'M' : datum.value >= 1024 && datum.value % 256 == 0 ? datum.value / 1024 + 'K' : format(datum.value, ',')", labelOverlap: "greedy" } : points.every((point) => Number.isInteger(point.x)) ? { format: "d", values: shown, labelOverlap: "greedy" } : {};
  const positive = points.every((point) => point.x > 0 && point.y > 0);
  const span = (values) => Math.max(...values) / Math.min(...values);
  const logX = positive && !linearX && span(xs) > 3, logY = positive && span(points.map((point) => point.y)) > 3;
  const scale = (log) => (log ? { type: "log" } : { type: "linear", zero: false });
  const x = { field: "x", type: "quantitative", title: xTitle, scale: { ...scale(logX), nice: false, padding: 14 }, axis };
  const ends = points.flatMap((point) => [point.y, point.lo ?? point.y, point.hi ?? point.y]);
  const y = { field: "y", type: "quantitative", title: yTitle, scale: { ...scale(logY), nice: !logY, padding: 8 }, axis: { labelExpr: VALUE, tickCount: 6, ...(logY ? { values: decades(Math.min(...ends), Math.max(...ends)) } : {}) } };
  const tooltip = [{ field: "series", title: "row" }, { field: "x", title: xTitle, format: "," }, { field: "y", title: yTitle, format: ",.4~g" }, { field: "lo", title: "from", format: ",.4~g" }, { field: "hi", title: "to", format: ",.4~g" }];
  const measured = points.filter((point) => !point.fitted), fitted = points.filter((point) => point.fitted);
  const ranged = measured.filter((point) => point.lo !== null && point.lo !== undefined);
  const { color, shape } = scaled(labels);
  const layers = marksOfSpans(spans, spanLabel, x);
  if (fitted.length) layers.push({ data: { values: fitted }, mark: { type: "line", strokeDash: [5, 4], strokeWidth: 1.5 }, encoding: { x, y, color } });
  if (joined && !fitted.length) layers.push({ data: { values: measured }, mark: { type: "line", strokeWidth: 1.8 }, encoding: { x, y, color } });
  if (ranged.length) layers.push({ data: { values: ranged }, mark: { type: "rule", strokeWidth: 2, opacity: 0.7 }, encoding: { x, y: { ...y, field: "lo" }, y2: { field: "hi" }, color } });
  layers.push({ data: { values: measured }, mark: { type: "point", filled: true, size: 55, opacity: 1 }, encoding: { x, y, color, shape, tooltip } });
  return { height: 340, layer: layers };
}

// A line between neighbouring spans of x, and along the top what holds in each.
function marksOfSpans(spans, label, x) {
  if (!spans.length) return [];
  const borders = spans.slice(1).map((span, index) => ({ x: Math.sqrt(spans[index].last * span.first) }));
  const texts = spans.map((span, index) => ({ x: Math.sqrt(span.first * span.last), text: index ? span.text : `${label} ${span.text}` }));
  return [
    { data: { values: borders }, mark: { type: "rule", color: "currentColor", opacity: 0.4, strokeDash: [2, 3] }, encoding: { x } },
    { data: { values: texts }, mark: { type: "text", color: "currentColor", opacity: 0.8, fontSize: 10, baseline: "bottom" }, encoding: { x, y: { value: -3 }, text: { field: "text" } } },
  ];
}

// bars: {category, series, y, lo, hi}. Bars need a linear axis: on a logarithmic one their lengths have no meaning.
function bars({ values, title, reference = null, stacked = false, order = null }) {
  const labels = [...new Set(values.map((value) => value.series))];
  const { color } = scaled(labels);
  const categories = order || [...new Set(values.map((value) => value.category))];
  const y = { field: "category", type: "nominal", sort: categories, title: null, axis: { labelLimit: Math.min(360, window.innerWidth * 0.42), ticks: false, domain: false, labelExpr: "split(datum.label, '\\n')" } };
  const grouped = !stacked && labels.length > 1;
  // The gaps between the bars of a group are the scale's: a height in shares of a band would move each bar by a share of
  // the whole group, away from its interval.
  const offset = grouped ? { yOffset: { field: "series", type: "nominal", sort: labels, scale: { paddingInner: 0.18, paddingOuter: 0.09 } } } : {};
  const x = { field: "y", type: "quantitative", title, axis: { tickCount: 6, labelExpr: VALUE }, stack: stacked ? "zero" : null };
  const tooltip = [{ field: "category", title: "what" }, { field: "series", title: "row" }, { field: "y", title, format: ",.4~g" }, { field: "lo", title: "from", format: ",.4~g" }, { field: "hi", title: "to", format: ",.4~g" }];
  const start = reference === null ? {} : { x2: { datum: reference } };
  const ranged = values.filter((value) => value.lo !== null && value.lo !== undefined);
  const layers = [{ data: { values }, mark: grouped ? "bar" : { type: "bar", height: { band: 0.82 } }, encoding: { y, ...offset, x, ...start, color, tooltip } }];
  if (ranged.length && !stacked) layers.push({ data: { values: ranged }, mark: { type: "rule", strokeWidth: 2, color: "currentColor" }, encoding: { y, ...offset, x: { ...x, field: "lo" }, x2: { field: "hi" } } });
  if (reference !== null) layers.push({ data: { values: [{ at: reference }] }, mark: { type: "rule", color: "currentColor" }, encoding: { x: { field: "at", type: "quantitative" } } });
  const lines = Math.max(...categories.map((category) => category.split("\n").length), 1);
  const each = Math.max(grouped ? 14 * labels.length + 12 : 24, 14 * lines + 6);
  return { height: Math.max(40, each * categories.length), layer: layers };
}

function ofPlot(plot) {
  if (plot.kind === "curves") {
    const points = plot.curves.flatMap((curve) => curve.points.map((point) => ({ x: point.x, y: point.y, lo: point.low, hi: point.high, series: curve.label, fitted: curve.fitted })));
    return curves({ points, xTitle: plot.x_label, yTitle: plot.y_label, linearX: plot.linear_x, spans: plot.spans, spanLabel: plot.span_label });
  }
  const values = plot.bars.flatMap((bar) => plot.categories.map((category, index) => ({ category, series: bar.label, y: bar.values[index], lo: bar.low[index] ?? null, hi: bar.high[index] ?? null })));
  return bars({ values: values.filter((value) => value.y !== null), title: plot.value_label, reference: plot.reference, stacked: plot.stacked, order: plot.categories });
}

// ---- rows

const holder = document.getElementById("data");
if (holder) report(JSON.parse(holder.textContent));

function report(data) {
  // Before any chart is drawn, for they are drawn in any order.
  for (const plot of Object.values(data.plots)) for (const part of plot.curves || plot.bars) lookOf(part.label);
  for (const target of document.querySelectorAll("[data-plot]")) whenNear(target, () => draw(target, ofPlot(data.plots[target.dataset.plot])));
  if (!data.rows) return;
  rowTable(data);
  if (charts) explorer(data);
}

function choice(label, options, changed, every = null) {
  const select = element("select", { onchange: changed }, ...(every === null ? [] : [element("option", { value: "" }, every)]), ...options.map(([value, text]) => element("option", { value }, text)));
  return [element("label", {}, label, select), select];
}

function rowTable(data) {
  const { rows, workloads, texts, columns } = data;
  const families = [...new Set(workloads.map((one) => one.family))];
  const text = (index) => (row) => row.c[index];
  const at = Object.fromEntries(columns.map((name, index) => [name, index]));
  const keys = { median: "m", "95 % CI": "lo", "tok/s": "tps", "TFLOP/s": "tf", "peak mem.": "p" };
  const shown = [
    { name: "implementation", text: text(at.implementation) },
    { name: "backend", whole: true, text: text(at.backend) },
    ...(families.length > 1 ? [{ name: "workload", wide: true, text: (row) => workloads[row.w].family }] : []),
    { name: "length", number: true, text: (row) => lengthText(workloads[row.w].n), key: (row) => workloads[row.w].n },
    { name: "batch", number: true, text: (row) => String(workloads[row.w].batch), key: (row) => workloads[row.w].batch },
    ...columns.slice(2).filter((name) => !["verified", "timer"].includes(name)).map((name) => ({
      name, number: true, text: text(at[name]),
      key: keys[name] ? (row) => row[keys[name]] ?? null : (row) => keyOfText(row.c[at[name]]),
    })),
    ...["verified", "timer"].filter((name) => name in at).map((name) => ({ name, whole: name === "timer", text: text(at[name]) })),
  ];
  const table = document.getElementById("row-table"), body = element("tbody");
  const cells = shown.map((column) => element("th", { scope: "col", class: column.number ? "number" : null }, column.name));
  table.replaceChildren(element("thead", {}, element("tr", {}, element("th", { scope: "col" }, element("span", { class: "soft" }, "more")), ...cells)), body);
  const state = { order: rows, all: false, column: null, direction: 1 };

  const search = element("input", { type: "search", id: "row-search", placeholder: "gather 4K …", oninput: show });
  const [whichOne, implementation] = choice("implementation", unique(rows.map((row) => texts[row.i])), show, "all");
  const [whichBackend, backend] = choice("backend", unique(rows.map((row) => row.c[at.backend].replace("*", ""))), show, "all");
  const [whichStatus, status] = choice("outcome", unique(rows.map((row) => row.s)), show, "all");
  const [whichFamily, family] = choice("workload", families.map((one) => [one, one]), show, "all");
  status.id = "row-status"; implementation.id = "row-implementation";
  document.getElementById("row-tools").append(element("label", {}, "search", search), whichOne, whichBackend, whichStatus, ...(families.length > 1 ? [whichFamily] : []));
  const more = document.getElementById("row-all");
  more.addEventListener("click", () => { state.all = true; show(); });
  headings(cells, (index, direction) => {
    const column = shown[index];
    state.order = sortRows(rows, column.key || column.text, direction);
    show();
  });
  const searched = new Map();
  show();

  function unique(values) { return [...new Set(values)].sort((a, b) => a.localeCompare(b)).map((value) => [value, value]); }

  function haystack(row) {
    if (!searched.has(row)) searched.set(row, [...shown.map((column) => column.text(row)), workloads[row.w].title, row.s].join(" ").toLowerCase());
    return searched.get(row);
  }

  function fits(row, words) {
    if (implementation.value && texts[row.i] !== implementation.value) return false;
    if (backend.value && row.c[at.backend].replace("*", "") !== backend.value) return false;
    if (status.value && row.s !== status.value) return false;
    if (family.value && workloads[row.w].family !== family.value) return false;
    return words.every((word) => haystack(row).includes(word));
  }

  function show() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = state.order.filter((row) => fits(row, words));
    const part = state.all ? found : found.slice(0, PAGE_ROWS);
    body.replaceChildren(...part.map(line));
    more.hidden = part.length === found.length;
    more.textContent = `Show all ${found.length} rows`;
    document.getElementById("row-count").textContent = `${found.length} of ${rows.length} rows` + (part.length < found.length ? `, the first ${part.length} shown` : "");
  }

  function line(row) {
    const kind = row.s === "measured" ? (row.best ? "best" : "") : row.s;
    const button = element("button", { type: "button", class: "more", "aria-expanded": "false", "aria-label": `Details of ${row.c[0]} at ${workloads[row.w].title}` }, "▸");
    const made = element("tr", { class: kind || null }, element("td", {}, button), ...shown.map((column) => element("td", { class: column.number ? "number" : column.whole ? "whole" : column.wide ? "wide" : null }, column.text(row))));
    button.addEventListener("click", () => {
      const open = button.getAttribute("aria-expanded") === "true";
      button.setAttribute("aria-expanded", String(!open));
      button.textContent = open ? "▸" : "▾";
      if (open) made.nextSibling.remove();
      else made.after(element("tr", { class: "detail" }, element("td", { colspan: shown.length + 1 }, details(row))));
    });
    return made;
  }

  function details(row) {
    const d = row.d, box = element("div", { class: "detail-body" });
    box.append(element("p", {}, element("strong", {}, row.c[0] + (row.c[1] === "–" ? "" : " over " + row.c[1].replace("*", ""))), ` · ${workloads[row.w].title}`));
    if (d.why !== undefined) box.append(element("p", {}, `${row.s}${d.stage ? " at " + d.stage : ""} (${d.code}): ${texts[d.why]}`));
    for (const check of d.checks || []) box.append(element("p", {}, check));
    for (const note of d.notes || []) box.append(element("p", {}, "Note: " + texts[note]));
    if (row.cmd !== undefined) {
      const command = `${data.command} ${texts[row.cmd]} ${texts[row.args]}`;
      box.append(element("p", { class: "soft" }, "Measure this row again:"), element("pre", { class: "wrap" }, command));
    }
    const facts = [...(d.facts || []), ...(d.labels || [])];
    if (facts.length) box.append(element("dl", {}, ...facts.flatMap(([name, value]) => [element("dt", {}, texts[name]), element("dd", {}, texts[value])])));
    if (d.traceback !== undefined) box.append(element("pre", {}, texts[d.traceback]));
    if (row.t && charts) {
      const target = element("div", { class: "chart", role: "img", "aria-label": "Raw samples in the order taken" });
      box.append(element("p", { class: "soft" }, data.samples === "all" ? "Raw samples, in the order taken:" : "The median of each slot, in the order taken (every sample: dilabench report RUN -f csv --samples):"), target);
      // Its width is that of the page, which it has only when it is on it.
      requestAnimationFrame(() => draw(target, samplesOf(row)));
    }
    return box;
  }
}

function samplesOf(row) {
  const points = [], states = [];
  let index = 0;
  row.t.forEach(([session, samples, clock, power], turn) => {
    for (const sample of samples) points.push({ at: ++index, ms: sample / 1e6, session: `session ${session + 1}`, turn: turn + 1 });
    if (clock) states.push({ at: index, value: clock, what: "clock (MHz)" });
    if (power) states.push({ at: index, value: power, what: "power (W)" });
  });
  const x = { field: "at", type: "quantitative", title: "sample", scale: { zero: false, nice: false } };
  const one = (what) => ({ width: "container", height: 70, data: { values: states.filter((state) => state.what === what) }, mark: { type: "line", point: true, interpolate: "step-before", color: COLOURS[4] }, encoding: { x, y: { field: "value", type: "quantitative", title: what, scale: { zero: false } }, tooltip: [{ field: "at", title: "sample" }, { field: "value", title: what }] } });
  const times = { width: "container", height: 180, layer: [
    { data: { values: points }, mark: { type: "point", filled: true, size: 22 }, encoding: { x, y: { field: "ms", type: "quantitative", title: "time (ms)", scale: { zero: false } }, color: { field: "session", type: "nominal", scale: { range: COLOURS }, legend: new Set(points.map((point) => point.session)).size > 1 ? {} : null }, tooltip: [{ field: "at", title: "sample" }, { field: "ms", title: "ms", format: ",.5~g" }, { field: "turn" }, { field: "session" }] } },
    { data: { values: [{ median: row.m / 1e6 }] }, mark: { type: "rule", color: "currentColor", strokeDash: [4, 4] }, encoding: { y: { field: "median", type: "quantitative" } } },
  ] };
  if (!states.length) return times;
  // "container" is for single views only.
  const width = Math.max(240, Math.min(1000, window.innerWidth * 0.8) - 90);
  const parts = [times, ...["clock (MHz)", "power (W)"].filter((what) => states.some((state) => state.what === what)).map(one)];
  return { width: undefined, vconcat: parts.map((part) => ({ ...part, width })) };
}

// ---- the chart of any figure over any workload

function explorer(data) {
  const { rows, workloads, texts, parts, ceilings } = data;
  const measured = rows.filter((row) => row.m !== undefined);
  const tools = document.getElementById("explore-tools"), target = document.getElementById("explore-chart");
  if (!measured.length) { target.textContent = "No row was measured."; return; }
  const FIGURES = {
    time: { title: "time of a call (ms)", of: (row) => [row.m / 1e6, row.lo && row.lo / 1e6, row.hi && row.hi / 1e6] },
    tokens: { title: "tokens/s", of: (row) => [row.tps, row.hi && row.tps * row.m / row.hi, row.lo && row.tps * row.m / row.lo] },
    flops: { title: "TFLOP/s", of: (row) => [row.tf, row.hi && row.tf * row.m / row.hi, row.lo && row.tf * row.m / row.lo] },
    memory: { title: "peak memory (MiB)", of: (row) => [row.p === undefined ? null : row.p / 2 ** 20, null, null] },
  };
  const families = [...new Set(measured.map((row) => workloads[row.w].family))];
  const roofs = Object.keys(ceilings.flops).length && measured.some((row) => row.ai);
  const names = [["time", "time"], ["tokens", "tokens/s"], ["flops", "TFLOP/s"], ["memory", "peak memory"], ["parts", "memory by part"], ...(roofs ? [["roofline", "roofline"]] : [])];
  const [whichFigure, figure] = choice("figure", names, show);
  const [whichFamily, family] = choice("workload", families.map((one) => [one, one]), show);
  figure.id = "explore-figure";
  tools.append(whichFigure, ...(families.length > 1 ? [whichFamily] : []));
  const label = (row) => texts[row.i] + (row.c[1] === "–" ? "" : " over " + row.c[1].replace("*", "")) + (row.role ? " (yardstick: another function)" : "");
  whenNear(target, show);

  function show() {
    const chosen = measured.filter((row) => workloads[row.w].family === family.value);
    draw(target, figure.value === "roofline" ? roofline(chosen) : figure.value === "parts" ? byPart(chosen) : over(chosen, FIGURES[figure.value]));
  }

  function over(chosen, { title, of }) {
    const points = chosen.map((row) => { const [y, lo, hi] = of(row); return { x: workloads[row.w].n, y, lo: lo ?? null, hi: hi ?? null, series: label(row) }; }).filter((point) => point.y !== null);
    if (new Set(points.map((point) => point.x)).size > 1) return curves({ points, xTitle: "sequence length (tokens)", yTitle: title });
    return bars({ values: points.map((point) => ({ ...point, category: point.series, series: "median" })), title });
  }

  function byPart(chosen) {
    const several = new Set(chosen.map((row) => workloads[row.w].n)).size > 1;
    const last = Math.max(...chosen.map((row) => workloads[row.w].n));
    const rows = chosen.filter((row) => workloads[row.w].n === last && row.parts);
    const values = rows.flatMap((row) => parts.map((part, index) => ({ category: label(row), series: part, y: (row.parts[index] || 0) / 2 ** 20 })));
    const used = new Set(values.filter((value) => value.y > 0).map((value) => value.series));
    return bars({ values: values.filter((value) => used.has(value.series)), title: `memory (MiB)${several ? " at " + lengthText(last) + " tokens" : ""}`, stacked: true });
  }

  function roofline(chosen) {
    const dtype = workloads[chosen[0].w].dtype, flops = ceilings.flops[dtype], bytes = ceilings.bytes;
    const points = chosen.filter((row) => row.ai).map((row) => ({ x: row.ai, y: row.fs / 1e12, series: label(row), size: lengthText(workloads[row.w].n) }));
    const spec = curves({ points, xTitle: "least work per least traffic (FLOP/byte)", yTitle: "TFLOP/s of the least work", joined: false });
    if (!flops || !points.length) return spec;
    const xs = points.map((point) => point.x), low = Math.min(...xs) / 2, ridge = bytes ? flops / bytes : low, high = Math.max(...xs, ridge) * 2;
    const roof = [...(bytes && ridge > low ? [{ x: low, y: low * bytes / 1e12 }] : [{ x: low, y: flops / 1e12 }]), ...(ridge > low && ridge < high ? [{ x: ridge, y: flops / 1e12 }] : []), { x: high, y: flops / 1e12 }];
    for (const layer of spec.layer) for (const [axis, name] of [["x", "x"], ["y", "y"]]) layer.encoding[axis] = { ...layer.encoding[axis], scale: { type: "log", nice: false, padding: 8 }, ...(axis === "x" ? { axis: { labelExpr: VALUE, values: decades(low, high) } } : {}) };
    const { x, y } = spec.layer[0].encoding;
    spec.layer.unshift({ data: { values: roof }, mark: { type: "line", color: "currentColor", strokeWidth: 2 }, encoding: { x, y } });
    spec.layer.push({ data: { values: [{ ...roof[roof.length - 1], text: `${dtype} product measured here: ${(flops / 1e12).toPrecision(3)} TFLOP/s` }] }, mark: { type: "text", align: "right", baseline: "bottom", dy: -4, color: "currentColor" }, encoding: { x, y, text: { field: "text" } } });
    return spec;
  }
}
