// A step's samples: histogram, groups, the siblings of one group side by side, time and metrics of the step.

const place = { run: null, step: null, group: null };

/** Open a step of a run; the nearest one where it has no samples. */
function openStep(key, step) {
  Object.assign(place, { run: key, step: Number(step), group: null });
  go(`samples/${key}/${step}`);
}

async function showSamples(host, [key, step] = []) {
  const run = runOf(key) || runOf(place.run) || RUNS.find((one) => stepsWithSamples(one).length) || RUNS[0];
  const steps = [...new Set([...run.trained, ...stepsWithSamples(run)])].sort((a, b) => a - b);
  const wanted = step !== undefined && step !== "" ? Number(step) : run.key === place.run && place.step !== null ? place.step : steps[steps.length - 1];
  const at = nearest(steps, wanted);
  if (place.run !== run.key || place.step !== at) Object.assign(place, { run: run.key, step: at, group: null });
  const data = await block(`step-${run.key}-${at}`);
  fill(host, stepControls(run, steps, at), el("h3", { id: "step-title", "data-run": run.key, "data-step": String(at) }, `${run.name}, step ${at}`));
  if (data) add(host, [samplesOf(run, at, data)]);
  else add(host, [el("div", { class: "strips" }, stepTime(run, at)), el("p", { class: "hint" }, stepsWithSamples(run).length ? "There are no samples of this step." : "This run has no samples.")]);
  add(host, [metricsOf(run, at)]);
}

function stepControls(run, steps, at) {
  const i = steps.indexOf(at);
  const jump = (j) => openStep(run.key, steps[Math.min(Math.max(j, 0), steps.length - 1)]);
  const slider = el("input", { type: "range", min: 0, max: steps.length - 1, value: i, "aria-label": "step", class: "wide", onchange: () => jump(Number(slider.value)) });
  return el(
    "div",
    { class: "controls" },
    RUNS.length > 1 && select(RUNS.map((one) => [one.key, one.name]), run.key, (key) => openStep(key, at), "run"),
    el("button", { onclick: () => jump(i - 1), disabled: i === 0 }, "‹ step before"),
    slider,
    el("button", { onclick: () => jump(i + 1), disabled: i === steps.length - 1 }, "step after ›"),
  );
}

function samplesOf(run, step, data) {
  const groups = el("div", { class: "groups" });
  const siblings = el("div");
  const open = (group) => {
    place.group = group.group;
    for (const row of groups.children) row.classList.toggle("picked", row.dataset.group === String(group.group));
    fill(siblings, siblingsOf(run, step, group));
  };
  const list = (picked) => {
    const kept = data.groups.filter((group) => !picked || data.group.some((g, i) => g === group.group && picked.has(i)));
    fill(groups, kept.map((group) => groupRow(data, group, open)), !kept.length && el("p", { class: "hint" }, picked ? "Samples of this bar are not in this page." : "No sample of this step is in full in this page."));
    return kept;
  };
  const shown = sum(data.groups.map((group) => group.samples.length));
  const box = el(
    "div",
    null,
    el("div", { class: "step-head" }, el("div", null, histogram(data, (picked) => list(picked))), el("div", { class: "strips" }, el("h4", null, "where the time of this step went"), stepTime(run, step))),
    el("p", { class: "hint" }, `${shown} of ${data.group.length} samples of this step are in full in this page; the histogram counts all. `, moreButton(run, step, data, shown)),
    el("div", { class: "two" }, groups, siblings),
  );
  const kept = list(null);
  if (kept.length) open(kept.find((group) => group.group === place.group) || kept[0]);
  return box;
}

/** Offer to load every sample, where they were written beside the page. */
function moreButton(run, step, data, shown) {
  if (shown === data.group.length) return null;
  if (!HEAD.files) return "python -m analysis.report with --all keeps the others beside the page.";
  const button = el("button", {
    onclick: async () => {
      try {
        await loadBeside(`step-${run.key}-${step}`);
        render();
      } catch (error) {
        button.replaceWith(error.message);
      }
    },
  }, "load all");
  return button;
}

/** A group in the list: why it was kept, its prompt's beginning, and the rewards of all of its samples. */
function groupRow(data, group, open) {
  const rewards = data.reward.filter((_, i) => data.group[i] === group.group);
  const last = group.prompt.length ? group.prompt[group.prompt.length - 1].content : "";
  return el(
    "button",
    { class: "group", "data-group": String(group.group), onclick: () => open(group) },
    el("span", { class: "group-name" }, group.id || `group ${group.group}`, group.why && el("span", { class: "why" }, group.why)),
    el("span", { class: "group-prompt" }, String(last).slice(0, 90)),
    el("span", { class: "chips" }, rewards.map((reward) => rewardChip(reward, data))),
  );
}

