"use strict";
// Draws the figures from the numbers in #data, and switches methods and metrics.

const DATA = JSON.parse(document.getElementById("data").textContent);
const CONFIG = { responsive: true, displaylogo: false, showSendToCloud: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
const DASHES = { solid: "", dash: "7 4", dot: "2 4", dashdot: "8 4 2 4" };
const REFERENCE_DASHES = ["dot", "dash", "dashdot"];
// Blue over white to red, purple over white to orange: as in the figures for papers.
const VALUES = ["#2166ac", "#92c5de", "#f7f7f7", "#f4a582", "#b2182b"];
const ERRORS = ["#542788", "#b2abd2", "#f7f7f7", "#fdb863", "#b35806"];
const KINDS = { paper: "the paper's", control: "controls", ours: "ours", peer: "peers", variant: "other settings" };

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const faded = (colour) => colour + "2e";

function layout(options) {
  const axis = { gridcolor: css("--line"), zeroline: false, automargin: true, exponentformat: "power", minexponent: 5 };
  return {
    font: { family: "system-ui, 'Segoe UI', Arial, sans-serif", size: 14, color: css("--text") },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 64, r: 14, t: 30, b: 52 }, hovermode: "closest", showlegend: false,
    hoverlabel: { font: { size: 14 } }, modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--soft"), activecolor: css("--text") },
    ...options, xaxis: { ...axis, ...options.xaxis }, yaxis: { ...axis, ...options.yaxis },
  };
}

function logAxis(values) {
  const known = values.filter((value) => value > 0);
  const decades = Math.log10(Math.max(...known) / Math.min(...known));
  return { type: "log", dtick: decades > 1.5 ? Math.ceil(decades / 8) : "D2" };
}

// The curves of a task

function bandTrace(group, curve, x) {
  const inside = curve.mean.map((_, i) => i).filter((i) => curve.low[i] !== null && x[i] !== null);
  const there = (values) => inside.map((i) => values[i]);
  return {
    x: there(x).concat(there(x).reverse()), y: there(curve.high).concat(there(curve.low).reverse()),
    fill: "toself", fillcolor: faded(group.colour), line: { width: 0 }, mode: "lines", hoverinfo: "skip", meta: group.variant,
  };
}

function meanTrace(group, curve, x) {
  const ends = curve.low ? "<br>95 % interval %{customdata[0]:.3g} to %{customdata[1]:.3g}" : "";
  return {
    x, y: curve.mean, name: group.label, mode: "lines", line: { color: group.colour, dash: group.dash, width: 2 }, meta: group.variant,
    customdata: curve.low ? curve.low.map((low, i) => [low, curve.high[i]]) : null,
    hovertemplate: `<b>${escaped(group.label)}</b><br>%{y:.4g} at %{x:.4g}${ends}<extra></extra>`,
  };
}

function divergedTrace(group, curve, x) {
  return {
    x, y: curve.mean, mode: "lines+markers", meta: group.variant, opacity: 0.8, line: { color: group.colour, dash: group.dash, width: 1 },
    marker: { color: group.colour, symbol: "x", size: x.map((_, i) => (i === x.length - 1 ? 9 : 0)) },
    hovertemplate: `<b>${escaped(group.label)}</b>, diverged<br>%{y:.4g} at %{x:.4g}<extra></extra>`,
  };
}

function groupTraces(group, curves, budget) {
  const traces = curves.diverged.map((curve) => divergedTrace(group, curve, curve[budget]));
  if (!curves.mean) return traces;
  const x = curves.mean[budget];
  if (curves.mean.low) traces.push(bandTrace(group, curves.mean, x));
  return traces.concat(meanTrace(group, curves.mean, x));
}

// Means over the most seeds that all shown methods have, so that easy seeds favour none; -1 where they share none.
const commonSeeds = (data, metric, shown) => data.seedCounts.findIndex((_, seeds) => shown.every((group) => seeds in metric.curves[group.variant]));

function seedsInWords(data, common, shown) {
  if (!shown.length) return "";
  if (common < 0) return "These methods have no seeds in common: each mean is over its own.";
  return data.seedCounts[common] === 1 ? "One seed, which all methods shown have: no band." : `Means over the ${data.seedCounts[common]} seeds that all methods shown have.`;
}

