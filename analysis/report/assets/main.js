// Tabs, and the way to them: #samples/r0/10 opens step 10 of the first run, so a link leads to what one saw.

const TABS = {
  curves: ["Curves", showCurves],
  time: ["Time", showTime],
  tokens: ["Tokens", showTokens],
  fell: ["What fell", showFell],
  samples: ["Samples", showSamples],
  microscope: ["Microscope", showMicroscope],
  recipe: ["Recipe", showRecipe],
};

/** Show a place; the page's address follows. */
function go(where) {
  if (location.hash === `#${where}`) render();
  else location.hash = where;
}

async function render() {
  const [tab, ...rest] = location.hash.slice(1).split("/").map(decodeURIComponent);
  const name = tab in TABS ? tab : "curves";
  fill(document.getElementById("tabs"), Object.entries(TABS).map(([key, [title]]) => el("button", { "data-tab": key, class: key === name ? "current" : "", onclick: () => go(key) }, title)));
  const host = el("div", { class: "tab", "data-name": name });
  document.getElementById("main").replaceChildren(host);
  await TABS[name][1](host, rest);
  host.dataset.done = "yes";
}

async function start() {
  try {
    await loadMetrics();
    showHeader(document.getElementById("header"));
    await render();
    window.addEventListener("hashchange", render);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", render);
    document.body.dataset.ready = String(performance.now());
  } catch (error) {
    document.body.dataset.failed = String(error);
    document.getElementById("header").textContent = `This page could not be shown: ${error}`;
    throw error;
  }
}

start();
