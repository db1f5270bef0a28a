// Columns of stacked parts, one per step, on a canvas; and one step's parts as a strip.

const HEIGHT = 190;
const LEFT = 58;
const BOTTOM = 22;

/** Draw stacked columns. parts: [{name, color, values}], title of a part in `meaning`; onstep: called at a click. */
function stacked({ steps, parts, unit, share, onstep }) {
  const shown = parts.filter((part) => part.values.some((x) => x));
  const canvas = el("canvas", { class: "stacked" });
  const tip = el("div", { class: "tip", hidden: true });
  const box = el("div", { class: "stacked-box" }, canvas, tip);
  const totals = steps.map((_, i) => sum(shown.map((part) => part.values[i])));
  steps = steps.slice(0, totals.findLastIndex((x) => x) + 1); // an evaluation after training is no step
  const top = share ? 1 : Math.max(...totals, 1e-9);
  const draw = () => drawColumns(canvas, box.clientWidth, { steps, shown, totals, top, share, unit });
  const at = (event) => {
    const width = (box.clientWidth - LEFT) / steps.length;
    const i = Math.floor((event.offsetX - LEFT) / width);
    return i >= 0 && i < steps.length ? i : -1;
  };
  canvas.addEventListener("mousemove", (event) => {
    const i = at(event);
    tip.hidden = i < 0;
    if (i < 0) return;
    fill(
      tip,
      el("b", null, `step ${steps[i]}`),
      [...shown].reverse().map((part) =>
        el("div", null, el("i", { class: "dot", style: { background: part.color } }), `${part.name}: ${format(part.values[i])} ${unit}`, ` (${percent((part.values[i] || 0) / totals[i])})`),
      ),
    );
    const right = event.offsetX > box.clientWidth / 2;
    tip.style.left = right ? "" : `${event.offsetX + 14}px`;
    tip.style.right = right ? `${box.clientWidth - event.offsetX + 14}px` : "";
  });
  canvas.addEventListener("mouseleave", () => (tip.hidden = true));
  canvas.addEventListener("click", (event) => at(event) >= 0 && onstep && onstep(steps[at(event)]));
  watchWidth(box, draw);
  return el("div", null, box, legend(shown, unit));
}

/** Redraw when the width of a box changes, and once at first. */
function watchWidth(box, draw) {
  new ResizeObserver(() => box.clientWidth && draw()).observe(box);
}

function drawColumns(canvas, width, { steps, shown, totals, top, share, unit }) {
  const scale = window.devicePixelRatio || 1;
  canvas.width = width * scale;
  canvas.height = (HEIGHT + BOTTOM) * scale;
  canvas.style.height = `${HEIGHT + BOTTOM}px`;
  const ink = canvas.getContext("2d");
  ink.scale(scale, scale);
  ink.font = "11px system-ui, sans-serif";
  ink.fillStyle = ink.strokeStyle = themed("--muted");
  ink.textAlign = "right";
  for (const part of [0, 0.5, 1]) {
    const y = 8 + (HEIGHT - 8) * (1 - part);
    ink.globalAlpha = 0.35;
    ink.fillRect(LEFT, y, width - LEFT, 0.5);
    ink.globalAlpha = 1;
    ink.fillText(share ? `${100 * part} %` : format(Number((top * part).toPrecision(3))) + (unit === "s" ? " s" : ""), LEFT - 6, y + 4);
  }
  const per = Math.max(1, Math.ceil(steps.length / (width - LEFT))); // steps of a column of at least one pixel
  const column = ((width - LEFT) * per) / steps.length;
  for (let first = 0; first < steps.length; first += per) {
    const last = Math.min(first + per, steps.length);
    const total = sum(totals.slice(first, last)) || 1;
    let y = HEIGHT;
    for (const part of shown) {
      const value = sum(part.values.slice(first, last)) / (share ? total : (last - first) * top);
      ink.fillStyle = part.color;
      ink.fillRect(LEFT + (first / per) * column, y - value * (HEIGHT - 8), column - (column > 4 ? 1 : 0), value * (HEIGHT - 8));
      y -= value * (HEIGHT - 8);
    }
  }
  ink.fillStyle = themed("--muted");
  ink.textAlign = "center";
  const every = Math.max(1, Math.ceil((steps.length * 46) / (width - LEFT)));
  for (let i = 0; i < steps.length; i += every) ink.fillText(String(steps[i]), LEFT + ((i + 0.5) * column) / per, HEIGHT + 15);
}

/** Names, totals and shares of the parts. */
function legend(parts, unit) {
  const total = sum(parts.map((part) => sum(part.values)));
  return el(
    "div",
    { class: "legend" },
    parts.map((part) =>
      el(
        "span",
        { title: part.meaning, "data-part": part.name },
        el("i", { class: "dot", style: { background: part.color } }),
        `${part.name} `,
        number(sum(part.values)),
        ` ${unit} (${percent(sum(part.values) / total)})`,
      ),
    ),
  );
}

/** One step's parts as a strip; parts: [{name, color, value}]. The whole width is `whole`. */
function strip(label, parts, whole) {
  return el(
    "div",
    { class: "strip-row" },
    el("span", { class: "strip-label" }, label),
    el(
      "div",
      { class: "strip" },
      parts
        .filter((part) => part.value > 0)
        .map((part) =>
          el(
            "div",
            { class: part.color === QUIET ? "quiet" : undefined, title: `${part.name}: ${format(part.value)} s`, style: { width: `${(100 * part.value) / whole}%`, background: part.color } },
            part.value / whole > 0.08 ? `${part.name} ${format(Number(part.value.toPrecision(3)))} s` : "",
          ),
        ),
    ),
  );
}
