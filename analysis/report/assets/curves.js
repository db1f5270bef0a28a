// Curves of every metric, grouped by prefix, all runs in one plot.

const settings = { smoothing: 0, x: "step", log: false, filter: "" };
const CLOSED = ["time", "time/groups", "time/trainers", "time/engines", "data", "sync"]; // groups that start folded

/** train/mismatch/kl belongs to train/mismatch; a name without a slash to "run". */
const groupOf = (name) => (name.includes("/") ? name.slice(0, name.lastIndexOf("/")) : "run");

function groupMetrics() {
  const groups = new Map();
  for (const name of Object.keys(HEAD.metrics)) {
    if (!groups.has(groupOf(name))) groups.set(groupOf(name), []);
    groups.get(groupOf(name)).push(name);
  }
  const last = (group) => (group === "run" ? 1 : CLOSED.includes(group) ? 2 : 0);
  return [...groups].sort((a, b) => last(a[0]) - last(b[0]));
}

function showCurves(host) {
  const charts = el("div");
  const redraw = () => fill(charts, groupMetrics().map(([group, names]) => makeSection(group, names)));
  const smoothing = el("input", {
    type: "range", min: 0, max: 0.98, step: 0.02, value: settings.smoothing, "aria-label": "smoothing",
    oninput: () => {
      settings.smoothing = Number(smoothing.value);
      fill(shown, settings.smoothing.toFixed(2));
    },
    onchange: redraw,
  });
  const shown = el("span", { class: "number" }, settings.smoothing.toFixed(2));
  const filter = el("input", { type: "search", placeholder: "part of a name", value: settings.filter, "aria-label": "metrics", oninput: () => { settings.filter = filter.value; redraw(); } });
  const log = el("input", { type: "checkbox", checked: settings.log, onchange: () => { settings.log = log.checked; redraw(); } });
  fill(
    host,
    el(
      "div",
      { class: "controls" },
      el("label", null, "metrics ", filter),
      el("label", { title: "exponential moving average; the unsmoothed curve stays, paler" }, "smoothing ", smoothing, " ", shown),
      el("label", null, "x ", select([["step", "steps"], ["minutes", "minutes"]], settings.x, (x) => { settings.x = x; redraw(); }, "x axis")),
      el("label", { title: "where all values are above 0" }, log, " logarithmic"),
      RUNS.length > 1 && RUNS.map((run) => runSwitch(run, redraw)),
      el("span", { class: "hint" }, "drag to zoom, double click to see all, click a point to see the step's samples"),
    ),
    charts,
  );
  redraw();
}

function runSwitch(run, redraw) {
  const box = el("input", { type: "checkbox", checked: run.shown, onchange: () => { run.shown = box.checked; redraw(); } });
  return el("label", null, box, el("i", { class: "dot", style: { background: run.color } }), run.name);
}

function makeSection(group, names) {
  const wanted = names.filter((name) => name.includes(settings.filter));
  if (!wanted.length) return null;
  const { plotted, constant } = sortOut(wanted);
  const grid = el("div", { class: "charts" });
  const texts = el("div", { class: "constants" }, constant.map(constantLine));
  const open = settings.filter !== "" || !CLOSED.includes(group.startsWith("data/") ? "data" : group);
  const section = el("details", { open, "data-group": group }, el("summary", null, group, el("span", { class: "hint" }, ` ${wanted.length}`)), grid, texts);
  const build = () => section.open && !grid.childElementCount && add(grid, plotted.map(makeCard));
  section.addEventListener("toggle", build);
  build();
  return section;
}

/** Sort metrics into those with a plot, equal ones together, and those whose value is one and the same at every step. */
function sortOut(names) {
  const plots = new Map();
  const constant = [];
  for (const name of names) {
    const values = RUNS.filter((run) => run.shown && run.values[name]).map((run) => run.values[name]);
    const known = values.flat().filter(isNumber);
    if (known.length > 1 && known.every((x) => x === known[0])) {
      constant.push([name, known[0]]);
      continue;
    }
    const same = JSON.stringify(values);
    if (!values.length) plots.set(name, [name]);
    else if (plots.has(same)) plots.get(same).push(name);
    else plots.set(same, [name]);
  }
  return { plotted: [...plots.values()], constant };
}

/** A metric that never changes, as a line of text. */
function constantLine([name, value]) {
  return el("p", { class: "hint", "data-metric": name, title: (HEAD.metrics[name] || {}).meaning || "" }, `${name} is `, number(value), " at every step");
}

/** A metric's card: name, unit, last values, and the plot, which is made when the card comes into view. */
function makeCard([name, ...same]) {
  const about = HEAD.metrics[name];
  const runs = RUNS.filter((run) => run.shown && run.values[name]);
  const readout = el("div", { class: "readout" });
  const host = el("div", { class: "plot" });
  const card = el(
    "div",
    { class: "card", "data-metric": name },
    el("div", { class: "card-title", title: about.meaning || "" }, name, el("span", { class: "hint" }, about.unit ? ` ${about.unit}` : ""), same.map((other) => el("span", { class: "hint", "data-same": other, title: (HEAD.metrics[other] || {}).meaning || "" }, ` = ${other}`))),
    host,
    readout,
  );
  const tell = (step) => fill(readout, runs.map((run) => readoutOf(run, name, step)));
  tell(null);
  new IntersectionObserver((seen, watcher) => {
    if (!seen.some((one) => one.isIntersecting)) return;
    watcher.disconnect();
    makePlot(host, name, runs, tell);
  }, { rootMargin: "300px" }).observe(host);
  return card;
}

