// What fell (or rose) between two steps of a run: rewards by part, source and length, and the prompts that changed most.

const MOST_PROMPTS = 20;

async function showFell(host, [key, from, to] = []) {
  const run = runOf(key) || RUNS.find((one) => one.values["reward/mean"]) || RUNS[0];
  const rewards = run.values["reward/mean"];
  if (!rewards) return fill(host, el("p", { class: "hint" }, "This run logs no reward."));
  const steps = run.trained;
  const rewardAt = (step) => rewards[indexOfStep(run, step)];
  const b = to === undefined ? steps[steps.length - 1] : nearest(steps, Number(to));
  // as the first of the two the best step before it: what has fallen since
  const earlier = steps.filter((step) => step < b && isNumber(rewardAt(step)));
  const best = earlier.length ? earlier.reduce((x, y) => (rewardAt(y) > rewardAt(x) ? y : x)) : b;
  const a = from === undefined ? best : nearest(steps, Number(from));
  const choose = (x, y, other = run) => go(`fell/${other.key}/${x}/${y}`);
  const pick = (step, label, onpick) => el("label", null, `${label} `, select(steps.map((x) => [String(x), `step ${x}`]), String(step), onpick, label));
  fill(
    host,
    el(
      "div",
      { class: "controls" },
      RUNS.length > 1 && select(RUNS.map((one) => [one.key, one.name]), run.key, (other) => go(`fell/${other}`), "run"),
      pick(a, "from", (x) => choose(x, b)),
      pick(b, "to", (x) => choose(a, x)),
      el("span", { class: "hint" }, "from the best step before to the last, unless chosen"),
    ),
    changesOf(run, a, b),
    el("div", { "data-part": "length" }, el("h4", null, "reward by length"), await byLength(run, a, b)),
    el("div", { "data-part": "prompts" }, el("h4", null, "prompts that changed most"), await byPrompt(run, a, b)),
  );
}

const changeOf = (x, y) => (isNumber(x) && isNumber(y) ? y - x : null);
const lowestFirst = (rows) => rows.sort((x, y) => (x.change ?? 0) - (y.change ?? 0));

/** The logged mean rewards of both steps: of the whole, of the parts, and of the sources of a mixture. */
function changesOf(run, a, b) {
  const at = (name, step) => run.values[name][indexOfStep(run, step)];
  const kind = (name) => (run.values[`data/${name.slice(7)}/rows`] ? "source" : ["reward/mean", "reward/std", "reward/mean_drawn", "reward/length_corr", "reward/others"].includes(name) ? "whole" : "part");
  const rows = Object.keys(run.values)
    .filter((name) => name.startsWith("reward/"))
    .map((name) => ({ name, kind: kind(name), change: changeOf(at(name, a), at(name, b)) }));
  return ["whole", "part", "source"].map((one) => {
    const own = lowestFirst(rows.filter((row) => row.kind === one));
    if (!own.length) return null;
    const cells = own.map(({ name, change }) => [el("span", { "data-change": name }, name), number(at(name, a)), number(at(name, b)), number(change)]);
    const title = { whole: "reward", part: "reward by part", source: "reward by source" }[one];
    return el("div", { "data-part": one }, el("h4", null, title), table(["", `step ${a}`, `step ${b}`, "change"], cells));
  });
}

/** Mean rewards of the samples of both steps, in four ranges of their lengths. */
async function byLength(run, a, b) {
  const data = await Promise.all([a, b].map((step) => block(`step-${run.key}-${step}`)));
  if (data.some((one) => !one)) return el("p", { class: "hint" }, "There are no samples of one of these steps.");
  const pairs = data.map((one) => one.tokens.map((tokens, i) => [tokens, one.reward[i]]).filter((pair) => pair.every(isNumber)));
  const sorted = pairs.flat().map(([tokens]) => tokens).sort((x, y) => x - y);
  if (!sorted.length) return el("p", { class: "hint" }, "no sample of these steps has a reward");
  const edges = [...new Set([0.25, 0.5, 0.75, 1].map((part) => sorted[Math.ceil(part * sorted.length) - 1]))];
  const mean = (own) => (own.length ? sum(own.map(([, reward]) => reward)) / own.length : null);
  const rows = edges.map((edge, i) => {
    const low = i ? edges[i - 1] + 1 : sorted[0];
    const own = pairs.map((list) => list.filter(([tokens]) => tokens >= low && tokens <= edge));
    const means = own.map(mean);
    return [low === edge ? `${edge} tokens` : `${low} to ${edge} tokens`, ...[0, 1].flatMap((j) => [number(means[j]), number(own[j].length)]), number(changeOf(...means))];
  });
  return table(["", `step ${a}`, "samples", `step ${b}`, "samples", "change"], rows);
}

/** Prompts seen up to the first step and again up to the second, by the change of their mean reward, with their samples. */
async function byPrompt(run, a, b) {
  const seen = (await block(`prompts-${run.key}`)) || {};
  const [early, late] = a <= b ? [a, b] : [b, a];
  const rows = Object.entries(seen).flatMap(([id, times]) => {
    const then = times.findLast(([step]) => step <= early);
    const now = times.findLast(([step]) => step > early && step <= late);
    return then && now ? [{ id, then, now, change: now[2] - then[2] }] : [];
  });
  if (!rows.length) return el("p", { class: "hint" }, "No prompt was drawn up to the first of these steps and again up to the second.");
  rows.sort((x, y) => Math.abs(y.change) - Math.abs(x.change) || (x.id < y.id ? -1 : 1));
  const link = ([step, group]) => el("button", { "data-step": String(step), "data-group": String(group), onclick: () => openGroup(run, step, group) }, `samples of step ${step}`);
  const cells = rows.slice(0, MOST_PROMPTS).map(({ id, then, now, change }) => [el("span", { "data-prompt": id }, id), number(then[2]), link(then), number(now[2]), link(now), number(change)]);
  return table(["prompt", "before", "", "after", "", "change"], cells);
}

/** Open the samples of a group of a step. */
function openGroup(run, step, group) {
  Object.assign(place, { run: run.key, step, group });
  go(`samples/${run.key}/${step}`);
}
