// The page of a replay: table, cosines per layer, tokens that losses disagree on, and a map of every loss side by side.

const FOUND = HEAD.replay;
const [OPPOSITE, ONE_SILENT] = [1, 2]; // as in analysis/capture/compare.py
const OF_LOSS = ["loss", "grad_norm", "cosine", "opposite", "one_silent", "silent", "clipped", "kl_change"];
const SHARES = new Set(["opposite", "one_silent", "silent", "clipped"]);
const MODES = {
  clipped: ["clipped", "Colored: the loss says that it clipped, capped or masked the token. Grey text: not trained on."],
  slope: ["gradient", "Orange: a step against the gradient makes the token likelier; blue: less likely. All losses have the same scale."],
  judged: ["disagreement", "Blue: this loss makes the token likelier and that of the run less likely, or the other way round. Orange: one of the two leaves it alone."],
};
const others = FOUND.losses.slice(1);
const shown = { number: others.flatMap((row) => HEAD.disagreements[row.name].worst.slice(0, 1)).map((one) => one.sample)[0], mode: "clipped" };

function showFound(host) {
  const good = FOUND.reproduced;
  const facts = [["snapshot", FOUND.snapshot], ["kept because of", FOUND.reason], ["algorithm", FOUND.algorithm + (FOUND.code_changed ? " (its file has changed since the run)" : "")], ["weights", FOUND.weights], ["KL", `to ${FOUND.kl_anchor}`]];
  fill(
    host,
    el("h1", null, `Replay of step ${FOUND.step}, update ${FOUND.update}`),
    el("section", { class: "run" },
      el("p", null, el("span", { class: good === false ? "badge bad" : "badge good", "data-fact": "reproduced" }, good === null ? "update skipped" : good ? "reproduced" : "not reproduced"), good === null ? HEAD.verdict : HEAD.verdict.slice(HEAD.verdict.indexOf(": ") + 2)),
      el("dl", null, facts.map(([label, text]) => el("div", null, el("dt", null, label), el("dd", null, text)))),
    ),
  );
}

/** A share as percent, any other number as it is; both with all digits in an attribute. */
function value(row, key) {
  const x = row[key];
  const props = { "data-loss": row.name, "data-key": key };
  return SHARES.has(key) && isNumber(x) ? fill(number(x, props), percent(x)) : number(x, props);
}

function lossTable() {
  const rows = FOUND.losses.map((row) => [row.name, ...OF_LOSS.map((key) => value(row, key))]);
  return [table(HEAD.columns, rows, { id: "losses" }), el("p", { class: "hint" }, HEAD.meanings.join(" "))];
}

