// The microscope: one captured sample token by token, coloured by a column.

const COLUMNS = {
  advantage: ["signed", 0, "advantage of the token, from the algorithm"],
  weight: ["positive", 0, "share of the token in the update's loss"],
  logp: ["negative", 0, "log-probability by the trainer"],
  rollout_logp: ["negative", 0, "log-probability by the engine, when it was sampled"],
  logp_difference: ["signed", 0, "log-probability by the trainer minus that by the engine"],
  ratio: ["signed", 1, "policy ratio; 1 is on policy"],
  clipped: ["positive", 0, "1 where the loss says that it clipped, capped or masked the token"],
  entropy: ["positive", 0, "entropy of the policy at the token, in nats"],
  kl: ["positive", 0, "estimate of the divergence from the reference at the token, in nats"],
  loss: ["signed", 0, "the token's own loss, before its weight"],
};
const lens = { column: "advantage" };

async function showMicroscope(host, [key, step, group, sample] = []) {
  const run = runOf(key) || RUNS.find((one) => one.captured.length);
  if (!run || !run.captured.length) {
    fill(host, el("p", null, "No step of ", run ? "this run" : "these runs", " was captured. A run with ", el("code", null, "capture: {every: 50}"), " keeps the numbers of every token of some steps."));
    return;
  }
  const at = nearest(run.captured.map((one) => one.step), Number(step || 0));
  const every = await block(`tokens-${run.key}-${at}`);
  if (!every.length) {
    fill(host, el("p", null, "This page was made without samples; python -m analysis.report with a larger --samples keeps some."));
    return;
  }
  const asked = every.find((x) => String(x.group) === group && String(x.sample) === sample);
  const one = asked || every[0];
  const here = (s, x) => go(`microscope/${run.key}/${s}/${x ? `${x.group}/${x.sample}` : ""}`);
  const about = run.captured.find((x) => x.step === at);
  const view = el("div");
  const again = () => fill(view, tokensView(one));
  const columns = Object.keys(one.columns);
  if (!columns.includes(lens.column)) lens.column = columns[0];
  fill(
    host,
    el(
      "div",
      { class: "controls" },
      RUNS.length > 1 && el("label", null, "run ", select(RUNS.filter((x) => x.captured.length).map((x) => [x.key, x.name]), run.key, (k) => go(`microscope/${k}`), "run")),
      el("label", null, "step ", select(run.captured.map((x) => [x.step, x.step]), at, (s) => here(s), "step")),
      el("label", null, "sample ", select(every.map((x, i) => [i, `group ${x.group}, sample ${x.sample}, reward ${format(x.reward)}`]), every.indexOf(one), (i) => here(at, every[i]), "sample")),
      el("label", null, "color by ", select(columns.map((c) => [c, c.replaceAll("_", " ")]), lens.column, (c) => { lens.column = c; again(); }, "color by")),
      every.length < about.all && el("span", { class: "hint" }, `${every.length} of ${about.all} captured samples`, HEAD.files ? [" ", el("button", { onclick: () => loadBeside(`tokens-${run.key}-${at}`).then(render) }, "load all")] : "; --all keeps the others beside the page"),
      el("button", { onclick: () => { openStep(run.key, at); place.group = one.group; } }, "its siblings"),
    ),
    group && !asked && el("p", { class: "failure" }, `Sample ${sample} of group ${group} is not in this page; this is another.`),
    view,
  );
  again();
}

function tokensView(one) {
  const columns = Object.fromEntries(Object.entries(one.columns).map(([name, packed]) => [name, floats(packed)]));
  const values = columns[lens.column];
  const scale = strengths(COLUMNS[lens.column] || [values.some((x) => x < 0) ? "signed" : "positive", 0], values);
  const details = el("div", { class: "token-details" });
  let pinned = false;
  const tell = (i) => fill(details, tokenDetails(one.pieces, columns, i));
  const tokens = one.pieces.map((piece, i) => {
    const trained = !Number.isNaN(values[i]);
    return el(
      "span",
      {
        class: trained ? "token" : "token untrained", "data-value": Number.isNaN(values[i]) ? "" : String(values[i]), style: { background: tint(scale.of[i]) },
        onmouseenter: () => !pinned && tell(i),
        onclick: (event) => {
          const was = event.target.classList.contains("pinned");
          for (const other of tokens) other.classList.remove("pinned");
          pinned = !was;
          event.target.classList.toggle("pinned", pinned);
          tell(i);
        },
      },
      piece.replaceAll("\n", "⏎\n"),
    );
  });
  const first = values.findIndex((x) => !Number.isNaN(x));
  tell(Math.max(first, 0));
  return [
    el("p", { class: "hint" }, (COLUMNS[lens.column] || ["", 0, ""])[2]),
    colorScale(scale),
    el("div", { class: "two wide-left" }, el("div", { class: "tokens" }, tokens), el("div", null, details, columnTable(columns))),
  ];
}

function tokenDetails(pieces, columns, i) {
  const rows = Object.entries(columns).map(([name, values]) => [name.replaceAll("_", " "), number(Number.isNaN(values[i]) ? null : values[i])]);
  return [el("h4", null, `token ${i} `, el("code", null, JSON.stringify(pieces[i]))), table(null, rows)];
}

/** What each column holds over the sample's trained tokens. */
function columnTable(columns) {
  const rows = Object.entries(columns).map(([name, values]) => {
    const known = [...values].filter(Number.isFinite);
    const mean = known.length ? sum(known) / known.length : null;
    return [name.replaceAll("_", " "), number(mean), number(known.length ? Math.min(...known) : null), number(known.length ? Math.max(...known) : null)];
  });
  return el("div", null, el("h4", null, "over the sample"), table(["", "mean", "least", "most"], rows));
}