function referenceTraces(metric, budget, drawn) {
  const ends = drawn.flatMap(([, curves]) => curves.mean?.[budget] ?? []);
  const x = [Math.min(...ends), Math.max(...ends)];
  return Object.entries(ends.length ? metric.references : {}).map(([name, value], i) => ({
    x, y: [value, value], name, mode: "lines", line: { color: css("--text"), width: 1.2, dash: REFERENCE_DASHES[i % 3] },
    hovertemplate: `<b>${escaped(name)}</b><br>%{y:.4g}<extra></extra>`,
  }));
}

const drawnValues = (drawn, name) => drawn.flatMap(([, curves]) => curves.mean?.[name] ?? []).filter((value) => value !== null);

// Means and references with room for their bands: neither a wide band nor what diverged takes up the figure.
function logRange(drawn, values) {
  const low = Math.min(...values, ...drawnValues(drawn, "low"));
  const high = Math.max(...values, ...drawnValues(drawn, "high"));
  return [Math.max(low, Math.min(...values) / 3) / 1.1, Math.min(high, Math.max(...values) * 3) * 1.1].map(Math.log10);
}

const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;");

function drawTask(state) {
  const metric = state.data.metrics[state.metric];
  const shown = state.data.groups.filter((group) => !state.hidden.has(group.variant));
  const common = commonSeeds(state.data, metric, shown);
  const drawn = shown.map((group) => [group, metric.curves[group.variant][common < 0 ? group.ownSeeds : common]]);
  const values = drawnValues(drawn, "mean").concat(Object.values(metric.references));
  const range = metric.log && values.length ? logRange(drawn, values) : undefined;
  for (const plot of state.plots) {
    const budget = plot.dataset.budget;
    const traces = drawn.flatMap(([group, curves]) => groupTraces(group, curves, budget));
    const yaxis = { title: { text: metric.label }, ...(metric.log && values.length ? logAxis(values) : {}), ...(range ? { range } : {}) };
    const options = layout({ xaxis: { title: { text: state.data.axes[budget] }, rangemode: "tozero" }, yaxis });
    Plotly.react(plot, traces.concat(referenceTraces(metric, budget, drawn)), options, CONFIG);
  }
  const brief = shown.length && shown.every((group) => group.kind !== "variant");
  state.buttons.forEach((button, i) => {
    button.setAttribute("aria-pressed", String(!state.hidden.has(button.dataset.variant)));
    button.hidden = brief && state.data.groups[i].kind === "variant"; // there may be dozens
  });
  state.seeds.textContent = seedsInWords(state.data, common, shown);
  drawReferenceLegend(state, metric);
}

// Legend: a click switches a method off or on in both figures, a double click leaves it alone

function swatch(colour, dash) {
  return `<svg width="30" height="10" aria-hidden="true"><line x1="1" y1="5" x2="29" y2="5" stroke="${colour}" stroke-width="3" stroke-dasharray="${DASHES[dash]}"/></svg>`;
}

function legendButton(state, group) {
  const button = document.createElement("button");
  button.type = "button";
  button.dataset.variant = group.variant;
  button.innerHTML = swatch(group.colour, group.dash);
  button.append(group.label + (group.remark ? ` (${group.remark})` : ""));
  button.addEventListener("click", () => {
    if (!state.hidden.delete(group.variant)) state.hidden.add(group.variant);
    drawTask(state);
  });
  button.addEventListener("dblclick", () => show(state, (other) => other === group));
  return button;
}

function drawReferenceLegend(state, metric) {
  state.legend.querySelectorAll(".reference").forEach((item) => item.remove());
  Object.keys(metric.references).forEach((name, i) => {
    const item = document.createElement("span");
    item.className = "reference";
    item.innerHTML = swatch("currentColor", REFERENCE_DASHES[i % 3]);
    item.append(name);
    state.legend.append(item);
  });
}

function show(state, wanted) {
  state.hidden = new Set(state.data.groups.filter((group) => !wanted(group)).map((group) => group.variant));
  drawTask(state);
}