/** A small mark of a reward: red at the step's lowest, green at its highest. */
function rewardChip(reward, data) {
  if (!isNumber(reward)) return el("i", { class: "chip failed", title: "no reward" });
  const known = data.reward.filter(isNumber);
  const low = Math.min(...known);
  const high = Math.max(...known);
  const x = high > low ? (reward - low) / (high - low) : 0.5;
  return el("i", { class: "chip", title: format(reward), style: { background: `hsl(${Math.round(5 + 115 * x)} 55% 48%)` } });
}

function siblingsOf(run, step, group) {
  return [
    el("div", { class: "prompt" }, (group.tools || []).map(toolLine), group.prompt.map(messageLine), group.answer !== "" && el("div", null, el("span", { class: "role" }, "answer"), el("span", { class: "text" }, group.answer))),
    group.samples.length < group.size && el("p", { class: "hint" }, `${group.samples.length} of the group's ${group.size} samples`),
    el("div", { class: "siblings" }, group.samples.map((sample) => sampleCard(run, step, group, sample))),
  ];
}

/** A tool that the policy may call: its name, its arguments and what it does. */
function toolLine(tool) {
  const { name, description, parameters } = tool.function;
  const args = Object.keys((parameters && parameters.properties) || {}).join(", ");
  return el("div", null, el("span", { class: "role" }, "may call"), el("span", { class: "text" }, `${name}(${args}) ${description || ""}`));
}

/** What a message says: its reasoning, its text and its tool calls. */
function messageText(message) {
  const calls = (message.tool_calls || []).map((call) => `${call.function.name}(${JSON.stringify(call.function.arguments)})`);
  return [message.reasoning && `(${message.reasoning})`, message.content, ...calls].filter((part) => part).join("\n");
}

const messageLine = (message) => el("div", null, el("span", { class: "role" }, message.role), el("span", { class: "text" }, messageText(message)));

/** The turns of an episode, one below the other; the policy's with its tokens and what it earned. */
function turnsOf(sample) {
  return el(
    "div",
    { class: "completion turns" },
    sample.turns.map((turn) =>
      el(
        "div",
        { class: turn.role === "assistant" ? "turn policy" : "turn", "data-role": turn.role },
        el("div", { class: "hint" }, turn.role, isNumber(turn.tokens) && [" · ", number(turn.tokens), " tokens"], isNumber(turn.reward) && [" · earned ", number(turn.reward)]),
        el("div", { class: "text" }, messageText(turn)),
      ),
    ),
  );
}

function sampleCard(run, step, group, sample) {
  const about = run.captured.find((one) => one.step === step);
  const captured = about && about.kept.some(([g, s]) => g === group.group && s === sample.sample);
  const facts = [
    ...Object.entries(sample.reward_parts || {}).map(([name, value]) => [name, number(value)]),
    ...Object.entries(sample.counts || {}).map(([name, value]) => [name.replaceAll("_", " "), number(value)]),
    ["advantage", number(sample.advantage)],
    ["tokens", number(sample.new_tokens)],
    ["ended by", sample.stop],
    ["version", (sample.versions || []).join(", ")],
  ];
  return el(
    "article",
    { class: "sample", "data-group": String(group.group), "data-sample": String(sample.sample) },
    el("header", null, el("span", { class: "reward" }, "reward ", number(sample.reward)), captured && el("button", { onclick: () => go(`microscope/${run.key}/${step}/${group.group}/${sample.sample}`) }, "tokens")),
    sample.failure && el("p", { class: "failure" }, sample.failure),
    sample.turns ? turnsOf(sample) : el("pre", { class: "completion" }, sample.completion === null ? "(not decoded)" : sample.completion),
    sample.notes && el("div", { class: "notes" }, sample.notes.map((note) => el("details", null, el("summary", { class: "hint" }, note.by, note.reading !== undefined && [": ", note.reading === null ? "unreadable" : typeof note.reading === "number" ? number(note.reading) : note.reading], note.cached && " (cached)"), el("pre", { class: "completion" }, note.text)))),
    el("footer", null, facts.map(([name, value]) => el("span", null, `${name} `, value))),
  );
}

/** All metrics of the step, with every digit in the title. */
function metricsOf(run, step) {
  const i = indexOfStep(run, step);
  if (i < 0) return null;
  const names = Object.keys(HEAD.metrics).filter((name) => run.values[name] && isNumber(run.values[name][i]));
  const rows = names.map((name) => el("tr", { "data-metric": name }, el("td", { title: HEAD.metrics[name].meaning || "" }, name), el("td", { class: "right" }, number(run.values[name][i])), el("td", { class: "hint" }, HEAD.metrics[name].unit || "")));
  return el("details", { class: "metrics", open: true }, el("summary", null, "metrics of this step"), el("div", { class: "columns" }, el("table", null, el("tbody", null, rows))));
}
