// The runs of the page, and the files beside it.

const RUNS = HEAD.runs;
RUNS.forEach((run, i) => {
  run.color = color(i);
  run.shown = true;
});
const runOf = (key) => RUNS.find((run) => run.key === key);
const arriving = new Map();

/** Load a file beside the page by a script element, which works without a server. It takes the place of the block. */
function loadBeside(name) {
  const loaded = new Promise((resolve, reject) => {
    arriving.set(name, resolve);
    const script = el("script", { src: `${encodeURIComponent(HEAD.files)}/${encodeURIComponent(name)}.js` });
    script.onerror = () => reject(new Error(`${HEAD.files}/${name}.js is not beside this page`));
    document.head.append(script);
  }).then(decode);
  return loaded.then((value) => {
    blocks.set(name, Promise.resolve(value));
    return value;
  });
}

window.feynrl_receive = (name, base64) => {
  const resolve = arriving.get(name);
  arriving.delete(name);
  if (resolve) resolve(base64);
};

/** Decode the metrics of every run: run.steps, run.values by name, run.tokens by part, run.minutes. */
async function loadMetrics() {
  for (const run of RUNS) {
    const got = await block(`metrics-${run.key}`);
    Object.assign(run, { steps: got.steps, trained: got.trained, values: got.values, tokens: got.tokens });
    let seconds = 0;
    const each = run.values["time/step_s"] || [];
    run.minutes = run.steps.map((_, i) => (seconds += each[i] || 0) / 60);
  }
}

const sum = (values) => values.reduce((total, x) => total + (isNumber(x) ? x : 0), 0);
const indexOfStep = (run, step) => run.steps.indexOf(step);
const stepsWithSamples = (run) => Object.keys(run.sample_counts).map(Number).sort((a, b) => a - b);
const nearest = (list, x) => list.reduce((best, y) => (Math.abs(y - x) < Math.abs(best - x) ? y : best), list[0]);
