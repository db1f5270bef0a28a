// Time, tokens and staleness: what a step spent, by parts that add up.

const look = { share: false };
const ACTIVITIES = ["wait_for_data", "generate", "logp", "advantages", "train", "sync", "evaluate", "log", "checkpoint", "check", "reward", "save", "restart", "environment"];

/** What takes time has one color on every device; waiting has none. */
function activityColor(name) {
  if (["idle", "rest"].includes(name)) return QUIET;
  const i = ACTIVITIES.indexOf(name);
  return color(i < 0 ? PALETTE.length - 1 : i);
}

const parts = (run, list) =>
  list.map((part) => ({
    name: part.name.replaceAll("_", " "), meaning: (HEAD.metrics[part.metric] || {}).meaning,
    color: activityColor(part.name), values: run.values[part.metric] || run.steps.map(() => null),
  }));

function shareSwitch(again) {
  const box = el("input", { type: "checkbox", checked: look.share, onchange: () => { look.share = box.checked; again(); } });
  return el("div", { class: "controls" }, el("label", null, box, " as shares of a step"), el("span", { class: "hint" }, "click a column to see the step"));
}

function showTime(host) {
  const again = () => showTime(host);
  fill(
    host,
    shareSwitch(again),
    RUNS.map((run) =>
      el(
        "section",
        { "data-run": run.key },
        runTitle(run),
        el("p", { class: "hint" }, `whole steps: `, number(sum(run.values["time/step_s"] || []), { "data-total": "seconds" }), " s"),
        Object.entries(HEAD.time).map(([device, list]) => {
          const own = parts(run, list);
          if (!own.some((part) => part.values.some((x) => x))) return null;
          return el("div", { "data-device": device }, el("h4", null, device), stacked({ steps: run.steps, parts: own, unit: "s", share: look.share, onstep: (step) => openStep(run.key, step) }));
        }),
      ),
    ),
  );
}

function runTitle(run) {
  return el("h3", null, el("i", { class: "dot", style: { background: run.color } }), run.name);
}

const TOKEN_COLORS = { contributing: "#4a9f4f", clipped: "#e8832a", no_signal: "#c9a227", not_trained: "#9a6fb8", rejected: "#d64f54" };

function showTokens(host) {
  const again = () => showTokens(host);
  fill(host, shareSwitch(again), RUNS.map((run) => el("section", { "data-run": run.key }, runTitle(run), tokensOf(run), stalenessOf(run))));
}

function tokensOf(run) {
  const list = Object.entries(HEAD.tokens).map(([name, meaning]) => ({ name: name.replaceAll("_", " "), meaning, color: TOKEN_COLORS[name], values: run.tokens[name] }));
  const generated = sum(list.map((part) => sum(part.values)));
  if (!generated) return el("p", { class: "hint" }, "this run logs no sampled tokens");
  return el(
    "div",
    null,
    el("h4", null, "Where the tokens went"),
    el("p", { class: "hint" }, "generated: ", number(generated, { "data-total": "generated" }), " tokens, rejected groups included"),
    stacked({ steps: run.steps, parts: list, unit: "tokens", share: look.share, onstep: (step) => openStep(run.key, step) }),
    table(["", "tokens", "of the generated", "what it means"], list.map((part) => [el("span", null, el("i", { class: "dot", style: { background: part.color } }), part.name), number(sum(part.values)), percent(sum(part.values) / generated), el("span", { class: "hint" }, part.meaning)])),
  );
}

function stalenessOf(run) {
  const ages = Object.keys(run.values).filter((name) => /^rollout\/staleness\/\d+$/.test(name));
  const mean = run.values["rollout/staleness_mean"];
  if (!mean) return null;
  const most = Math.max(...(run.values["rollout/staleness_max"] || [0]).filter(isNumber));
  if (!ages.length) return el("p", { class: "hint" }, `Staleness: no token was more than ${most} steps old when it was trained on.`);
  const list = ages.map((name, i) => ({
    name: `${name.split("/").pop()} steps old`, color: color(i),
    values: run.values[name].map((x, j) => (isNumber(x) ? x * run.values["rollout/tokens"][j] : null)),
  }));
  return el("div", { "data-part": "staleness" }, el("h4", null, "How old the tokens were when they were trained on"), stacked({ steps: run.steps, parts: list, unit: "tokens", share: look.share, onstep: (step) => openStep(run.key, step) }));
}

/** The time of one step, as strips of the driver, the mean trainer rank and the mean engine. */
function stepTime(run, step) {
  const i = indexOfStep(run, step);
  if (i < 0) return null;
  const whole = run.values["time/step_s"][i];
  return Object.entries(HEAD.time).map(([device, list]) => {
    const own = parts(run, list).map((part) => ({ ...part, value: part.values[i] || 0 }));
    return sum(own.map((part) => part.value)) ? strip(device, own, Math.max(whole, sum(own.map((part) => part.value)))) : null;
  });
}