function presetButtons(state) {
  const kinds = Object.keys(KINDS).filter((kind) => state.data.groups.some((group) => group.kind === kind));
  const presets = kinds.map((kind) => [KINDS[kind], (group) => group.kind === kind || group.variant === "base"]);
  return [...(kinds.length > 1 ? presets : []), ["all", () => true], ["none", () => false]].map(([label, wanted]) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = label;
    button.addEventListener("click", () => show(state, wanted));
    return button;
  });
}

function startTask(section) {
  const data = DATA.tasks[section.dataset.task];
  const select = section.querySelector(".metric");
  const legend = section.querySelector(".legend");
  const seeds = section.querySelector(".seeds");
  const state = { data, legend, seeds, metric: select.value, hidden: new Set(), plots: section.querySelectorAll(".plots .plot") };
  state.buttons = data.groups.map((group) => legendButton(state, group));
  legend.append(...state.buttons);
  section.querySelector(".presets").append(...presetButtons(state));
  select.addEventListener("change", () => { state.metric = select.value; drawTask(state); });
  const crowded = data.groups.length > 6 && data.groups.some((group) => group.kind === "paper");
  show(state, (group) => !crowded || group.kind === "paper");
  return () => drawTask(state);
}

// Solutions, and the figures behind the claims

function drawPictures(section) {
  const box = section.querySelector(".pictures");
  if (!box) return;
  const largest = (rows) => Math.max(...rows.flat().map(Math.abs));
  const pictures = DATA.pictures[section.dataset.task];
  const worst = Math.max(...pictures.map((picture) => largest(picture.error)));
  const images = pictures.flatMap((picture) => {
    const size = largest(picture.exact);
    const fields = [["exact", "exact", size], ["predicted", picture.label, size], ["error", "error", worst]];
    return fields.map((field) => [picture, ...field]);
  });
  // All boxes first: how wide one is depends on how many there are.
  const plots = images.map(pictureBox);
  box.replaceChildren(...plots.map((plot) => plot.parentElement));
  images.forEach((image, i) => drawHeatmap(plots[i], ...image));
}

function pictureBox() {
  const plot = document.createElement("div");
  plot.className = "picture";
  document.createElement("figure").append(plot);
  return plot;
}

function drawHeatmap(plot, picture, name, title, limit) {
  const colorscale = (name === "error" ? ERRORS : VALUES).map((colour, i) => [i / 4, colour]);
  const trace = {
    type: "heatmap", x: picture.t, y: picture.x, z: picture[name], zmin: -limit, zmax: limit, colorscale, zsmooth: "best",
    colorbar: { thickness: 10, outlinewidth: 0, exponentformat: "power" }, hovertemplate: "t %{x}, x %{y}: %{z:.3g}<extra></extra>",
  };
  const options = { title: { text: escaped(title), font: { size: 15 } }, margin: { l: 50, r: 10, t: 36, b: 46 }, xaxis: { title: { text: "t" } }, yaxis: { title: { text: "x" } } };
  Plotly.newPlot(plot, [trace], layout(options), { ...CONFIG, displayModeBar: false });
}

function drawClaim(plot) {
  const claim = DATA.claims[plot.dataset.claim];
  const traces = claim.series.map((series) => ({
    x: series.x, y: series.y, name: escaped(series.name), mode: series.x.length > 20 ? "lines" : "lines+markers",
    line: { color: series.colour, dash: series.dash, width: 2 },
  }));
  const values = (name) => claim.series.flatMap((series) => series[name]);
  const axis = (label, log, name) => ({ title: { text: escaped(label) }, ...(log ? logAxis(values(name)) : {}) });
  const options = {
    title: { text: escaped(claim.title), font: { size: 15 }, x: 0.01, xanchor: "left" }, showlegend: claim.series.length > 1, legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom" },
    margin: { l: 60, r: 14, t: 40, b: claim.series.length > 1 ? 50 + 24 * Math.ceil(claim.series.length / 2) : 50 }, xaxis: axis(claim.xLabel, claim.logX, "x"), yaxis: axis(claim.yLabel, claim.logY, "y"),
  };
  Plotly.react(plot, traces, layout(options), CONFIG);
}

const sections = [...document.querySelectorAll("section.task")];
const redraw = sections.map(startTask);
function drawRest() {
  sections.forEach(drawPictures);
  document.querySelectorAll(".plot.claim").forEach(drawClaim);
}
drawRest();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { redraw.forEach((draw) => draw()); drawRest(); });
