// Tokens with colours: columns of numbers, how strongly each colours its token, and the scale of that.

function floats(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return new Float32Array(bytes.buffer);
}

/** How strongly each token is coloured, -1 to 1, NaN where it is not trained on; and the value of 1.
 * kind: signed, positive or negative values; middle: the value without colour. */
function strengths([kind, middle], values) {
  const known = [...values].filter(Number.isFinite);
  const away = known.map((x) => Math.abs(x - middle)).sort((a, b) => a - b);
  const full = away[Math.floor(0.98 * (away.length - 1))] || away[away.length - 1] || 1; // two in a hundred may lie beyond
  const sign = kind === "negative" ? -1 : 1;
  return { kind, middle, full, of: [...values].map((x) => Math.max(-1, Math.min(1, (sign * (x - middle)) / full))) };
}

const tint = (x) => (Number.isFinite(x) ? `rgb(${x < 0 ? "64 120 214" : "226 96 40"} / ${(0.85 * Math.abs(x)).toFixed(3)})` : "");

function colorScale({ kind, middle, full }) {
  const stops = kind === "signed" ? [-1, -0.5, 0, 0.5, 1] : [0, 0.25, 0.5, 0.75, 1];
  const sign = kind === "negative" ? -1 : 1;
  return el("div", { class: "scale" }, stops.map((x) => el("span", { style: { background: tint(x) } }, format(Number((middle + sign * x * full).toPrecision(3))))), el("span", { class: "token untrained" }, "not trained on"));
}
