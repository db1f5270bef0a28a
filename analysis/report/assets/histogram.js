// A histogram of one number of a step's samples; a click on a bar keeps the groups that have such a sample.

const BINS = 20;

/** Bins of equal width over all values; few different values get a bin each. */
function makeBins(values) {
  const known = values.filter(isNumber);
  if (!known.length) return [];
  const different = [...new Set(known)].sort((a, b) => a - b);
  if (different.length <= BINS) return different.map((x) => ({ from: x, to: x, holds: (y) => y === x }));
  const low = different[0];
  const width = (different[different.length - 1] - low) / BINS;
  return Array.from({ length: BINS }, (_, i) => {
    const from = low + i * width;
    const last = i === BINS - 1;
    return { from, to: from + width, holds: (y) => isNumber(y) && y >= from && (last || y < from + width) };
  });
}

/** The numbers of a step that can be counted, by what the reader calls them. */
function countable(step) {
  const found = { reward: step.reward };
  for (const [part, values] of Object.entries(step.parts)) found[`reward/${part}`] = values;
  return { ...found, advantage: step.advantage, "sampled tokens": step.tokens };
}

/** onpick: called with the numbers of the samples in a bar, or null when the choice is taken back. */
function histogram(step, onpick) {
  const numbers = countable(step);
  const host = el("div", { class: "histogram" });
  const show = (name) => fill(host, barsOf(numbers[name], onpick));
  const known = Object.keys(numbers).filter((name) => numbers[name].some(isNumber));
  if (!known.length) return el("p", { class: "hint" }, "no sample of this step has a reward");
  show(known[0]);
  return el("div", null, el("label", null, "histogram of ", select(known.map((name) => [name, name]), known[0], (name) => { onpick(null); show(name); }, "histogram of")), host);
}

function barsOf(values, onpick) {
  const bins = makeBins(values).map((bin) => ({ ...bin, members: values.flatMap((x, i) => (bin.holds(x) ? [i] : [])) }));
  const most = Math.max(...bins.map((bin) => bin.members.length));
  let picked = null;
  const bars = bins.map((bin, i) => {
    const range = bin.from === bin.to ? format(bin.from) : `${format(bin.from)} to ${format(bin.to)}`;
    return el(
      "button",
      {
        class: "bar", title: `${range}: ${bin.members.length} samples`, "data-from": String(bin.from), "data-count": String(bin.members.length),
        onclick: () => {
          picked = picked === i ? null : i;
          bars.forEach((bar, j) => bar.classList.toggle("picked", j === picked));
          onpick(picked === null ? null : new Set(bin.members));
        },
      },
      el("span", { class: "bar-count" }, bin.members.length || ""),
      el("span", { class: "bar-fill", style: { height: `${(90 * bin.members.length) / most}px` } }),
      el("span", { class: "bar-label" }, bins.length <= 8 || i % 4 === 0 ? format(Number(bin.from.toPrecision(3))) : "\u00a0"),
    );
  });
  return bars;
}