/** Cosine of each layer's gradient with that of the run's loss, in the order of the model. */
function layerTable() {
  if (!others.length) return [];
  const layers = [...new Set(Object.keys(FOUND.losses[0].layers).concat(...others.map((row) => Object.keys(row.layers))))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  const cell = (row, layer) => {
    const node = number(row.layers[layer], { "data-loss": row.name, "data-layer": layer });
    node.style.background = isNumber(row.layers[layer]) ? tint(row.layers[layer] < 0 ? -1 : 1 - row.layers[layer]) : "";
    return node;
  };
  const rows = layers.map((layer) => [layer, ...others.map((row) => cell(row, layer))]);
  return [el("h3", null, "Cosine of the gradients, by layer"), el("p", { class: "hint" }, "With the run's loss. Orange: below 1; blue: below 0."), table(["layer", ...others.map((row) => row.name)], rows, { id: "layers" })];
}

function disagreementTables(samples) {
  const at = new Map(samples.map((one) => [one.number, one]));
  return others.map((row) => {
    const found = HEAD.disagreements[row.name];
    const counts = ["opposite", "one_silent"].map((key) => [number(found[key], { "data-loss": row.name, "data-count": key }), key === "opposite" ? " opposite, " : " with one silent, of "]);
    const lines = found.worst.filter((one) => at.has(one.sample)).map((one) => tokenLine(at.get(one.sample), one));
    return el("details", { class: "disagreements", "data-loss": row.name }, el("summary", null, row.name, ": ", counts, number(found.counted), " tokens"), lines.length > 0 && table(["token", "sample", "run", row.name, ""], lines));
  });
}

function tokenLine(sample, one) {
  const near = (from, to) => sample.pieces.slice(Math.max(from, 0), to).join("").replaceAll("\n", "⏎");
  const text = el("code", { class: "near", "data-token": `${one.sample}/${one.token}` }, near(one.token - 6, one.token), el("mark", null, near(one.token, one.token + 1)), near(one.token + 1, one.token + 4));
  const where = el("button", { onclick: () => showSample(one.sample) }, `group ${sample.group}, sample ${sample.sample}, token ${one.token}`);
  return [text, where, number(one.of_run), number(one.of_loss), one.judged === OPPOSITE ? "opposite" : "one silent"];
}

function showSample(n) {
  Object.assign(shown, { number: n, mode: "judged" });
  drawMaps().then(() => document.getElementById("maps").scrollIntoView());
}

/** The chosen sample once for each loss. */
async function drawMaps() {
  const samples = await block("samples");
  const one = samples.find((x) => x.number === shown.number) || samples[0];
  const named = (x) => `group ${x.group}, sample ${x.sample}, reward ${format(x.reward)}`;
  const slopes = Object.values(one.losses).flatMap((loss) => [...floats(loss.slope)].map((x) => -x));
  const scale = strengths(["signed", 0], slopes);
  fill(
    document.getElementById("maps"),
    el("h3", null, "Maps"),
    el("div", { class: "controls" },
      el("label", null, "sample ", select(samples.map((x) => [x.number, named(x)]), one.number, (x) => { shown.number = Number(x); drawMaps(); }, "sample")),
      el("label", null, "color by ", select(Object.entries(MODES).map(([key, [title]]) => [key, title]), shown.mode, (x) => { shown.mode = x; drawMaps(); }, "color by")),
      samples.length < HEAD.samples && el("span", { class: "hint" }, `${samples.length} of ${HEAD.samples} samples: those with most to see`),
    ),
    el("p", { class: "hint" }, MODES[shown.mode][1]),
    el("div", { class: "siblings" }, FOUND.losses.map((row) => lossMap(row.name, one, scale.full))),
  );
}

function lossMap(name, sample, full) {
  const packed = sample.losses[name];
  const columns = { slope: floats(packed.slope), clipped: packed.clipped && floats(packed.clipped), judged: floats(packed.judged) };
  const strength = {
    clipped: (i) => (columns.clipped && columns.clipped[i] === 1 ? 1 : 0),
    slope: (i) => Math.max(-1, Math.min(1, -columns.slope[i] / full)),
    judged: (i) => ({ [OPPOSITE]: -1, [ONE_SILENT]: 0.6 })[columns.judged[i]] || 0,
  }[shown.mode];
  const told = (column, i) => (!column || Number.isNaN(column[i]) ? "" : String(column[i]));
  const trained = columns.slope.filter((x) => !Number.isNaN(x)).length;
  const clipped = columns.clipped && columns.clipped.filter((x) => x === 1).length;
  const tokens = sample.pieces.map((piece, i) => {
    const facts = { slope: told(columns.slope, i), clipped: told(columns.clipped, i), judged: told(columns.judged, i) };
    return el("span", { class: facts.slope ? "token" : "token untrained", "data-slope": facts.slope, "data-clipped": facts.clipped, "data-judged": facts.judged, title: facts.slope && `token ${i}, gradient ${facts.slope}`, style: { background: tint(strength(i)) } }, piece.replaceAll("\n", "⏎\n"));
  });
  const said = clipped === null ? "it does not say what it clips" : [number(clipped, { "data-loss": name, "data-count": "clipped" }), " clipped"];
  return el("section", { class: "map", "data-loss": name }, el("h4", null, name, ": ", number(trained), " tokens trained on, ", said), el("div", { class: "tokens" }, tokens));
}

async function start() {
  try {
    showFound(document.getElementById("header"));
    const samples = await block("samples");
    fill(document.getElementById("main"), lossTable(), layerTable(), others.length > 0 && [el("h3", null, "Tokens that the losses disagree on"), el("p", { class: "hint" }, "The numbers are derivatives of the update's loss by the token's log-probability: a step makes the token likelier where it is negative.")], disagreementTables(samples), el("div", { id: "maps" }));
    if (samples.length) await drawMaps();
    document.body.dataset.ready = String(performance.now());
  } catch (error) {
    document.body.dataset.failed = String(error);
    document.getElementById("header").textContent = `This page could not be shown: ${error}`;
    throw error;
  }
}

start();
