// The head of the page: the runs, their warnings, held-out results, and what differs between their recipes.

function showHeader(host) {
  fill(host, el("div", { class: "title" }, el("h1", null, RUNS.length === 1 ? RUNS[0].name : `${RUNS.length} runs`), el("button", { id: "theme", onclick: switchTheme }, "light / dark")), el("div", { class: "runs" }, RUNS.map(runCard)));
}

function runCard(run) {
  const good = run.exit_reason === "done";
  return el(
    "section",
    { class: "run", "data-run": run.key },
    RUNS.length > 1 && runTitle(run),
    el("p", null, el("span", { class: good ? "badge good" : "badge bad", "data-fact": "exit" }, run.exit_reason), outcome(run)),
    el("dl", null, run.facts.map(([label, text]) => el("div", null, el("dt", null, label), el("dd", { "data-fact": label }, text)))),
    run.profile.length > 0 && el("p", { "data-fact": "profile" }, "profile: ", run.profile.map(([name, href]) => [el("a", { href, download: name }, name), " "])),
    run.warnings.length > 0 && el("ul", { class: "warnings" }, run.warnings.map((one) => el("li", null, isNumber(one.step) && el("button", { onclick: () => openStep(run.key, one.step) }, `step ${one.step}`), " ", one.text))),
  );
}

/** Held-out reward, or loss, before and after. */
function outcome(run) {
  const { before = {}, after = {} } = run.held_out;
  return Object.keys(after)
    .filter((name) => isNumber(after[name]) && (name.endsWith("/mean") || name === "eval/loss"))
    .map((name) => el("span", { class: "outcome" }, `held-out ${name}: `, isNumber(before[name]) && [number(before[name]), " → "], number(after[name])));
}

function showRecipe(host) {
  const keys = [...new Set(RUNS.flatMap((run) => Object.keys(run.config)))];
  const differs = (key) => new Set(RUNS.map((run) => run.config[key])).size > 1;
  const rows = (list) => table(["key", ...RUNS.map((run) => run.name)], list.map((key) => [key, ...RUNS.map((run) => el("code", null, run.config[key] === undefined ? "–" : run.config[key]))]));
  const packages = [...new Set(RUNS.flatMap((run) => Object.keys(run.packages)))];
  const different = keys.filter(differs);
  fill(
    host,
    RUNS.length > 1 && [el("h3", null, "what differs"), different.length ? rows(different) : el("p", null, "nothing")],
    el("h3", null, "all keys"),
    rows(keys),
    el("h3", null, "packages"),
    table(["package", ...RUNS.map((run) => run.name)], packages.map((name) => [name, ...RUNS.map((run) => el("code", null, run.packages[name] || "–"))])),
  );
}

function switchTheme() {
  const dark = document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  document.documentElement.dataset.theme = dark === "dark" ? "light" : "dark";
  render();
}