/** A run's value at a step; without a step the last that it logged. */
function readoutOf(run, name, step) {
  const values = run.values[name];
  const at = step === null ? values.findLastIndex(isNumber) : indexOfStep(run, step);
  const mark = RUNS.length > 1 && el("i", { class: "dot", style: { background: run.color } });
  const smoothed = settings.smoothing && at >= 0 && [el("span", { class: "hint" }, " smoothed "), number(smooth(values, settings.smoothing)[at], { class: "number smoothed" })];
  return el("span", { "data-run": run.key }, mark, number(at >= 0 ? values[at] : null), smoothed || null, el("span", { class: "hint" }, at >= 0 ? ` at step ${run.steps[at]}` : ""));
}

/** Exponential moving average without the bias of its start; gaps stay gaps. */
function smooth(values, weight) {
  let mean = 0;
  let seen = 0;
  return values.map((x) => {
    if (!isNumber(x)) return x;
    mean = weight * mean + (1 - weight) * x;
    seen = weight * seen + (1 - weight);
    return mean / seen;
  });
}

function makePlot(host, name, runs, tell) {
  if (!runs.length) return;
  const xs = (run) => (settings.x === "step" ? run.steps : run.minutes);
  const series = [{}];
  const tables = runs.map((run) => {
    const values = run.values[name];
    const columns = settings.smoothing ? [values, smooth(values, settings.smoothing)] : [values];
    const few = values.filter(isNumber).length < 40;
    columns.forEach((_, i) => {
      const pale = settings.smoothing && i === 0;
      series.push({
        stroke: pale ? `${run.color}44` : run.color, width: pale ? 1 : 1.6, spanGaps: true,
        points: { show: few && !pale, size: 4, fill: run.color },
      });
    });
    return [xs(run), ...columns];
  });
  const data = uPlot.join(tables);
  const everyValue = data.slice(1).flat().filter(isNumber);
  const distr = settings.log && everyValue.every((x) => x > 0) ? 3 : 1;
  const line = { stroke: themed("--muted"), grid: { stroke: themed("--grid"), width: 1 }, ticks: { stroke: themed("--grid"), width: 1 }, font: "11px system-ui, sans-serif" };
  const plot = new uPlot(
    {
      width: host.clientWidth, height: 170, legend: { show: false },
      cursor: { y: false, sync: { key: "curves", scales: ["x", null] }, drag: { x: true, y: false }, points: { size: 7 } },
      scales: { x: { time: false, range: spread }, y: { distr, range: distr === 1 ? pad : undefined } },
      axes: [{ ...line, size: 26, space: 50 }, { ...line, size: 58, values: (_, ticks) => ticks.map((x) => (x === null ? "" : format(Number(x.toPrecision(6))))) }],
      padding: [10, 10, 0, 0],
      series,
      hooks: { setCursor: [(u) => tell(stepAtCursor(u, runs, xs))] },
    },
    data,
    host,
  );
  new ResizeObserver(() => host.clientWidth && plot.width !== host.clientWidth && plot.setSize({ width: host.clientWidth, height: 170 })).observe(host);
  openAtClick(plot, runs, name, xs);
}

const spread = (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]);

/** Room above and below a curve; a constant one lies in the middle. */
function pad(_, low, high) {
  if (low === null) return [0, 1];
  const room = (high - low) * 0.08 || Math.abs(low) * 0.1 || 1;
  return [low - room, high + room];
}

function stepAtCursor(u, runs, xs) {
  if (u.cursor.idx === null || u.cursor.idx === undefined) return null;
  const x = u.data[0][u.cursor.idx];
  const run = runs.find((one) => xs(one).includes(x)) || runs[0];
  return run.steps[xs(run).indexOf(nearest(xs(run), x))];
}

/** Open the step of the point that is nearest to a click; a drag is no click. */
function openAtClick(plot, runs, name, xs) {
  let pressed = null;
  plot.over.addEventListener("mousedown", (event) => (pressed = [event.clientX, event.clientY]));
  plot.over.addEventListener("click", (event) => {
    if (!pressed || Math.hypot(event.clientX - pressed[0], event.clientY - pressed[1]) > 4) return;
    let best = null;
    for (const run of runs) {
      run.values[name].forEach((value, i) => {
        if (!isNumber(value)) return;
        const away = Math.hypot(plot.valToPos(xs(run)[i], "x") - event.offsetX, plot.valToPos(value, "y") - event.offsetY);
        if (!best || away < best.away) best = { away, run, step: run.steps[i] };
      });
    }
    if (best) openStep(best.run.key, best.step);
  });
}
